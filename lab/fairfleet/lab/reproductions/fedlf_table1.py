"""FedLF, Table 1: Fashion-MNIST over 100 clients, three ways to share it out."""

from __future__ import annotations

import math
from typing import Any

from fairfleet.lab.records import Run
from fairfleet.lab.reproductions.base import Column, Reproduction, above
from fairfleet.lab.sweep import Sweep

BASE: dict[str, Any] = {
    "data": "fashion-mnist",
    "preprocessing": "unit",
    "clients": 100,
    "split": [6 / 7, 1 / 7],
    "model": "mlp:200,200",
    "plan": {"epochs": 1, "batch_size": 50, "learning_rate": 0.1},
    "learning_rate_decay": 0.999,
    "rounds": 3000,
    "clients_per_round": 10,
    "evaluate_every": 100,
}
SETTINGS = [
    {"label": "Pat-2", "partition": "pat-fixed:2"},
    {"label": "Pat-1", "partition": "pat-fixed:1"},
    {"label": "Dir(0.1)", "partition": "dirichlet-capped:0.1"},
]
FULL_STEP = {"batch_size": 0}
ONE_BATCH = {"epochs": 0, "steps": 1}
HALF_RATE = {"learning_rate": 0.05}
RULES: list[dict[str, Any]] = [
    {"label": "FedLF", "rule": "fedlf", "plan": FULL_STEP},
    {"label": "FedAvg", "rule": "fedavg,weighting=uniform"},
    {"label": "FedFV", "rule": "fedfv,alpha=0.1,tau=1"},
    {"label": "FedMGDA+", "rule": "fedmgda_plus,epsilon=0.1,eta=0.1"},
    {"label": "FedMDFG", "rule": "fedmdfg", "plan": FULL_STEP},
    {"label": "AdaFed", "rule": "adafed,gamma=1"},
    {"label": "AdaFedAdam", "rule": "adafedadam"},
    # Other readings of the setup, which could explain a difference.
    {"label": "FedAvg, by samples", "rule": "fedavg"},
    {"label": "FedAvg, rate 0.05", "rule": "fedavg,weighting=uniform", "plan": HALF_RATE},
    {"label": "FedAvg, one batch", "rule": "fedavg,weighting=uniform", "plan": ONE_BATCH},
    {"label": "FedAvg, full step", "rule": "fedavg,weighting=uniform", "plan": FULL_STEP},
    {"label": "FedFV, no history", "rule": "fedfv,alpha=0.1,tau=0"},
    {"label": "FedFV, no history, rate 0.05", "rule": "fedfv,alpha=0.1,tau=0", "plan": HALF_RATE},
    {"label": "FedFV, one batch", "rule": "fedfv,alpha=0.1,tau=1", "plan": ONE_BATCH},
    {"label": "FedFV, full step", "rule": "fedfv,alpha=0.1,tau=1", "plan": FULL_STEP},
    {
        "label": "FedMGDA+, falling rate",
        "rule": "fedmgda_plus,epsilon=0.1,lam0=samples,eta=0.1,schedule=exponential,decay=0.999",
    },
    {"label": "FedMGDA+, one batch", "rule": "fedmgda_plus,epsilon=0.1,eta=0.1", "plan": ONE_BATCH},
    {
        "label": "FedMGDA+, one batch, falling rate",
        "rule": "fedmgda_plus,epsilon=0.1,eta=0.1,schedule=exponential,decay=0.999",
        "plan": ONE_BATCH,
    },
    {"label": "FedMGDA+, full step", "rule": "fedmgda_plus,epsilon=0.1,eta=0.1", "plan": FULL_STEP},
]
LATE_ROUNDS = 500


def late_accuracy(run: Run) -> float:
    """Mean over the evaluations in the last rounds: the models of some rules swing, and the last one is one of many."""
    late = [point.mean for point in run.points if point.round > run.rounds - LATE_ROUNDS]
    return sum(late) / len(late) if late else math.nan


def late_angle(run: Run) -> float:
    """The same of the angle to equal accuracies: its tangent is deviation over mean."""
    late = [math.atan2(point.deviation, point.mean) for point in run.points if point.round > run.rounds - LATE_ROUNDS]
    return sum(late) / len(late) if late else math.nan


COLUMNS = (
    Column("acc", lambda run: run.fairness.mean, 3, 0.02),
    Column("fair", lambda run: run.fairness.angle_radians, 3, 0.02),
    Column("worst 5 %", lambda run: run.fairness.worst_5, 3, None),
    Column("best 5 %", lambda run: run.fairness.best_5, 3, None),
    Column("late acc", late_accuracy, 3, None),
    Column("late fair", late_angle, 3, None),
)


def _row(*figures: float) -> dict[str, float]:
    return {column.name: figure for column, figure in zip(COLUMNS, figures, strict=False)}


PUBLISHED = {
    "Dir(0.1)": {
        "FedLF": _row(0.892, 0.084, 0.719, 1.00),
        "FedMDFG": _row(0.873, 0.089, 0.690),
        "FedAvg": _row(0.861, 0.116, 0.601),
        "FedFV": _row(0.850, 0.132, 0.649),
        "FedMGDA+": _row(0.809, 0.161, 0.472),
    },
    "Pat-1": {
        "FedLF": _row(0.894, 0.089, 0.717, 0.996),
        "FedMDFG": _row(0.863, 0.101, 0.628),
        "FedAvg": _row(0.828, 0.170, 0.401),
        "FedFV": _row(0.836, 0.165, 0.416),
        "FedMGDA+": _row(0.750, 0.305, 0.042),
    },
    "Pat-2": {
        "FedLF": _row(0.898, 0.074, 0.731, 1.00),
        "FedMDFG": _row(0.874, 0.084, 0.681),
        "FedAvg": _row(0.838, 0.135, 0.325),
        "FedFV": _row(0.853, 0.135, 0.510),
        "FedMGDA+": _row(0.815, 0.221, 0.316),
    },
}

