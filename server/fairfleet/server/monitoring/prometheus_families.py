"""Prometheus metric families of steps, evaluations, clients and admission decisions.

The functions are pure: they turn measures into families of samples and keep nothing. Only
`AdmissionCounters` has state, because its counts run since the server's start. A figure that was
not computed has no series.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from fairfleet.common.fairness import Fairness
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.aggregation.admission import AdmissionSettings
from fairfleet.server.monitoring.measures import FleetEvaluation, StepTaken
from fairfleet.server.storage.round_record import StepImprovement
from fairfleet.server.storage.server_evaluation_table import ServerEvaluation
from fairfleet.server.transfer.counters import TrafficCounters

DIAGNOSTICS_LEVELS = ("full", "model", "off")
MAX_LAYERS = 64  # a model with more layers has no series per layer
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
    "angle_degrees": ("angle_degrees", "Angle between the clients' values and equal values"),
    "kl_nats": (
        "kl_to_uniform",
        "Kullback-Leibler divergence of the clients' shares from equal shares",
    ),
    "gini_ratio": ("gini", "Gini coefficient of the clients' values; 0 if all are equal"),
    "jain_ratio": ("jain", "Jain's index of the clients' values; 1 if all are equal"),
}
# Form, finiteness and report are checked when an update arrives, and an update that fails is
# refused then. The other checks are made when the round is aggregated.
ARRIVAL_CHECKS = ("form", "finite", "report")
ADMISSION_DECISIONS = {
    **dict.fromkeys(ARRIVAL_CHECKS, ("passed", "rejected")),
    "norm": ("passed", "observed", "clipped", "rejected"),
    "loss": ("passed", "observed", "winsorised", "rejected"),
    "samples": ("passed", "observed", "capped"),
    "buffers": ("passed", "clipped"),
    "aggregation": ("passed", "quarantined"),
}


# ---- the newest step -----------------------------------------------------------------------------


def step_families(step: StepTaken, layers: Sequence[str]) -> Iterator[Metric]:
    """Yield the families of the newest step; `layers` names the blocks of the model."""
    yield from _conflict_families(step, layers)
    about = "Rows of absent clients in the newest step"
    yield gauge("fairfleet_history_standing_in_rows", about, step.standing_in)
    if step.norm is not None:
        yield gauge("fairfleet_direction_norm", "Length of the newest step's direction", step.norm)
    if step.spread is not None:
        about = "Factors that the rule gave to the updates of the newest round, over its clients"
        yield gauges("fairfleet_coefficient", about, "statistic", vars(step.spread))


def _conflict_families(step: StepTaken, layers: Sequence[str]) -> Iterator[Metric]:
    if step.level is not None:
        about = "1 for the level of the newest round's figures; figures not computed have no series"
        levels = {level: float(level == step.level) for level in DIAGNOSTICS_LEVELS}
        yield gauges("fairfleet_diagnostics_level", about, "level", levels)
    if step.conflicts is not None:
        about = "Clients that the newest step's direction harms"
        yield gauge("fairfleet_conflicting_clients", about, len(step.conflicts))
    if step.conflicting_layers is not None:
        about = "Layers in which the newest step's direction harms a client"
        yield gauge("fairfleet_conflicting_layers", about, step.conflicting_layers)
    if step.layer_conflicts is not None and len(layers) == len(step.layer_conflicts) <= MAX_LAYERS:
        about = "Clients that the newest step's direction harms in a layer"
        counts = dict(zip(layers, step.layer_conflicts, strict=True))
        yield gauges("fairfleet_layer_conflicting_clients", about, "layer", counts)


def improvement_families(measured: StepImprovement) -> Iterator[Metric]:
    """Yield the shares of clients that gained by a step; a share that is unknown is left out."""
    if measured.not_risen is not None:
        about = (
            "Share of clients whose loss did not rise by the newest step that their reports tell of"
        )
        yield gauge("fairfleet_step_improved_clients_ratio", about, measured.not_risen)
    about = "Share of clients whose loss fell by the newest step that their reports tell of"
    yield gauge("fairfleet_step_strictly_improved_clients_ratio", about, measured.fallen)


# ---- the newest evaluation -----------------------------------------------------------------------


def evaluation_families(evaluation: FleetEvaluation) -> Iterator[Metric]:
    """Yield the families of the newest evaluation; without any result, only its outcomes."""
    about = "The newest version that clients were selected to evaluate"
    yield gauge("fairfleet_evaluation_version", about, evaluation.version)
    about = "Clients by the outcome of that evaluation"
    yield gauges("fairfleet_evaluation_clients", about, "outcome", evaluation.outcomes())
    if evaluation.loss:
        about = "Loss of clients on their own test data"
        yield from _fairness_families("fairfleet_loss", "", about, evaluation.loss)
    if evaluation.accuracy:
        about = "Accuracy of clients on their own test data, 0 to 1"
        yield from _fairness_families("fairfleet_accuracy", "_ratio", about, evaluation.accuracy)
    yield from _measure_families(evaluation.own)
    if evaluation.improved is not None:
        about = "Share of clients whose loss did not rise since the previous evaluation"
        yield gauge("fairfleet_improved_clients_ratio", about, evaluation.improved)
    if evaluation.strictly_improved is not None:
        about = "Share of clients whose loss fell since the previous evaluation"
        yield gauge(
            "fairfleet_strictly_improved_clients_ratio", about, evaluation.strictly_improved
        )


def _measure_families(measures: Mapping[str, Fairness]) -> Iterator[Metric]:
    """Yield the families of the tasks' own measures, with the measure as a label."""
    if not measures:
        return
    about = "A measure of the tasks' own, over clients, on their own test data"
    family = GaugeMetricFamily("fairfleet_measure", about, labels=["measure", "statistic"])
    for measure, fairness in measures.items():
        for statistic, field in STATISTICS.items():
            family.add_metric([measure, statistic], float(getattr(fairness, field)))
    yield family
    for suffix, (field, meaning) in INEQUALITIES.items():
        values = {measure: getattr(fairness, field) for measure, fairness in measures.items()}
        defined = {measure: value for measure, value in values.items() if not math.isnan(value)}
        yield gauges(f"fairfleet_measure_{suffix}", meaning, "measure", defined)


