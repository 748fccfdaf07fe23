"""docs/rounds.md is what the state machine does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "rounds_diagram.py"


def test_the_diagram_of_the_rounds_is_made_from_the_state_machine_as_it_is() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], text=True, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_diagram_shows_every_phase_and_fits_on_one_screen() -> None:
    page = SCRIPT.with_name("rounds.md").read_text(encoding="utf-8")
    diagram = page.split("```mermaid")[1].split("```")[0]
    for phase in ("waiting", "training", "aggregating", "verifying", "committing", "evaluating", "finished"):
        assert f" {phase} -->" in diagram
    assert len(diagram.splitlines()) < 30
