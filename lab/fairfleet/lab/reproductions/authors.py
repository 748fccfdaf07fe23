"""Runs of a paper's own program, as its authors published it, kept beside ours in a ledger of their own.

They tell whether a difference to the published figures is between the authors' code and ours, or between their code
and their figures.
"""

from __future__ import annotations

from pathlib import Path

from fairfleet.lab.records import Ledger, Run

MARK = "authors' code"


def authors_ledger(name: str, results: Path) -> Ledger:
    """Of the reproduction of this name."""
    return Ledger(results / f"{name}-authors.jsonl")


def authors_label(rule: str, *readings: str) -> str:
    return ", ".join((rule, MARK, *readings))


def authors_runs(name: str, results: Path) -> list[Run]:
    return sorted(authors_ledger(name, results).runs().values(), key=lambda run: (run.setting, run.label, run.key))
