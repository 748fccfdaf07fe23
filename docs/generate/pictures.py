"""Draw the picture of docs/explanation/fairness.md: `python -m docs.generate.pictures`.

The directions are those of the real rules, for two clients with two parameters. It needs matplotlib
(the extra `plots`). The picture is committed.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from fairfleet.server.aggregation import aggregate
from fairfleet.server.rules import Report, recipe

IMAGE = Path(__file__).resolve().parents[1] / "images" / "conflict.svg"
UPDATES = {"majority": np.array([-1.0, -0.25]), "minority": np.array([0.55, -0.6])}
REPORTS = {
    "majority": Report(samples=90, loss=0.4),
    "minority": Report(samples=10, loss=1.6),
}
RULES = ("fedavg", "fedmgda", "adafed")
TITLES = {"fedavg": "FedAvg", "fedmgda": "FedMGDA", "adafed": "AdaFed"}
COLOURS = {"majority": "#1f77b4", "minority": "#d62728", "direction": "#2a2a2a"}


def direction(rule: str) -> NDArray[np.float64]:
    """Return the direction in which a rule changes the model, at length one."""
    result = aggregate(np.zeros(2), UPDATES, REPORTS, recipe(rule, eta=1.0))
    return np.asarray(result.model, np.float64) / np.linalg.norm(result.model)


def draw() -> None:
    """Draw the three rules side by side."""
    plt.rcParams |= {"svg.hashsalt": "fairfleet", "font.size": 10}
    figure, panels = plt.subplots(1, len(RULES), figsize=(9, 2.9), sharey=True)
    for axes, rule in zip(panels, RULES, strict=True):
        _panel(axes, rule)
    figure.tight_layout()
    figure.savefig(IMAGE, metadata={"Date": None})


def _panel(axes: Axes, rule: str) -> None:
    step = direction(rule)
    for client, update in UPDATES.items():
        _arrow(axes, -update, COLOURS[client], client)
    _arrow(axes, step, COLOURS["direction"], "step")
    gains = {client: float(step @ -update) for client, update in UPDATES.items()}
    axes.set_xlabel(
        "\n".join(
            f"{client}: loss {'falls' if gain > 1e-9 else 'rises'}"
            for client, gain in gains.items()
        )
    )
    axes.set(title=TITLES[rule], xlim=(-1.1, 1.3), ylim=(-0.2, 1.3), xticks=[], yticks=[])
    axes.set_aspect("equal")


def _arrow(axes: Axes, vector: NDArray[np.float64], colour: str, label: str) -> None:
    axes.annotate(
        "",
        xy=tuple(vector),
        xytext=(0, 0),
        arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 2},
    )
    below = label == "majority"
    offset = np.array([0.0, -0.14]) if below else vector / np.linalg.norm(vector) * 0.14
    axes.text(*(vector + offset), label, color=colour, ha="center", va="center", fontsize=9)


if __name__ == "__main__":
    draw()
    print(f"wrote {IMAGE.relative_to(Path.cwd())}")
