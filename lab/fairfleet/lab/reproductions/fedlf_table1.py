"""FedLF, Table 1: Fashion-MNIST over 100 clients, divided in three ways."""

from __future__ import annotations

import math
from typing import Any

from fairfleet.lab.experiments.run_log import Run
from fairfleet.lab.experiments.sweep import Sweep
from fairfleet.lab.reproductions.base import Column, Reproduction, above

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
    {"label": "FedLF", "rule": "fedlf,layers=tensors", "plan": FULL_STEP},
    {"label": "FedAvg", "rule": "fedavg,weighting=uniform"},
    {"label": "FedFV", "rule": "fedfv,alpha=0.1,tau=1"},
    {"label": "FedMGDA+", "rule": "fedmgda_plus,epsilon=0.1,eta=0.1"},
    {"label": "FedMDFG", "rule": "fedmdfg", "plan": FULL_STEP},
    {"label": "AdaFed", "rule": "adafed,gamma=1"},
    {"label": "AdaFedAdam", "rule": "adafedadam"},
    {"label": "FedLF, layers are modules", "rule": "fedlf", "plan": FULL_STEP},
    # The ablations of the paper's Table 3. M1, the plain average, is "FedAvg, full step" below.
    {"label": "FedLF M2: one block", "rule": "fedlf,layers=one", "plan": FULL_STEP},
    {"label": "FedLF M4: no P", "rule": "fedlf,use_p=false", "plan": FULL_STEP},
    {
        "label": "FedLF M6: no history",
        "rule": "fedlf,history=false",
        "plan": FULL_STEP,
    },
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
    {"label": "FedMDFG, rate 0.05", "rule": "fedmdfg", "plan": FULL_STEP | HALF_RATE},
]
LATE_ROUNDS = 500


def late_accuracy(run: Run) -> float:
    """Return the mean accuracy over the evaluations in the last 500 rounds.

    The models of some rules swing, so the last model is only one of many.
    """
    late = [point.mean for point in run.points if point.round > run.rounds - LATE_ROUNDS]
    return sum(late) / len(late) if late else math.nan


def late_angle(run: Run) -> float:
    """Return the mean angle to equal accuracies in the last 500 rounds, in radians.

    The tangent of the angle is the deviation over the mean.
    """
    late = [
        math.atan2(point.deviation, point.mean)
        for point in run.points
        if point.round > run.rounds - LATE_ROUNDS
    ]
    return sum(late) / len(late) if late else math.nan


def late_worst(run: Run) -> float:
    """Return the mean accuracy of the worst 5 % in the last 500 rounds."""
    late = [point.worst_5 for point in run.points if point.round > run.rounds - LATE_ROUNDS]
    return sum(late) / len(late) if late else math.nan


COLUMNS = (
    Column("acc", lambda run: run.fairness.mean, 3, 0.02),
    Column("fair", lambda run: run.fairness.angle_radians, 3, 0.02),
    Column("worst 5 %", lambda run: run.fairness.worst_5, 3, None),
    Column("best 5 %", lambda run: run.fairness.best_5, 3, None),
    Column("late acc", late_accuracy, 3, None),
    Column("late fair", late_angle, 3, None),
    Column("late worst 5 %", late_worst, 3, None),
)