SWEEP: dict[str, Any] = {"name": "fedlf-table1", "base": BASE, "rules": RULES, "settings": SETTINGS}
TABLE_1 = Reproduction(
    name="fedlf-table1",
    title="FedLF, Table 1: Fashion-MNIST, 100 clients",
    about=(
        "Training and test images pooled (70,000), shared out, each client's 6/7 to train and 1/7 to be judged by. "
        "Pat-k: fixed groups of clients with k classes each; Dir(0.1): capped as in the authors' code. MLP "
        "784-200-200-10; 10 clients in each of 3000 rounds, rate 0.1 times 0.999 each round. As in the authors' "
        "runs, FedLF and FedMDFG take one full-gradient step a round and the others one epoch of batches of 50. acc "
        "is the mean over the clients, fair the angle to equal accuracies in radians."
    ),
    sweep=Sweep.model_validate({**SWEEP, "seeds": [0, 1, 2, 3, 4]}),
    quick=Sweep.model_validate(
        {
            **SWEEP,
            "name": "fedlf-table1-quick",
            "base": {**BASE, "rounds": 60, "evaluate_every": 10},
            "rules": RULES[:3],
            "settings": SETTINGS[:1],
            "seeds": [0],
        }
    ),
    columns=COLUMNS,
    published={f"{setting} / {rule}": row for setting, rows in PUBLISHED.items() for rule, row in rows.items()},
    not_drawn=frozenset(rule["label"] for rule in RULES if "," in rule["label"]),  # other readings
    claims=tuple(
        above("FedLF", rival, "acc", "worst 5 %", setting=setting["label"])
        for setting in SETTINGS
        for rival in ("FedAvg", "FedFV", "FedMGDA+", "FedMDFG")
    ),
    notes=(
        "'late' columns are means over the evaluations of the last 500 rounds. The rules that take a whole epoch "
        "swing: FedAvg at Pat-2 (seed 0) is between 0.827 and 0.864 in those rounds, and the last model is one of "
        "many. What is published is of last models too, we think, over five seeds.",
        "Where our figures differ from the published ones, the authors' own program was run (docs/authors_fedlf.py), "
        "and other readings of the setup were tried (one or two seeds). Together they explain the differences so:",
        "FedAvg at Pat-2: the authors' program ends where ours does (0.863 and 0.123; ours 0.863 and 0.117), above the "
        "published 0.838. With the rate 0.05, which is in the paper's grid, ours ends at 0.841 and 0.130, but that is "
        "a swing upwards: its late mean is 0.817. (With 0.01 it ends at 0.789 and 0.200; that run is not kept.) One "
        "batch or one full-gradient step a round gives 0.849.",
        "FedFV: the authors' program has the published acc at Pat-2 (0.857; published 0.853), Pat-1 (0.836; published "
        "0.836) and Dir(0.1) (0.866; published 0.850); its fair swings between 0.08 and 0.21 from one evaluation to "
        "the next, and its late means (0.118, 0.180 and 0.114) are within 0.02 of the published 0.135, 0.165 and "
        "0.132. Ours is better (0.882, 0.856 and 0.880). It follows FedFV's paper, which projects against clients of "
        "earlier rounds; the authors' copy is off by one there, and projects a second time against clients of the same "
        "round. Without history ours comes nearer to theirs (0.873 at Pat-2, late 0.861).",
        "FedMGDA+: the authors' program ends at 0.755 and 0.259 at Pat-2 and at 0.654 and 0.432 at Pat-1, with the "
        "rate 0.05 lower still (0.696 and 0.506): the published 0.815 and 0.750 are not what it gives with these rates "
        "of the paper's grid. Ours with a server rate that falls like the clients' and weights by samples, as theirs "
        "has them, ends where it does (0.760 and 0.241; 0.680 and 0.408); with a steady rate, as FedFV's tables have "
        "it, a little higher at Pat-2, and with one batch a round higher still (0.811; 0.790). At Dir(0.1) the "
        "authors' program agrees with the published line (0.817 and 0.141; published 0.809 and 0.161), and ours with a "
        "falling rate or one batch a round is near both (0.830; 0.827).",
        "FedMDFG takes one full-gradient step a round, like FedLF, and then its line search, as in the authors' code. "
        "It agrees, but for fair at Pat-2, where ours is fairer; and at Pat-2 and Pat-1 its worst clients are 0.01 "
        "better off than FedLF's, where the paper has them 0.05 and 0.09 worse. The authors' copy cannot tell us more: "
        "in the released program FedMDFG and FedLF stop with an error. Ours differs from its text on purpose: there "
        "the lengths of absent clients' gradients are shuffled, and the line search has a sign that lets losses rise.",
        "FedAvg at Dir(0.1) is 0.021 above the published acc, and agrees in fair. The authors' program ends at 0.855 "
        "and 0.147, with another draw of the shares, one for all its seeds. Weights by samples, as there, change "
        "little, and neither do batches that are the same in every round (0.877 where it is 0.880; not kept).",
        "AdaFed and AdaFedAdam are not in the published table.",
        "The seconds are no measure of speed: the runs shared two cores with tests, and were paused for measurements.",
    ),
)
