"""FedLF, Table 1: Fashion-MNIST over 100 clients, three ways to share it out."""

from __future__ import annotations

from typing import Any

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
RULES: list[dict[str, Any]] = [
    {"label": "FedLF", "rule": "fedlf", "plan": {"batch_size": 0}},
    {"label": "FedAvg", "rule": "fedavg,weighting=uniform"},
    {"label": "FedFV", "rule": "fedfv,alpha=0.1,tau=1"},
    {"label": "FedMGDA+", "rule": "fedmgda_plus,epsilon=0.1,eta=0.1"},
    {"label": "FedMDFG", "rule": "fedmdfg"},
    {"label": "AdaFed", "rule": "adafed,gamma=1"},
    {"label": "AdaFedAdam", "rule": "adafedadam"},
    # What could explain a difference, tried.
    {"label": "FedAvg by samples", "rule": "fedavg"},
    {"label": "FedAvg, rate 0.05", "rule": "fedavg,weighting=uniform", "plan": {"learning_rate": 0.05}},
    {"label": "FedFV, no history", "rule": "fedfv,alpha=0.1,tau=0"},
    {
        "label": "FedMGDA+, falling rate",
        "rule": "fedmgda_plus,epsilon=0.1,lam0=samples,eta=0.1,schedule=exponential,decay=0.999",
    },
]
COLUMNS = (
    Column("acc", lambda run: run.fairness.mean, 3, 0.02),
    Column("fair", lambda run: run.fairness.angle_radians, 3, 0.02),
    Column("worst 5 %", lambda run: run.fairness.worst_5, 3, None),
    Column("best 5 %", lambda run: run.fairness.best_5, 3, None),
)


def _row(*figures: float) -> dict[str, float]:
    return {column.name: figure for column, figure in zip(COLUMNS, figures, strict=False)}


SWEEP: dict[str, Any] = {"name": "fedlf-table1", "base": BASE, "rules": RULES, "settings": SETTINGS}
TABLE_1 = Reproduction(
    name="fedlf-table1",
    title="FedLF, Table 1: Fashion-MNIST, 100 clients",
    about=(
        "Training and test images pooled (70,000), shared out, each client's 6/7 to train and 1/7 to be judged by. "
        "Pat-k: fixed groups of clients with k classes each; Dir(0.1): capped as in the authors' code. MLP "
        "784-200-200-10; 10 clients in each of 3000 rounds, rate 0.1 times 0.999 each round. As in the authors' "
        "runs, FedLF takes one full-gradient step a round and the others one epoch of batches of 50. acc is the mean "
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
        "Dir(0.1) / FedLF": _row(0.892, 0.084, 0.719, 1.00),
        "Pat-1 / FedLF": _row(0.894, 0.089, 0.717, 0.996),
        "Pat-2 / FedLF": _row(0.898, 0.074, 0.731, 1.00),
        "Dir(0.1) / FedMDFG": _row(0.873, 0.089, 0.690),
        "Pat-1 / FedMDFG": _row(0.863, 0.101, 0.628),
        "Pat-2 / FedMDFG": _row(0.874, 0.084, 0.681),
        "Dir(0.1) / FedAvg": _row(0.861, 0.116, 0.601),
        "Pat-1 / FedAvg": _row(0.828, 0.170, 0.401),
        "Pat-2 / FedAvg": _row(0.838, 0.135, 0.325),
        "Dir(0.1) / FedFV": _row(0.850, 0.132, 0.649),
        "Pat-1 / FedFV": _row(0.836, 0.165, 0.416),
        "Pat-2 / FedFV": _row(0.853, 0.135, 0.510),
        "Dir(0.1) / FedAvg by samples": _row(0.861, 0.116, 0.601),
        "Pat-2 / FedAvg, rate 0.05": _row(0.838, 0.135, 0.325),
        "Pat-2 / FedFV, no history": _row(0.853, 0.135, 0.510),
        "Pat-1 / FedMGDA+, falling rate": _row(0.750, 0.305, 0.042),
        "Pat-2 / FedMGDA+, falling rate": _row(0.815, 0.221, 0.316),
        "Dir(0.1) / FedMGDA+": _row(0.809, 0.161, 0.472),
        "Pat-1 / FedMGDA+": _row(0.750, 0.305, 0.042),
        "Pat-2 / FedMGDA+": _row(0.815, 0.221, 0.316),
    },
    claims=tuple(
        above("FedLF", rival, "acc", "worst 5 %", setting=setting["label"])
        for setting in SETTINGS
        for rival in ("FedAvg", "FedFV", "FedMGDA+")
    ),
    notes=(
        "Where a difference could come from the setup, other readings were tried, one seed each. FedAvg at Pat-2 is "
        "better here than published with the rate 0.1, and agrees in acc and fair with 0.05, which is in the authors' "
        "grid, too: the published row is probably of another rate. (With 0.01 it ends at 0.789 and 0.200; that run is "
        "not kept.) Weights by samples, as in the authors' code, change little at Dir(0.1), and the Pat clients have "
        "as many images each.",
        "FedMGDA+ at Pat-1 and Pat-2 is worse here than published. With the server's rate falling like the clients' "
        "and a prior by samples, as in the authors' code, it is further off: not explained.",
        "FedFV at Pat-2 is better here than published. The authors' copy looks for conflicts only among the clients of "
        "the round where the paper looks at the round before (its tau of 1 is off by one): without history FedFV's acc "
        "is 0.01 lower, 0.02 above the published one, but its fair is further off. 0.05 is to be tried here, too.",
        "The seconds are no measure of speed: the runs shared two cores with tests, and were paused for measurements.",
    ),
)
