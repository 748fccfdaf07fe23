"""The generated reference pages say what the code says."""

from __future__ import annotations

import pytest

from docs.generate.__main__ import FOLDER, pages
from docs.generate.settings import sections
from fairfleet.client.settings import ClientSettings
from fairfleet.server.settings import ServerSettings


@pytest.mark.parametrize("name", sorted(pages()))
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == pages()[name], "run `make reference`"


@pytest.mark.parametrize("settings", [ServerSettings, ClientSettings])
def test_every_setting_says_what_it_means(settings: type[ServerSettings | ClientSettings]) -> None:
    nameless = [
        f"{section.path}.{name}"
        for section in sections(settings)
        for name, field in section.model.model_fields.items()
        if not field.description and not hasattr(field.annotation, "model_fields")
    ]
    assert not nameless, "give these settings a description"
