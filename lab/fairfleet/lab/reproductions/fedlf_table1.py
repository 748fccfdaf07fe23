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
    {"label": "AdaFedAdam", "rule": "adafedadam,reference=first"},
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
        "Training and test images are pooled (70,000) and divided among the clients. Each client "
        "trains on 6/7 of its images and is evaluated on 1/7. Pat-k: fixed groups of clients with "
        "k classes each. Dir(0.1): capped as in the authors' code. MLP 784-200-200-10; 10 clients "
        "in each of 3000 rounds; learning rate 0.1, multiplied by 0.999 in each round. As in the "
        "authors' runs, FedLF and FedMDFG take one full-gradient step per round, and the others "
        "train one epoch in batches of 50. FedLF's layers are tensors in these runs, and modules "
        "in the paper. acc is the mean accuracy over the clients; fair is the angle to equal "
        "accuracies in radians."
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
        "'late' columns are means over the evaluations of the last 500 rounds. All rules but FedLF "
        "oscillate: FedAvg at Pat-2 (seed 0) is between 0.827 and 0.864 in those rounds, so the "
        "last model is only one of many. We assume that the published figures are also those of "
        "last models, over five seeds.",
        "Where our figures differ from the published ones, we ran the authors' own program "
        "(docs/authors_fedlf.py) and tried other readings of the setup (one or two seeds). FedMDFG "
        "and FedLF of that program stop with an error as released. In the runs called 'mended', "
        "wrong calls of functions were corrected; this does not change what is computed. The "
        "following paragraphs explain the differences.",
        "FedAvg at Pat-2: the authors' program ends where ours does (0.863 and 0.123; ours 0.863 "
        "and 0.117), above the published 0.838. With the rate 0.05, which is in the paper's grid, "
        "ours ends at 0.841 and 0.130, but at a peak of its oscillation: its late mean is 0.817. "
        "(With the rate 0.01 it ends at 0.789 and 0.200; that run is not kept.) With one batch or "
        "one full-gradient step per round it ends at 0.849.",
        "FedFV: the authors' program reaches the published acc at Pat-2 (0.857; published 0.853), "
        "Pat-1 (0.836; published 0.836) and Dir(0.1) (0.866; published 0.850). Its fair oscillates "
        "between 0.06 and 0.21 in the last 500 rounds, and its late means (0.118, 0.180 and 0.114) "
        "are within 0.02 of the published 0.135, 0.165 and 0.132. Our acc is higher (0.882, 0.856 "
        "and 0.880). Our rule follows FedFV's paper, which projects against clients of earlier "
        "rounds. The authors' copy has an index that is off by one there, and projects a second "
        "time against clients of the same round. Without history our figures are closer to theirs "
        "(0.873 at Pat-2, late 0.861).",
        "FedMGDA+: the authors' program ends at 0.755 and 0.259 at Pat-2, and at 0.654 and 0.432 "
        "at Pat-1; with the rate 0.05 it ends lower (0.696 and 0.506). So it does not reach the "
        "published 0.815 and 0.750 with these rates of the paper's grid. With a server rate that "
        "falls like the clients' rate, and with weights by samples, as in the authors' program, "
        "our rule ends where that program does (0.760 and 0.241; 0.680 and 0.408). With a constant "
        "rate, as in FedFV's tables, it ends a little higher at Pat-2, and with one batch per "
        "round higher still (0.812; 0.791). At Dir(0.1) the authors' program agrees with the "
        "published line (0.817 and 0.141; published 0.809 and 0.161). Ours agrees with one batch "
        "per round (0.827 and 0.159); with a falling rate it is off by 0.021 in acc and 0.023 in "
        "fair.",
        "FedMDFG takes one full-gradient step per round, like FedLF, and then makes its line "
        "search, as in the authors' code. It agrees, except for fair at Pat-2 (0.056; published "
        "0.084). There the authors' program ends where ours does (0.884 and 0.057 over two seeds; "
        "ours 0.885 and 0.056), and the rate 0.05 changes nothing (0.886 and 0.057). So the "
        "program does not reach the published figure with these settings, although one of its "
        "seeds rises to 0.094 for a while in the last 500 rounds. Our rule differs from their "
        "program on purpose. In that program, the lengths of absent clients' gradients are "
        "shuffled, and the line search has a sign that lets losses rise.",
        "Last models cannot decide whether the worst clients of FedLF or those of FedMDFG are "
        "better off: the seeds do not agree, because FedMDFG oscillates. Over the last 500 rounds "
        "the worst clients of FedLF are better off with every seed in every setting, as in the "
        "paper. The authors' program agrees (late worst 5 %: 0.799 and 0.761 at Pat-2, 0.736 and "
        "0.613 at Pat-1). Its FedLF at Pat-1 reproduces the published line (0.893, 0.088 and "
        "0.744; published 0.894, 0.089 and 0.717).",
        "The worst 5 % are shown but not compared with the published figures, because they are "
        "only five clients. At Pat-2 they are better off than published with every rule, in our "
        "runs and in the authors' program: FedLF 0.775 and 0.802 (published 0.731), FedFV 0.739 "
        "and 0.676 (0.510), FedAvg 0.640 and 0.624 (0.325), FedMGDA+ 0.435 and 0.386 (0.316). We "
        "do not know the settings of the published runs that would explain this.",
        "FedAvg at Dir(0.1) is 0.022 above the published acc, and agrees in fair. The authors' "
        "program ends at 0.855 and 0.147; it draws the partition in another way, and uses one "
        "partition for all seeds. Weights by samples, as in that program, change little. So do "
        "batches that are the same in every round (0.877 instead of 0.880; that run is not kept).",
        "AdaFed and AdaFedAdam are not in the published table. AdaFedAdam's rows were run with "
        "`reference=first`, which divides a client's loss by that at its first participation. The "
        "default since then, the loss on the initial model (`reference=initial`), gives clients "
        "that are first selected late less weight. The rows were not run again with it.",
        "The seconds do not measure speed: the runs shared two cores with tests, and were paused "
        "for measurements.",
    ),
)
