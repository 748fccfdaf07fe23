"""Print the table of cheating clients in docs/explanation/admission.md.

One client of ten cheats, with and without admission:

    fairfleet compare benchmarks/admission.yaml --output results/admission --workers 1 --no-pictures
    python benchmarks/admission.py results/admission/runs.jsonl

The table shows accuracies of the honest clients in percent, as means over the seeds.
Cells read `without → with`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fairfleet.lab.experiments.run_log import Ledger, Run

ADMITTED = " admitted"
TURNED = slice(0, 2)  # positions of the two clients whose images are rotated, ordered by name


def main(file: Path) -> None:
    """Print one table per setting of the runs in this file."""
    runs: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in Ledger(file).runs().values():
        if run.complete:
            runs[run.setting][run.label].append(run)
    for setting, by_rule in runs.items():
        print(f"\n**{setting}**\n")
        print("| rule | mean | worst 10 % | the turned two | decisions: honest / attacker |")
        print("|---|---|---|---|---|")
        for rule in [label for label in by_rule if not label.endswith(ADMITTED)]:
            sides = [by_rule[rule], by_rule.get(rule + ADMITTED, [])]
            cells = [
                " → ".join(measure(runs_of_side) for runs_of_side in sides if runs_of_side)
                for measure in (mean, worst, turned)
            ]
            print(f"| `{rule}` | {' | '.join(cells)} | {decisions(sides[1])} |")


def mean(runs: Sequence[Run]) -> str:
    """Return the mean accuracy over the clients, in percent."""
    return average([run.fairness.mean for run in runs if not run.failure])


def worst(runs: Sequence[Run]) -> str:
    """Return the accuracy of the worst 10 % of the clients, in percent."""
    return average([run.fairness.worst_10 for run in runs if not run.failure])


def turned(runs: Sequence[Run]) -> str:
    """Return the accuracy of the two clients with rotated images, in percent."""
    return average(
        [
            float(np.mean([accuracy or 0.0 for accuracy in run.accuracy[TURNED]]))
            for run in runs
            if not run.failure
        ]
    )


def average(values: Sequence[float]) -> str:
    """Return the mean of these shares in percent, or `diverged` if there are none."""
    return f"{100 * float(np.mean(values)):.1f}" if values else "diverged"


def decisions(runs: Sequence[Run]) -> str:
    """Return how often admission made each decision, about honest clients and attackers."""
    total: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for run in runs:
        for name, (honest, attackers) in run.admission.items():
            total[name][0] += honest
            total[name][1] += attackers
    return (
        ", ".join(
            f"{name} {honest} / {attackers}" for name, (honest, attackers) in sorted(total.items())
        )
        or "none"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
