"""Measures as Prometheus has them: pure functions from what is known to families of samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from fairfleet.common.fairness import Fairness
from fairfleet.server.measures import Served, StepTaken

MOST_LAYERS = 64  # of a model with more, no series per layer
STATISTICS = {
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
    "angle_degrees": ("angle_degrees", "Angle between that, one value per client, and all alike"),
    "kl_nats": ("kl_to_uniform", "Kullback-Leibler divergence of the clients' shares from equal ones"),
    "gini_ratio": ("gini", "Gini coefficient of that, 0 if all are alike"),
    "jain_ratio": ("jain", "Jain's index of that, 1 if all are alike"),
}


def step_families(step: StepTaken, layers: Sequence[str]) -> Iterator[Metric]:
    clients = len(step.conflicts)
    yield gauge("fairfleet_conflicting_clients", "Clients that the newest step's direction harms", clients)
    yield gauge("fairfleet_conflicting_layers", "Layers in which it harms a client", step.conflicting_layers)
    yield gauge("fairfleet_history_standing_in_rows", "Rows of absent clients in the newest step", step.standing_in)
    if step.norm is not None:
        yield gauge("fairfleet_direction_norm", "Length of the newest step's direction", step.norm)
    if len(layers) == len(step.layer_conflicts) <= MOST_LAYERS:
        harmed = dict(zip(layers, step.layer_conflicts, strict=True))
        yield gauges("fairfleet_layer_conflicting_clients", "Clients that it harms in a layer", "layer", harmed)
    if step.spread is not None:
        about = "Over the clients of the newest round: what the rule multiplied their updates with"
        yield gauges("fairfleet_coefficient", about, "statistic", vars(step.spread))


def served_families(served: Served) -> Iterator[Metric]:
    yield gauge("fairfleet_evaluation_version", "The newest version that clients were to evaluate", served.version)
    about = "Clients by what became of its evaluation"
    yield gauges("fairfleet_evaluation_clients", about, "outcome", served.outcomes())
    if served.loss:
        yield from _measure("fairfleet_loss", "", "Loss of clients on their own test data", served.loss)
    if served.accuracy:
        about = "Accuracy of clients on their own test data, 0 to 1"
        yield from _measure("fairfleet_accuracy", "_ratio", about, served.accuracy)
    if served.improved is not None:
        about = "Share of clients whose loss fell since the evaluation before"
        yield gauge("fairfleet_improved_clients_ratio", about, served.improved)


def _measure(name: str, unit: str, about: str, fairness: Fairness) -> Iterator[Metric]:
    values = {statistic: getattr(fairness, field) for statistic, field in STATISTICS.items()}
    yield gauges(f"{name}{unit}", about, "statistic", values)
    for suffix, (field, meaning) in INEQUALITIES.items():
        value = getattr(fairness, field)
        if not math.isnan(value):  # not defined of negative losses
            yield gauge(f"{name}_{suffix}", meaning, value)


def client_families(
    served: Served | None, step: StepTaken | None, streaks: Mapping[str, int], known: Sequence[str]
) -> Iterator[Metric]:
    """One series per client: only for fleets that are small enough."""
    label = "client"
    if served:
        losses = {client: found.loss for client, found in served.evaluations.items()}
        accuracies = {c: found.accuracy for c, found in served.evaluations.items() if found.accuracy is not None}
        yield gauges("fairfleet_client_loss", "On the client's own test data", label, losses)
        yield gauges("fairfleet_client_accuracy_ratio", "On the client's own test data", label, accuracies)
    if step:
        about = "Of its update in the newest round"
        yield gauges("fairfleet_client_coefficient", about, label, step.coefficients)
        about = "Cosine between its update and the direction of the newest round"
        yield gauges("fairfleet_client_cosine", about, label, step.cosines)
        about = "Rounds in a row that the direction harmed the client"
        counts = {client: streaks.get(client, 0) for client in known}
        yield gauges("fairfleet_client_conflict_streak_rounds", about, label, counts)


def gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value=float(value))


def gauges(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    return _filled(GaugeMetricFamily(name, about, labels=[label]), values)


def counters(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    return _filled(CounterMetricFamily(name, about, labels=[label]), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for value in values:
        family.add_metric([value], float(values[value]))
    return family
