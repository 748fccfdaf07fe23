"""Clients with unequal accuracy, and the fairness figures that follow from it."""

from __future__ import annotations

import json

from fairfleet.common.fairness import Fairness
from tests.support.fleet import Fleet
from tests.support.scraping import Series, series

CLIENTS = {"ann": ("1", "-3", "0.91"), "bob": ("2", "-30", "0.62"), "cyd": ("3", "-300", "0.805")}


MEASURES = {
    "mean": "mean",
    "standard_deviation": "standard_deviation",
    "worst_5_percent": "worst_5",
    "worst_10_percent": "worst_10",
    "worst_30_percent": "worst_30",
    "best_5_percent": "best_5",
    "best_10_percent": "best_10",
    "min": "min",
    "max": "max",
}


INEQUALITIES = {
    "angle_degrees": "angle_degrees",
    "kl_nats": "kl_to_uniform",
    "gini_ratio": "gini",
    "jain_ratio": "jain",
}


def start_uneven_clients(fleet: Fleet) -> None:
    """Start three clients with different losses and accuracies."""
    for name, (shift, target, accuracy) in CLIENTS.items():
        fleet.start_client(name, shift=shift, target=target, accuracy=accuracy)


def evaluated_losses(fleet: Fleet, version: int) -> dict[str, float]:
    """Return the loss of each client that evaluated this version."""
    rows = fleet.query(f"select client, evaluation from evaluations where version = {version}")
    return {client: json.loads(text)["loss"] for client, text in rows}


def expected_fairness(fleet: Fleet) -> dict[Series, float]:
    """Return the value of every fairness gauge, computed from the database."""
    (newest,), (older,) = fleet.query(
        "select distinct version from evaluations order by version desc limit 2"
    )
    rows = [
        json.loads(text)
        for (text,) in fleet.query(f"select evaluation from evaluations where version = {newest}")
    ]
    accuracy = Fairness.of([row["accuracy"] for row in rows])
    loss = Fairness.of([row["loss"] for row in rows], higher_is_better=False)
    before, after = evaluated_losses(fleet, older), evaluated_losses(fleet, newest)
    return {
        **{
            series("fairfleet_accuracy_ratio", statistic=s): getattr(accuracy, m)
            for s, m in MEASURES.items()
        },
        **{series("fairfleet_loss", statistic=s): getattr(loss, m) for s, m in MEASURES.items()},
        **{
            series(f"fairfleet_accuracy_{name}"): getattr(accuracy, field)
            for name, field in INEQUALITIES.items()
        },
        **{
            series(f"fairfleet_loss_{name}"): getattr(loss, field)
            for name, field in INEQUALITIES.items()
        },
        series("fairfleet_improved_clients_ratio"): sum(after[c] <= before[c] for c in after)
        / len(after),
        series("fairfleet_strictly_improved_clients_ratio"): sum(
            after[c] < before[c] for c in after
        )
        / len(after),
        series("fairfleet_evaluation_version"): newest,
        **{
            series("fairfleet_evaluation_clients", outcome=o): 0.0
            for o in ("failed", "silent", "no_test_data")
        },
        series("fairfleet_evaluation_clients", outcome="reported"): len(rows),
    }
