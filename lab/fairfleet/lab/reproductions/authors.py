"""Runs of a paper's own program, as its authors published it, in a separate ledger.

They show whether a difference to the published figures is between the authors' code and ours, or
between their code and their figures.
"""

from __future__ import annotations

from pathlib import Path

from fairfleet.lab.experiments.run_log import Ledger, Run

MARK = "authors' code"


def authors_ledger(name: str, results: Path) -> Ledger:
    """Return the ledger with the authors' runs of the reproduction of this name."""
    return Ledger(results / f"{name}-authors.jsonl")


def authors_label(rule: str, *readings: str) -> str:
    """Return the label of a run of the authors' code, with other readings of the setup."""
    return ", ".join((rule, MARK, *readings))


def authors_runs(name: str, results: Path) -> list[Run]:
    """Return the authors' runs, ordered by setting, label and key."""
    return sorted(
        authors_ledger(name, results).runs().values(),
        key=lambda run: (run.setting, run.label, run.key),
    )
