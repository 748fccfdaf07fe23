"""docs/reference/rules.md has every rule, every parameter's name and every status of a rule."""

from __future__ import annotations

import re

import pytest

from fairfleet.server.rules.registry import listings
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "reference" / "rules.md").read_text(encoding="utf-8")
RULES = ROOT / "server" / "fairfleet" / "server" / "rules"


@pytest.mark.parametrize("name", sorted(listings()))
def test_the_page_has_every_rule(name: str) -> None:
    assert re.search(rf"(^#+ .*|^\| .*)`{name}`", PAGE, re.MULTILINE)


def test_the_page_has_every_status_that_a_rule_can_end_with() -> None:
    statuses = {
        status
        for file in RULES.rglob("*.py")
        for status in re.findall(r'status="(\w+)"', file.read_text(encoding="utf-8"))
    }
    assert {"pareto_stationary", "all_losses_zero"} <= statuses
    assert {status for status in statuses if f"`{status}`" not in PAGE} == {"ok"} & statuses


def test_the_readme_says_how_many_rules_there_are() -> None:
    assert f"FairFleet: {len(listings())} rules" in (ROOT / "README.md").read_text(encoding="utf-8")
