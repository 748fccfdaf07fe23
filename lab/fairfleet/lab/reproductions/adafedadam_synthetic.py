"""AdaFedAdam, Tables 5 and 7: 100 clients of very different sizes, by either generator."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from fairfleet.lab.experiments.sweep import Sweep
from fairfleet.lab.reproductions.base import (
    Claim,
    ClaimVerdict,
    Column,
    Lines,
    Reproduction,
    above,
    percent,
    pooled_accuracy,
)

BASE: dict[str, Any] = {
    "data": "synthetic,alpha=1,beta=1",
    "preprocessing": "plain",
    "partition": "user",
    "split": [0.8, 0.2],
    "model": "softmax",
    "plan": {"epochs": 1, "batch_size": 10, "learning_rate": 0.01},
    "rounds": 1000,
    "evaluate_every": 25,
}
RULES: list[dict[str, Any]] = [
    # All clients train the initial model, so `reference=initial` is the same here.
    {"label": "AdaFedAdam", "rule": "adafedadam,reference=first"},
    {"label": "FedNova", "rule": "fednova"},
    {"label": "q-FedAvg q=1", "rule": "qfedavg,q=1"},
    {
        "label": "FedAdam",
        "rule": "fedadam,eta=0.001,beta2=0.999,tau=1e-8,v0=0,bias_correction=true",
    },
    {"label": "FedAvg", "rule": "fedavg"},
]
MOMENTUM, NESTEROV, LEAF = ", momentum 0.9", ", Nesterov 0.9", ", LEAF's generator"


def _varied(rules: list[dict[str, Any]], suffix: str, **changes: Any) -> list[dict[str, Any]]:
    return [{**rule, "label": rule["label"] + suffix, **changes} for rule in rules]


WITH_MOMENTUM = _varied(RULES, MOMENTUM, plan={"momentum": 0.9})
WITH_NESTEROV = _varied(RULES, NESTEROV, plan={"momentum": 0.9, "nesterov": True})
SOLVERS = RULES + WITH_MOMENTUM + WITH_NESTEROV
ON_LEAF = _varied(SOLVERS, LEAF, data="leaf-synthetic")
COLUMNS = (
    Column("average", pooled_accuracy, tolerance=None),
    Column("mean of clients", percent("mean"), tolerance=None),
    Column("std", percent("standard_deviation"), tolerance=None),
    Column("worst 30 %", percent("worst_30"), tolerance=None),
)


def _row(average: float, std: float, worst: float) -> dict[str, float]:
    return {"average": average, "std": std, "worst 30 %": worst}


PUBLISHED = {
    "FedAvg": _row(88.34, 16.77, 25.94),
    "FedAdam": _row(89.71, 14.57, 57.15),
    "q-FedAvg q=1": _row(90.04, 12.48, 76.50),
    "FedNova": _row(92.20, 10.96, 83.41),
    "AdaFedAdam": _row(94.18, 8.52, 87.07),
    f"FedAvg{MOMENTUM}": _row(95.26, 8.42, 68.65),
    f"FedAdam{MOMENTUM}": _row(91.60, 12.32, 59.52),
    f"q-FedAvg q=1{MOMENTUM}": _row(94.64, 5.73, 88.04),
    f"FedNova{MOMENTUM}": _row(96.12, 3.82, 93.07),
    f"AdaFedAdam{MOMENTUM}": _row(97.19, 3.32, 93.41),
    f"FedAvg{NESTEROV}": _row(95.24, 8.34, 68.80),
    f"FedAdam{NESTEROV}": _row(91.79, 12.07, 61.51),
    f"q-FedAvg q=1{NESTEROV}": _row(94.56, 5.80, 87.85),
    f"FedNova{NESTEROV}": _row(96.85, 3.80, 94.02),
    f"AdaFedAdam{NESTEROV}": _row(97.27, 3.19, 94.19),
}
BY_WORST = ("AdaFedAdam", "FedNova", "q-FedAvg q=1", "FedAdam", "FedAvg")
BY_AVERAGE = ("AdaFedAdam", "FedNova", "FedAvg", "q-FedAvg q=1", "FedAdam")  # with momentum


def order(column: str, *published: str) -> Claim:
    """Return the claim that these rules come in this order, from the highest down."""

    def _claim(lines: Lines) -> ClaimVerdict | None:
        if any(label not in lines for label in published):
            return None
        values = {label: lines[label].value(column) for label in published}
        steps = len(published) - 1
        agreeing = sum(values[higher] > values[lower] for higher, lower in pairwise(published))
        measured_order = " > ".join(
            f"{label} {values[label]:.1f}"
            for label in sorted(values, key=lambda label: -values[label])
        )
        published_order = f"{' > '.join(published)} ({agreeing} of {steps} steps kept)"
        return ClaimVerdict(
            agreeing == steps, f"order by {column}: {measured_order}; published {published_order}"
        )

    return _claim


SWEEP: dict[str, Any] = {
    "name": "adafedadam-synthetic",
    "base": BASE,
    "rules": SOLVERS + ON_LEAF,
    "seeds": [0, 1, 2],
}
SYNTHETIC = Reproduction(
    name="adafedadam-synthetic",
    title="AdaFedAdam, Tables 5 and 7: Synthetic",
    about=(
        "100 clients, 60 features, 10 classes; softmax regression, SGD with learning rate 0.01, "
        "batches of 10, one epoch per round, all clients in each of 1000 rounds; 80/20 split. "
        "There are two generators. In Synthetic(1, 1) of FedProx (`synthetic`, sizes lognormal(4, "
        "2) + 50) each client has a linear model of its own. In LEAF's (`leaf-synthetic`, sizes "
        "lognormal(3, 2) + 5, at most 1,000) the clients share one model up to a factor. "
        "AdaFedAdam cites LEAF's. The authors published no code for these data, and their average "
        "is weighted by samples. So we compare the order of the rules, not the figures."
    ),
    sweep=Sweep.model_validate(SWEEP),
    quick=Sweep.model_validate(
        {
            **SWEEP,
            "name": "adafedadam-synthetic-quick",
            "base": {**BASE, "rounds": 60, "evaluate_every": 10},
            "rules": RULES + _varied(RULES, LEAF, data="leaf-synthetic"),
            "seeds": [0],
        }
    ),
    columns=COLUMNS,
    published={
        name + generator: row for generator in ("", LEAF) for name, row in PUBLISHED.items()
    },
    not_drawn=frozenset(rule["label"] for rule in WITH_MOMENTUM + WITH_NESTEROV + ON_LEAF),
    claims=(
        order("worst 30 %", *BY_WORST),
        order("average", *(name + MOMENTUM for name in BY_AVERAGE)),
        order("worst 30 %", *(name + LEAF for name in BY_WORST)),
        order("average", *(name + MOMENTUM + LEAF for name in BY_AVERAGE)),
        *(above(name + MOMENTUM + LEAF, name + LEAF, "average", "worst 30 %") for name in BY_WORST),
    ),
    notes=(
        "LEAF's generator explains the averages and the order of the rules. Without momentum, the "
        "averages over samples are within 2.5 of the published ones for all five rules, and within "
        "0.4 for AdaFedAdam, FedNova and FedAdam. The order of the rules by the worst 30 % is the "
        "published one. With momentum and with Nesterov momentum, AdaFedAdam, FedNova and FedAvg "
        "gain as in the paper, and AdaFedAdam stays first. q-FedAvg and FedAdam lose with momentum "
        "here, and gain in the paper.",
        "The published deviation and worst 30 % cannot agree together with the published average. "
        "If all three were over the same clients with equal weight, an average of 88.34 with a "
        "worst 30 % of 25.94 would need an accuracy of 115 % for the other clients. The spread "
        "over the clients is larger here than published for every rule. Half of LEAF's clients "
        "have at most six test samples, so few wrong answers decide the worst 30 %.",
        "One released version of LEAF's generator takes a softmax over the samples of a client "
        "before the argmax. FedAvg reached only about 26 % with it in an earlier trial, so the "
        "authors cannot have used it. The plain argmax is used here. The data have seed 0 in all "
        "rows; the seeds of the table are those of the split, the batches and the initial model.",
        "With Synthetic(1, 1) of FedProx the figures are far from the published ones. The "
        "difference between the first two rules is small: AdaFedAdam is above FedNova by 2.0 and "
        "2.5 with two of the seeds, and below it by 0.6 with the third. The other differences are "
        "large.",
        "With Synthetic(1, 1), momentum makes all rules worse. The reason is the length of the "
        "steps: a momentum of 0.9 makes them ten times as long, and clients with such different "
        "sizes and models drift apart. FedAvg with a rate of 0.1 and no momentum loses as well "
        "(79.9; single runs that are not kept). With a momentum of 0.9 and a rate of 0.001, whose "
        "steps are as long as those without momentum, it does not lose (83.3). The same holds for "
        "Synthetic(0, 0) (69.6 with momentum, 74.6 without).",
        "Not run: the rows with Nesterov momentum on Synthetic(1, 1), a third seed of its rows "
        "with momentum, and all but the first seed on LEAF's generator. The paper has three seeds.",
        "FedNova with momentum counts the work that momentum does: n local steps count as the sum "
        "of 1 - 0.9^i over i = 1 to n, times ten. In an earlier version the rule did not know of "
        "the momentum and counted n.",
    ),
)
