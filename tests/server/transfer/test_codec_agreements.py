"""An update is accepted in the codecs that its tasks named, also after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fairfleet.common.codecs import ABILITIES
from fairfleet.common.errors import BadRequest
from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model
from fairfleet.server.rounds.state_machine import Phase, Round
from fairfleet.server.storage.store import Store
from fairfleet.server.transfer.codec_agreements import (
    ROUNDS_REMEMBERED,
    SETTINGS_REMEMBERED,
    CodecAgreements,
    CodecSettings,
    record_settings,
    settings_since,
)
from fairfleet.server.transfer.codec_selection import LADDER, CodecPolicy
from fairfleet.server.transfer.upload import AnnouncedUpdate, check_codec

POLICY = CodecPolicy("int8", {"slow": "topk:0.01"}, 10, 40_000_000)
AUTO = replace(POLICY, default="auto")
REPORT = TrainReport(samples=10, loss_before=1.0, loss_after=0.5, steps=1, learning_rate=0.1)


def settings_of(policy: CodecPolicy, since: int = 0) -> CodecSettings:
    """Return the record of a policy."""
    return CodecSettings(since, policy.default, dict(policy.of_clients))


def fresh(policy: CodecPolicy = POLICY) -> CodecAgreements:
    """Return the agreements of a server that starts for the first time."""
    return CodecAgreements(policy, [settings_of(policy)], 0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Yield a store with a federation."""
    store = Store(tmp_path)
    model = Model.of({"w": np.zeros(3, np.float32)})
    store.create("test", model, bytes(32))
    yield store
    store.close()


# ---- in one run of the server ------------------------------------------------------------------


def test_only_the_codec_that_was_named_is_accepted() -> None:
    agreements = fresh(AUTO)
    assert agreements.name_codec("ann", 1, ABILITIES, 1e9) == "bf16"
    assert agreements.accepted("ann", 1, ABILITIES) == {"bf16"}


def test_every_task_of_a_round_names_the_same_codec_even_if_the_uplink_changes() -> None:
    agreements = fresh(AUTO)
    assert [agreements.name_codec("ann", 1, ABILITIES, uplink) for uplink in (None, 1e9, 1.0)] == [
        "int8"
    ] * 3
    assert agreements.name_codec("ann", 2, ABILITIES, 1e9) == "bf16"


def test_a_client_that_no_longer_supports_its_codec_gets_another_and_both_count() -> None:
    agreements = fresh()
    agreements.name_codec("ann", 1, ABILITIES)
    assert agreements.name_codec("ann", 1, ["raw32"]) == "raw32"
    assert agreements.accepted("ann", 1, ["raw32"]) == {"int8", "raw32"}


def test_old_agreements_are_forgotten_and_the_settings_decide() -> None:
    agreements = fresh(AUTO)
    for number in range(1, ROUNDS_REMEMBERED + 2):
        agreements.name_codec("ann", number, ABILITIES, 1e9)
    assert agreements.accepted("ann", 2, ABILITIES) == {"bf16"}
    assert agreements.accepted("ann", 1, ABILITIES) == set(LADDER)


# ---- after restarts ----------------------------------------------------------------------------


def test_the_settings_decide_in_the_round_of_a_restart() -> None:
    agreements = CodecAgreements(AUTO, [settings_of(AUTO)], 5)
    agreements.name_codec("ann", 5, ABILITIES)
    agreements.name_codec("ann", 6, ABILITIES)
    assert agreements.accepted("ann", 5, ABILITIES) == set(LADDER)
    assert agreements.accepted("ann", 6, ABILITIES) == {"int8"}
    assert agreements.accepted("slow", 5, ABILITIES) == {"topk:0.01"}


def test_the_codecs_of_former_settings_are_accepted_until_the_round_is_over() -> None:
    now = replace(POLICY, default="topk:0.1")
    agreements = CodecAgreements(now, [settings_of(POLICY), settings_of(now, 5)], 5)
    assert agreements.name_codec("ann", 5, ABILITIES) == "topk:0.1"
    assert agreements.accepted("ann", 5, ABILITIES) == {"int8", "topk:0.1"}
    assert agreements.accepted("ann", 4, ABILITIES) == {"int8", "topk:0.1"}
    agreements.name_codec("ann", 6, ABILITIES)
    assert agreements.accepted("ann", 6, ABILITIES) == {"topk:0.1"}


def test_settings_are_in_effect_until_the_round_in_which_others_replace_them() -> None:
    first, second, third = recorded = [CodecSettings(since, "int8", {}) for since in (0, 5, 9)]
    assert settings_since(recorded, 5) == [first, second, third]
    assert settings_since(recorded, 6) == [second, third]
    assert settings_since(recorded, 10) == [third]


def test_settings_are_recorded_when_they_change_and_only_then(store: Store) -> None:
    changed = replace(POLICY, of_clients={})
    assert record_settings(store, POLICY, Round(0)) == [settings_of(POLICY)]
    assert record_settings(store, POLICY, Round(4, Phase.TRAINING)) == [settings_of(POLICY)]
    recorded = record_settings(store, changed, Round(7, Phase.TRAINING))
    assert recorded == [settings_of(POLICY), settings_of(changed, 7)]
    for number in range(8, 60):
        recorded = record_settings(
            store, replace(POLICY, default=f"topk:0.{number:02}"), Round(number)
        )
    assert len(recorded) == SETTINGS_REMEMBERED


def test_every_codec_is_accepted_for_rounds_of_a_version_without_records(
    store: Store,
) -> None:
    recorded = record_settings(store, POLICY, Round(3, Phase.TRAINING))
    agreements = CodecAgreements(POLICY, recorded, 3)
    assert agreements.accepted("ann", 3, ABILITIES) is None
    agreements.name_codec("ann", 4, ABILITIES)
    assert agreements.accepted("ann", 4, ABILITIES) == {"int8"}


# ---- the check ---------------------------------------------------------------------------------


def test_the_refusal_names_both_codecs() -> None:
    announced = AnnouncedUpdate("ann", 3, "raw32", 10, bytes(32), REPORT)
    with pytest.raises(
        BadRequest, match=r"round 4 is in codec raw32; its task named bf16 or int8\. Encode"
    ):
        check_codec(announced, {"int8", "bf16"})
    check_codec(announced, {"raw32"})
    check_codec(announced, None)
