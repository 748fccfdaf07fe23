"""Make the tables of paired runs in docs/explanation/compression-results.md from the records.

    python docs/compression_tables.py            writes the tables
    python docs/compression_tables.py --check    exits with 1 if they are out of date

Each sweep of lab/sweeps/compression-*.yaml has its records in results/ under its own name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from fairfleet.common.cli.settings import read_model
from fairfleet.lab.experiments.run_log import Ledger
from fairfleet.lab.experiments.sweep import Sweep
from fairfleet.lab.experiments.sweep_runner import recorded_runs
from fairfleet.lab.reports.codec_comparison import codec_rows
from fairfleet.lab.reports.codec_tables import markdown

HOME = Path(__file__).parents[1]
PAGE = HOME / "docs" / "explanation" / "compression-results.md"
BEGIN, END = "<!-- made by docs/compression_tables.py -->\n", "<!-- until here -->\n"
TITLES = {
    "compression-fmnist": "Fashion-MNIST, two classes per client, at a falling rate",
    "compression-fmnist-steady": "Fashion-MNIST, two classes per client, at a steady rate",
    "compression-cifar10": "CIFAR-10, two shards per client",
    "compression-fmnist-feedback": (
        "Fashion-MNIST at a falling rate, int8 and int4 without error feedback"
    ),
    "compression-fmnist-residual": (
        "Fashion-MNIST at a falling rate, topk with error feedback instead"
    ),
    "compression-fmnist-steady-residual": (
        "Fashion-MNIST at a steady rate, topk with error feedback instead"
    ),
}


def sections() -> Iterator[str]:
    """Yield the parts of the page in Markdown, one group per sweep."""
    for name, title in TITLES.items():
        sweep = read_model(Sweep, HOME / "lab" / "sweeps" / f"{name}.yaml", {})
        runs = recorded_runs(list(sweep.planned()), Ledger(HOME / "results" / f"{name}.jsonl"))
        yield f"### {title}\n"
        yield f"```\nfairfleet compare lab/sweeps/{name}.yaml --output FOLDER\n```\n"
        if not runs:
            yield "Not run yet.\n"
            continue
        order = [rule.label for rule in sweep.rules], list(sweep.codecs)
        rows = sorted(
            codec_rows(runs),
            key=lambda row: (order[0].index(row.label), order[1].index(row.codec)),
        )
        yield from markdown(rows)


def page() -> str:
    """Return the page with new tables between the markers."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + "\n" + "\n".join(sections()) + "\n" + END + after


def main() -> int:
    """Write or check the page; return the exit code."""
    expected = page()
    if "--check" in sys.argv[1:]:
        fresh = PAGE.read_text(encoding="utf-8") == expected
        print(
            "docs/explanation/compression-results.md is up to date"
            if fresh
            else "run `python docs/compression_tables.py`"
        )
        return 0 if fresh else 1
    PAGE.write_text(expected, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
