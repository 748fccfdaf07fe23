"""Names: allowed characters, messages of refusals, and the exceptions of settings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.client.settings import ClientSettings
from fairfleet.common.errors import UsageError
from fairfleet.common.names import check_name, is_name, replace_forbidden
from fairfleet.server.settings import ServerSettings

NOT_NAMES = ["", ".", "..", "a/b", "a b", "ä", "a\n", "\n", "٣", "x" * 65, "a{replica}"]


@pytest.mark.parametrize("text", ["a", "A.b_c-9", "...", ".a", "x" * 64])
def test_a_name_is_returned_unchanged(text: str) -> None:
    assert check_name(text, "client name") == text


@pytest.mark.parametrize("text", NOT_NAMES)
def test_a_text_that_is_not_a_name_is_refused_with_the_callers_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"operator name .* is not 1 to 64 of a-z A-Z 0-9 \. _ -"):
        check_name(text, "operator name", UsageError)


def test_a_long_text_is_shortened_in_the_message() -> None:
    with pytest.raises(ValueError, match="3000000 characters") as error:
        check_name("c" * 3_000_000, "client name")
    assert len(str(error.value)) < 250


@given(st.text())
def test_any_text_becomes_a_name_or_is_empty(text: str) -> None:
    name = replace_forbidden(text)
    assert not name or is_name(name)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("{replica}" * 64, True),
        ("a-{replica}", True),
        (".", False),
        ("{replica}" * 65, False),
        ("{rep{replica}lica}", False),
        ("a b", False),
        ("a\n", False),
    ],
)
def test_the_number_of_a_replica_counts_as_one_character_of_a_clients_name(
    name: str, allowed: bool
) -> None:
    settings = {"name": name, "task": "m:t", "replica": "claim"}
    if allowed:
        assert ClientSettings.model_validate(settings).name == name
    else:
        with pytest.raises(ValueError, match="1 to 64"):
            ClientSettings.model_validate(settings)


@pytest.mark.parametrize(
    ("name", "allowed"), [("..", False), ("fleet-7", True), ("a/b", False), ("", False)]
)
def test_the_name_of_a_federation_is_checked_in_the_settings(name: str, allowed: bool) -> None:
    if allowed:
        assert ServerSettings.model_validate({"name": name}).name == name
    else:
        with pytest.raises(ValueError, match="federation name"):
            ServerSettings.model_validate({"name": name})
