"""FedFV, Table 3 (and AdaFed, Table 7): Fashion-MNIST, three clients with one class each."""

from __future__ import annotations

from typing import Any

from fairfleet.lab.experiments.sweep import Sweep
from fairfleet.lab.reproductions.base import (
    ClaimVerdict,
    Column,
    Lines,
    Reproduction,
    client_accuracy,
    percent,
)

T_SHIRT, PULLOVER, SHIRT = 0, 1, 2  # Numbers of the clients.
BASE: dict[str, Any] = {
    "data": "fashion-mnist",
    "classes": [0, 2, 6],
    "preprocessing": "standard",
    "partition": "class",
    "split": [0.8, 0.1, 0.1],
    "model": "softmax+probabilities+zero-bias",
    "plan": {"epochs": 1, "batch_size": 0, "learning_rate": 0.1},
    "rounds": 201,
    "evaluate_every": 10,
}
RULES: list[dict[str, Any]] = [
    {"label": "FedAvg", "rule": "fedavg,weighting=uniform"},
    {"label": "AFL 0.01", "rule": "afl,lr_lambda=0.01", "judged": "average"},
    {"label": "AFL 0.5", "rule": "afl,lr_lambda=0.5", "judged": "average"},
    {"label": "q-FedAvg q=5", "rule": "qfedavg,q=5", "loss": "after"},
    {"label": "FedMGDA+ ε=0.1", "rule": "fedmgda_plus,epsilon=0.1,eta=0.1"},
    {"label": "FedMGDA+ ε=0.05", "rule": "fedmgda_plus,epsilon=0.05,eta=0.1"},
    {"label": "FedFV α=0", "rule": "fedfv,alpha=0"},
    {"label": "FedFV α=1/3", "rule": "fedfv,alpha=0.3333333"},
    {"label": "FedFV α=2/3", "rule": "fedfv,alpha=0.6666667"},
    {"label": "AdaFed γ=1", "rule": "adafed,gamma=1", "rounds": 300},
    {
        "label": "AdaFed γ=1, as printed",
        "rule": "adafed,gamma=1,length=literal,phi_norm=none",
        "rounds": 300,
    },
    {"label": "FedLF", "rule": "fedlf,layers=tensors"},
]
COLUMNS = (
    Column("shirt", client_accuracy(SHIRT), tolerance=None),
    Column("pullover", client_accuracy(PULLOVER), tolerance=None),
    Column("T-shirt", client_accuracy(T_SHIRT), tolerance=None),
    Column("mean", percent("mean")),
    Column("std", percent("standard_deviation")),
)


def _row(*figures: float) -> dict[str, float]:
    return {column.name: figure for column, figure in zip(COLUMNS, figures, strict=True)}


def _fairer_than_fedavg(lines: Lines) -> ClaimVerdict | None:
    """Test the claim that the fair rules improve the worst class."""
    fair = [
        name for name in ("FedFV α=1/3", "FedFV α=2/3", "AdaFed γ=1", "AFL 0.5") if name in lines
    ]
    if not fair or "FedAvg" not in lines:
        return None
    base = lines["FedAvg"].value("shirt")
    gains = {name: lines[name].value("shirt") - base for name in fair}
    words = ", ".join(f"{name} {gain:+.2f}" for name, gain in gains.items())
    return ClaimVerdict(
        min(gains.values()) > 0, f"the worst class (shirt) gains over FedAvg: {words}"
    )


QUICK = [
    rule for rule in RULES if rule["label"] in ("FedAvg", "AFL 0.5", "FedFV α=1/3", "AdaFed γ=1")
]
SWEEP: dict[str, Any] = {
    "name": "fedfv-table3",
    "base": BASE,
    "rules": RULES,
    "seeds": [0, 1, 2, 3, 4],
}
TABLE_3 = Reproduction(
    name="fedfv-table3",
    title="FedFV, Table 3 and AdaFed, Table 7: Fashion-MNIST, three clients",
    about=(
        "T-shirt, pullover and shirt, one class per client. Pixels are standardised over the "
        "training images of all ten classes; the 7,000 images of a class are split 80/10/10. A "
        "linear model with a softmax output, followed by a cross-entropy with a second softmax, as "
        "in the authors' repository (the paper says two hidden layers). Full batch, learning rate "
        "0.1, 201 rounds (AdaFed: 300), all clients. AFL is evaluated with the mean of its models; "
        "q-FedAvg receives the loss after training, as in the authors' code."
    ),
    sweep=Sweep.model_validate(SWEEP),
    quick=Sweep.model_validate(
        {**SWEEP, "name": "fedfv-table3-quick", "rules": QUICK, "seeds": [0]}
    ),
    columns=COLUMNS,
    published={
        "FedAvg": _row(64.26, 87.03, 89.97, 80.42, 11.50),
        "AFL 0.01": _row(71.09, 81.89, 84.29, 79.09, 5.76),
        "AFL 0.5": _row(76.57, 78.77, 79.09, 78.14, 1.12),
        "q-FedAvg q=5": _row(71.29, 81.46, 82.86, 78.53, 5.16),
        "FedMGDA+ ε=0.1": _row(72.26, 79.71, 86.03, 79.33, 6.45),
        "FedMGDA+ ε=0.05": _row(44.63, 57.77, 99.09, 67.16, 23.39),
        "FedFV α=0": _row(61.06, 89.31, 91.06, 80.48, 13.76),
        "FedFV α=1/3": _row(77.09, 80.69, 81.06, 79.61, 1.91),
        "FedFV α=2/3": _row(77.91, 81.46, 81.46, 80.28, 1.77),
        "AdaFed γ=1": _row(72.4, 79.8, 85.5, 79.1, 4.5),
        "AdaFed γ=1, as printed": _row(72.4, 79.8, 85.5, 79.1, 4.5),
    },
    claims=(_fairer_than_fedavg,),
    notes=(
        "Only mean and std are compared with the published figures. The classes are not: pullover "
        "is 1 to 3 points above the published figure for most rules (all rules share a seed's "
        "split), and single classes move by several points from seed to seed.",
        "AdaFed's published row is partly reconstructed: T-shirt is the middle of 84 to 87, and "
        "std is the square of the printed 2.12. The classes in the paper's Table 7 average 79.76, "
        "not the printed 79.14. The server rate was not published. The row 'as printed' was added "
        "after our default came out 2.2 above the published mean. Its mean is within 1, but its "
        "std is 1.7 above and shirt 5.7 above. So a shorter step explains the mean, but not the "
        "whole row.",
        "FedLF was not published for these data.",
    ),
)