def chosen_measure_family(measure: str, direction: str) -> Metric:
    """Return which measure versions are compared by."""
    about = "The measure by which versions are compared, and which of its values are better"
    labels = {"measure": measure, "better": direction}
    return InfoMetricFamily("fairfleet_chosen_measure", about, labels)


def server_evaluation_families(evaluation: ServerEvaluation) -> Iterator[Metric]:
    """Yield the families of the newest version that the server evaluated on its own test data."""
    about = "The newest version that was evaluated on the server's own test data"
    yield gauge("fairfleet_server_evaluation_version", about, evaluation.version)
    about = "Duration of that evaluation"
    yield gauge("fairfleet_server_evaluation_seconds", about, evaluation.seconds)
    about = "1 if that evaluation failed"
    yield gauge("fairfleet_server_evaluation_failed", about, evaluation.evaluation is None)
    if evaluation.evaluation is not None:
        figures = evaluation.evaluation.figures().items()
        values = {name: figure.value for name, figure in figures}
        about = "A measure on the server's own test data"
        yield gauges("fairfleet_server_measure", about, "measure", values)


def _fairness_families(name: str, unit: str, about: str, fairness: Fairness) -> Iterator[Metric]:
    values = {statistic: getattr(fairness, field) for statistic, field in STATISTICS.items()}
    yield gauges(f"{name}{unit}", about, "statistic", values)
    for suffix, (field, meaning) in INEQUALITIES.items():
        value = getattr(fairness, field)
        if not math.isnan(value):  # some are not defined for negative losses
            yield gauge(f"{name}_{suffix}", meaning, value)


