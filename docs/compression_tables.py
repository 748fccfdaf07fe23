"""The tables of docs/compression.md that come from paired runs, made from the committed records alone.

    python docs/compression_tables.py            writes them anew
    python docs/compression_tables.py --check    exits with 1 if they are not up to date

Each sweep of lab/sweeps/compression-*.yaml has its records in results/ under its own name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from fairfleet.common.settings import read_model
from fairfleet.lab import paired
from fairfleet.lab.records import Ledger
from fairfleet.lab.sweep import Sweep, finished

HOME = Path(__file__).parents[1]
PAGE = HOME / "docs" / "compression.md"
BEGIN, END = "<!-- made by docs/compression_tables.py -->\n", "<!-- until here -->\n"
TITLES = {
    "compression-fmnist": "Fashion-MNIST, two classes per client, at a falling rate",
    "compression-fmnist-steady": "Fashion-MNIST, two classes per client, at a steady rate",
    "compression-cifar10": "CIFAR-10, two shards per client",
    "compression-fmnist-residual": "Fashion-MNIST at a falling rate, topk with error feedback instead",
    "compression-fmnist-steady-residual": "Fashion-MNIST at a steady rate, topk with error feedback instead",
}


def sections() -> Iterator[str]:
    for name, title in TITLES.items():
        sweep = read_model(Sweep, HOME / "lab" / "sweeps" / f"{name}.yaml", {})
        runs = finished(list(sweep.planned()), Ledger(HOME / "results" / f"{name}.jsonl"))
        yield f"### {title}\n"
        yield f"```\nfairfleet compare lab/sweeps/{name}.yaml --output FOLDER\n```\n"
        if not runs:
            yield "Not run yet.\n"
            continue
        order = [rule.label for rule in sweep.rules], list(sweep.codecs)
        rows = sorted(paired.rows(runs), key=lambda row: (order[0].index(row.label), order[1].index(row.codec)))
        yield from paired.markdown(rows)


def page() -> str:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + "\n" + "\n".join(sections()) + "\n" + END + after


def main() -> int:
    wanted = page()
    if "--check" in sys.argv[1:]:
        fresh = PAGE.read_text(encoding="utf-8") == wanted
        print("docs/compression.md is up to date" if fresh else "run `python docs/compression_tables.py`")
        return 0 if fresh else 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
