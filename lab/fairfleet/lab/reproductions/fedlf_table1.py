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
        "'late acc' is the mean over the evaluations of the last 500 rounds. The rules that take a whole epoch "
        "swing: FedAvg at Pat-2 (seed 0) is between 0.827 and 0.864 in those rounds, and the last model is one of "
        "many.",
        "Where a difference could come from the setup, other readings were tried, one seed each. FedAvg at Pat-2 is "
        "better here than published with the rate 0.1, and agrees in acc and fair with 0.05, which is in the "
        "authors' grid, too: the published row is probably of another rate. (With 0.01 it ends at 0.789 and 0.200; "
        "that run is not kept.) One batch or one full-gradient step a round, instead of an epoch, gives an acc of "
        "0.849, and a fair that is further off. At Dir(0.1) weights by samples, as in the authors' code, change "
        "little, and neither do batches that are the same in every round, as theirs are (0.877 where it is 0.880; "
        "not kept).",
        "FedFV is better here than published. The authors' copy looks for conflicts only among the clients of the "
        "round where the paper looks at the round before (its tau of 1 is off by one). Without history and with the "
        "rate 0.05 acc agrees at Pat-2 and Dir(0.1), and fair at Dir(0.1); at Pat-2 our FedFV is fairer (0.059 to "
        "0.097) than the published one (0.135) by every reading that was tried. That is not explained. At Pat-1 the "
        "two seeds are 0.02 apart (0.844 and 0.869; published 0.836), and the rate 0.05 ends below (0.798).",
        "FedMGDA+ is worse here than published at Pat-1 and Pat-2 and better at Dir(0.1). Its steps have a length "
        "of their own, so much hangs on the server's rate and on how the directions are found. With one batch a "
        "round instead of an epoch all figures agree at Dir(0.1), and acc at Pat-2; at Pat-1 the published 0.750 "
        "lies between an epoch and one batch (0.795), and the second seed's epochs end in a swing. With a rate that "
        "falls like the clients', as in the authors' code, it ends lower everywhere.",
        "FedMDFG takes one full-gradient step a round, like FedLF, and then its line search, as in the authors' "
        "code. It agrees, but is fairer here than published at Pat-2, and its worst clients are 0.01 to 0.04 better "
        "off than FedLF's, where the paper has them 0.03 to 0.09 worse (one seed).",
        "AdaFed and AdaFedAdam are not in the published table.",
        "The seconds are no measure of speed: the runs shared two cores with tests, and were paused for measurements.",
    ),
)