# ---- single clients ------------------------------------------------------------------------------


def client_families(
    evaluation: FleetEvaluation | None,
    step: StepTaken | None,
    streaks: Mapping[str, int] | None,
    clients: Sequence[str],
) -> Iterator[Metric]:
    """Yield families with one series per client, for fleets that are small enough.

    `streaks` counts rounds of conflict by client; it is None where conflicts are not computed.
    """
    if evaluation:
        yield from _client_evaluation_families(evaluation)
    if step:
        about = "Coefficient of the client's update in the newest round"
        yield gauges("fairfleet_client_coefficient", about, "client", step.coefficients)
        about = "Cosine between the client's update and the direction of the newest round"
        yield gauges("fairfleet_client_cosine", about, "client", step.cosines)
        if streaks is not None:
            about = "Consecutive rounds in which the direction harmed the client"
            counts = {client: streaks.get(client, 0) for client in clients}
            yield gauges("fairfleet_client_conflict_streak_rounds", about, "client", counts)


def _client_evaluation_families(evaluation: FleetEvaluation) -> Iterator[Metric]:
    about = "Loss on the client's own test data"
    yield gauges("fairfleet_client_loss", about, "client", evaluation.by_client("loss"))
    about = "Accuracy on the client's own test data, 0 to 1"
    accuracies = evaluation.by_client("accuracy")
    yield gauges("fairfleet_client_accuracy_ratio", about, "client", accuracies)
    if evaluation.own:
        about = "A measure of the task's own on the client's own test data"
        labels = ["client", "measure"]
        family = GaugeMetricFamily("fairfleet_client_measure", about, labels=labels)
        for measure in evaluation.own:
            for client, value in evaluation.by_client(measure).items():
                family.add_metric([client, measure], value)
        yield family


# ---- admission -----------------------------------------------------------------------------------


class AdmissionCounters:
    """Counts of admission decisions by check, since the server's start."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        switched_off = {
            check for check in ("norm", "loss", "samples") if getattr(settings, check) == "off"
        }
        self._aggregation_checks = ADMISSION_DECISIONS.keys() - set(ARRIVAL_CHECKS) - switched_off

    def count_received(self) -> None:
        """Count a complete update: it passed every check that is made on arrival."""
        self._counts.update((check, "passed") for check in ARRIVAL_CHECKS)

    def count_round(self, record: pb.RoundRecord) -> None:
        """Count the decisions of a round, and the updates that passed each check."""
        self._counts.update((finding.check, finding.decision) for finding in record.admission)
        own_findings = [finding for finding in record.admission if not finding.stood_in]
        checked_clients = {contribution.client for contribution in record.contributions}
        checked_clients |= {finding.client for finding in own_findings}
        for check in self._aggregation_checks:
            objected = {finding.client for finding in own_findings if finding.check == check}
            self._counts[check, "passed"] += len(checked_clients - objected)

    def family(self, traffic: TrafficCounters) -> CounterMetricFamily:
        """Return the counts, with the updates that were refused on arrival."""
        about = "Updates, and rows of absent clients, by the decision of an admission check"
        family = CounterMetricFamily("fairfleet_admission", about, labels=["check", "decision"])
        for check, decisions in ADMISSION_DECISIONS.items():
            for decision in decisions:
                refused = traffic.refusals[check] if decision == "rejected" else 0
                family.add_metric([check, decision], self._counts[check, decision] + refused)
        return family


# ---- helpers -------------------------------------------------------------------------------------


def gauge(name: str, about: str, value: float) -> Metric:
    """Return a gauge without labels."""
    return GaugeMetricFamily(name, about, value=float(value))


def gauges(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a gauge with one series per value of a label."""
    return _filled(GaugeMetricFamily(name, about, labels=[label]), values)


def counters(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a counter with one series per value of a label."""
    return _filled(CounterMetricFamily(name, about, labels=[label]), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for label_value, number in values.items():
        family.add_metric([label_value], float(number))
    return family
