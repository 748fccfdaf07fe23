"""docs/explanation/rounds.md agrees with the state machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

SCRIPT = ROOT / "docs" / "rounds_diagram.py"


@pytest.mark.slow
def test_the_diagram_is_up_to_date_with_the_state_machine() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"],
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_diagram_shows_every_phase_and_fits_on_one_screen() -> None:
    page = (SCRIPT.parent / "explanation" / "rounds.md").read_text(encoding="utf-8")
    diagram = page.split("```mermaid")[1].split("```")[0]
    for phase in (
        "waiting",
        "training",
        "aggregating",
        "verifying",
        "committing",
        "evaluating",
        "finished",
    ):
        assert f" {phase} -->" in diagram
    assert len(diagram.splitlines()) < 30
