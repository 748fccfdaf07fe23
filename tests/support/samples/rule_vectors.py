"""The project's own test vectors of rules: hand-checked rounds in tests/rules/vectors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from fairfleet.server.aggregation.aggregator import aggregate
from fairfleet.server.aggregation.results import Outcome
from fairfleet.server.rules import Report, recipe
from tests.support.paths import ROOT

FOLDER = ROOT / "tests" / "rules" / "vectors"


def own_cases() -> dict[str, list[Mapping[str, Any]]]:
    """Return the cases by the name of their rule."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def play_own(rule: str, case: Mapping[str, Any]) -> list[tuple[Outcome, list[float]]]:
    """Run the rounds of a case; return the outcome and the expected step of each."""
    chosen, state, played = recipe(rule, **case["params"]), None, []
    for number, entry in enumerate(case["rounds"]):
        rows = {name: np.array(row, np.float64) for name, row in entry["updates"].items()}
        reports = {name: Report(**report) for name, report in entry["reports"].items()}
        model = np.zeros(len(next(iter(rows.values()))))
        outcome = aggregate(model, rows, reports, chosen, state=state, round_number=number)
        state = outcome.state
        played.append((outcome, entry["step"]))
    return played