LAST, LATE = ("acc", "worst 5 %"), ("late acc", "late worst 5 %")


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
        "Training and test images pooled (70,000), shared out, each client's 6/7 to train and 1/7 "
        "to be judged by. Pat-k: fixed groups of clients with k classes each; Dir(0.1): capped as "
        "in the authors' code. MLP 784-200-200-10; 10 clients in each of 3000 rounds, rate 0.1 "
        "times 0.999 each round. As in the authors' runs, FedLF and FedMDFG take one "
        "full-gradient step a round and the others one epoch of batches of 50; FedLF's layers are "
        "tensors there, and modules in the paper. acc is the mean "
        "over the clients, fair the angle to equal accuracies in radians."
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
    published={
        f"{setting} / {rule}": row
        for setting, rows in PUBLISHED.items()
        for rule, row in rows.items()
    },
    not_drawn=frozenset(rule["label"] for rule in RULES if "," in rule["label"]),  # Other readings.
    claims=tuple(
        above("FedLF", rival, *columns, setting=setting["label"])
        for setting in SETTINGS
        for rival, columns in (
            ("FedAvg", LAST),
            ("FedFV", LAST),
            ("FedMGDA+", LAST),
            ("FedMDFG", LAST),
            ("FedMDFG", LATE),
        )
    ),
    notes=(
        "'late' columns are means over the evaluations of the last 500 rounds. All rules but "
        "FedLF swing: FedAvg at Pat-2 (seed 0) is between 0.827 and 0.864 in those rounds, and "
        "the last model is one of many. What is published is of last models too, we think, over "
        "five seeds.",
        "Where our figures differ from the published ones, the authors' own program was run "
        "(docs/authors_fedlf.py), and other readings of the setup were tried (one or two seeds). "
        "Its FedMDFG and FedLF stop with an error as they were released; 'mended' are their runs "
        "after calls were made to fit what they call, which changes nothing of what is computed. "
        "Together they explain the differences so:",
        "FedAvg at Pat-2: the authors' program ends where ours does (0.863 and 0.123; ours 0.863 "
        "and 0.117), above the published 0.838. With the rate 0.05, which is in the paper's grid, "
        "ours ends at 0.841 and 0.130, but that is a swing upwards: its late mean is 0.817. (With "
        "0.01 it ends at 0.789 and 0.200; that run is not kept.) One batch or one full-gradient "
        "step a round gives 0.849.",
        "FedFV: the authors' program has the published acc at Pat-2 (0.857; published 0.853), "
        "Pat-1 (0.836; published 0.836) and Dir(0.1) (0.866; published 0.850); its fair swings, "
        "in the last 500 rounds between 0.06 and 0.21, and its late means (0.118, 0.180 and "
        "0.114) are within 0.02 of the published 0.135, 0.165 and 0.132. Ours is better (0.882, "
        "0.856 and 0.880). It follows FedFV's paper, which projects against clients of earlier "
        "rounds; the authors' copy is off by one there, and projects a second time against "
        "clients of the same round. Without history ours comes nearer to theirs (0.873 at Pat-2, "
        "late 0.861).",
        "FedMGDA+: the authors' program ends at 0.755 and 0.259 at Pat-2 and at 0.654 and 0.432 "
        "at Pat-1, with the rate 0.05 lower still (0.696 and 0.506): the published 0.815 and "
        "0.750 are not what it gives with these rates of the paper's grid. Ours with a server "
        "rate that falls like the clients' and weights by samples, as theirs has them, ends where "
        "it does (0.760 and 0.241; 0.680 and 0.408); with a steady rate, as FedFV's tables have "
        "it, a little higher at Pat-2, and with one batch a round higher still (0.812; 0.791). At "
        "Dir(0.1) the authors' program agrees with the published line (0.817 and 0.141; published "
        "0.809 and 0.161); ours does with one batch a round (0.827 and 0.159), and with a falling "
        "rate is off by 0.021 in acc and 0.023 in fair.",
        "FedMDFG takes one full-gradient step a round, like FedLF, and then its line search, as "
        "in the authors' code. It agrees, but for fair at Pat-2 (0.056; published 0.084). There "
        "the authors' program ends where ours does (0.884 and 0.057 over two seeds; ours 0.885 "
        "and 0.056), and the rate 0.05 changes nothing (0.886 and 0.057): the published figure is "
        "not what it gives with these settings, though one of its seeds swings up to 0.094 in the "
        "last 500 rounds. Ours differs from their text on purpose: there the lengths of absent "
        "clients' gradients are shuffled, and the line search has a sign that lets losses rise.",
        "Whether FedLF's worst clients or FedMDFG's are better off cannot be decided from last "
        "models: the seeds do not agree, since FedMDFG swings. Over the last 500 rounds FedLF's "
        "are better off with every seed in every setting, as in the paper. The authors' program "
        "has them so as well (late: 0.799 and 0.761 at Pat-2, 0.736 and 0.613 at Pat-1); its "
        "FedLF at Pat-1 has the published line (0.893, 0.088 and 0.744; published 0.894, 0.089 "
        "and 0.717).",
        "The worst 5 % are shown, not judged: they are five clients. At Pat-2 they are better off "
        "than published with every rule, here and in the authors' program (FedLF 0.775 and 0.802, "
        "published 0.731; FedFV 0.739 and 0.676, 0.510; FedAvg 0.640 and 0.624, 0.325; FedMGDA+ "
        "0.435 and 0.386, 0.316): what was run there we do not know.",
        "FedAvg at Dir(0.1) is 0.022 above the published acc, and agrees in fair. The authors' "
        "program ends at 0.855 and 0.147, with another draw of the shares, one for all its seeds. "
        "Weights by samples, as there, change little, and neither do batches that are the same in "
        "every round (0.877 where it is 0.880; not kept).",
        "AdaFed and AdaFedAdam are not in the published table.",
        "The seconds are no measure of speed: the runs shared two cores with tests, and were "
        "paused for measurements.",
    ),
)
