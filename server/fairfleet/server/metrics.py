"""What Prometheus is told: how the federation stands, what happened in it, and how evenly it serves its clients.

Counters and durations are fed with the events that watchers get; everything else is read from the coordinator when
a scrape asks for it. Labels have few values, never a client's name.
"""

from __future__ import annotations

import json
from collections import Counter as Tally
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fairfleet.common.fairness import Fairness, improved_share
from fairfleet.common.reports import Evaluation
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.coordinator import Coordinator
from fairfleet.server.rounds import Phase

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
STATISTICS = {
    "mean": "mean",
    "standard_deviation": "standard_deviation",
    "worst_10_percent": "worst_10",
    "best_10_percent": "best_10",
    "min": "min",
    "max": "max",
}
Evaluations = Mapping[str, Evaluation]  # by client


@dataclass(frozen=True)
class Served:
    """How the fleet was served by the newest version that it evaluated."""

    version: int
    loss: Fairness
    accuracy: Fairness | None  # None: no client measures it
    improved: float | None  # share of clients whose loss fell since the evaluation before; None: there is none

    @classmethod
    def of(cls, version: int, now: Evaluations, before: Evaluations) -> Served:
        accuracies = [found.accuracy for found in now.values() if found.accuracy is not None]
        both = sorted(now.keys() & before.keys())
        losses = [before[client].loss for client in both], [now[client].loss for client in both]
        return cls(
            version=version,
            loss=Fairness.of([found.loss for found in now.values()], higher_is_better=False),
            accuracy=Fairness.of(accuracies) if accuracies else None,
            improved=improved_share(*losses, higher_is_better=False) if both else None,
        )


@dataclass(frozen=True)
class Direction:
    """What the newest step means for the clients of its round."""

    conflicting_clients: int
    conflicting_layers: int
    norm: float | None
    standing_in: int  # history rows of absent clients that the rule took account of
    promised: float | None  # share of clients whose loss falls to first order

    @classmethod
    def of(cls, diagnostics: Mapping[str, Any], promised: float | None) -> Direction:
        return cls(
            conflicting_clients=len(diagnostics["conflicts"]),
            conflicting_layers=sum(bool(clients) for clients in diagnostics["layer_conflicts"]),
            norm=diagnostics["direction_norm"],
            standing_in=len(diagnostics["history_coefficients"]),
            promised=promised,
        )


class Metrics(Collector):
    """To be asked on the coordinator's event loop."""

    def __init__(self, coordinator: Coordinator, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.seen: set[str] = set()  # every client that ever took part
        self.served: Served | None = None
        self.direction: Direction | None = None
        self.measured: float | None = None  # share of clients whose loss fell, of the newest step that reports tell of
        self.verified: pb.Verification | None = None  # of the newest step
        self._coordinator = coordinator
        self._evaluation_began: float | None = None
        self._joins = Counter("fairfleet_client_joins", "Clients that joined", registry=registry)
        self._departures = Counter("fairfleet_client_departures", "Clients that left or fell silent", registry=registry)
        self._stand_ins = Counter(
            "fairfleet_history_stand_ins", "Rows of absent clients that steps took account of", registry=registry
        )
        self._verifications = Counter(
            "fairfleet_verifications", "Steps that clients tried, by what came of it", ["outcome"], registry=registry
        )
        self._round_seconds = Histogram(
            "fairfleet_round_duration_seconds", "Training to commit", registry=registry, buckets=SECONDS
        )
        self._phase_seconds = Histogram(
            "fairfleet_phase_duration_seconds", "Time in a phase", ["phase"], registry=registry, buckets=SECONDS
        )
        self._tally: Tally[str] = Tally()  # updates by outcome, of those that events tell of
        registry.register(self)
        ProcessCollector(registry=registry)

    # ---- what happens --------------------------------------------------------------------------

    def observe(self, event: pb.Event) -> None:
        match event.WhichOneof("kind"):
            case "client_joined":
                self.seen.add(event.client_joined.client)
                self._joins.inc()
            case "client_gone":
                self._departures.inc()
            case "update_received":
                self._tally["counted"] += 1
            case "round_committed":
                self._committed(event.round_committed.record)
            case "step_measured":
                self.measured = event.step_measured.measured.improved
            case "evaluation_started":
                self._evaluation_began = event.unix_seconds
            case "evaluation_finished" if self._evaluation_began is not None:
                self._phase("evaluating", event.unix_seconds - self._evaluation_began)

    def _committed(self, record: pb.RoundRecord) -> None:
        seconds = {
            "training": record.training_seconds,
            "aggregating": record.aggregation_seconds,
            "committing": record.commit_seconds,
        }
        self.verified = record.verification if record.HasField("verification") else None
        if self.verified:
            seconds["verifying"] = self.verified.seconds
            self._verifications.labels(self.verified.outcome).inc()
        for phase, taken in seconds.items():
            self._phase(phase, taken)
        self._round_seconds.observe(sum(seconds.values()))
        self._tally["missed"] += len(record.dropped)
        promised = record.promised if record.HasField("promised") else None
        self.direction = Direction.of(json.loads(record.diagnostics_json), promised)
        self._stand_ins.inc(self.direction.standing_in)

    def _phase(self, phase: str, seconds: float) -> None:
        self._phase_seconds.labels(phase).observe(max(0.0, seconds))  # a clock may have been set back

    # ---- how things stand ----------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        yield from self._federation()
        yield from self._fleet()
        yield from self._history()
        if self.direction:
            yield from _told_of_direction(self.direction)
        yield from self._descent()
        if self.served:
            yield from _told_of_served(self.served)

    def _federation(self) -> Iterator[Metric]:
        coordinator, round = self._coordinator, self._coordinator.round
        about = {"federation": coordinator.settings.name, "rule": coordinator.recipe.name}
        yield InfoMetricFamily("fairfleet_federation", "Which federation this is", about)
        yield _gauge("fairfleet_round", "Number of the round under way", round.number)
        yield _gauge("fairfleet_round_attempt", "Attempt of the round under way, from 0", round.attempt)
        yield _gauge("fairfleet_rounds_planned", "Rounds after which the federation ends", coordinator.settings.rounds)
        yield _gauge("fairfleet_model_version", "Committed rounds", coordinator.publication.version)
        yield _gauge("fairfleet_paused", "1 while no new round may begin", round.paused)
        phases = {phase.value: phase is round.phase for phase in Phase}
        yield _gauges("fairfleet_phase", "1 for the phase of the round under way", "phase", phases)

    def _fleet(self) -> Iterator[Metric]:
        round, traffic = self._coordinator.round, self._coordinator.traffic
        yield _gauges("fairfleet_clients", "Clients by what they do", "state", self._clients())
        answers = {"asked": round.asked, "received": round.received, "lost": round.lost}
        counts = {state: len(clients) for state, clients in answers.items()}
        yield _gauges("fairfleet_round_clients", "Clients of the round under way by their answer", "state", counts)
        moved = {"received": traffic.received_bytes, "sent": traffic.sent_bytes}
        yield _counters("fairfleet_transferred_bytes", "Encoded updates in, models out", "direction", moved)
        outcomes = {name: self._tally[name] for name in ("counted", "missed")}
        outcomes |= {name: traffic.outcomes[name] for name in ("late", "repeated", "refused")}
        yield _counters("fairfleet_updates", "Updates by what became of them", "outcome", outcomes)

    def _clients(self) -> dict[str, int]:
        connected = {session.client for session in self._coordinator.sessions.all()}
        revoked = self._coordinator.revoked
        doing = Tally(self._coordinator.doing(client) for client in connected)
        return {
            "idle": doing[""],
            "training": doing["train"],
            "verifying": doing["verify"],
            "evaluating": doing["evaluate"],
            "gone": len(self.seen - connected - revoked),
            "revoked": len(revoked),
        }

    def _descent(self) -> Iterator[Metric]:
        """What was promised to first order, and what was measured, are told apart."""
        if self.direction and self.direction.promised is not None:
            about = "Share of clients whose loss the newest step lowers to first order (g_k . d > 0)"
            yield _gauge("fairfleet_step_promised_clients_ratio", about, self.direction.promised)
        if self.measured is not None:
            about = "Share of clients whose loss fell by the newest step that their reports tell of"
            yield _gauge("fairfleet_step_improved_clients_ratio", about, self.measured)
        if self.verified:
            about = "Part of the newest step that was taken after clients had tried it; 0: none"
            yield _gauge("fairfleet_step_factor", about, self.verified.factor)

    def _history(self) -> Iterator[Metric]:
        now = self._coordinator.round.number
        ages = [now - past.round for past in self._coordinator.past_rows()]
        yield _gauge("fairfleet_history_rows", "Clients whose latest update is kept", len(ages))
        evicted = self._coordinator.rows_evicted
        yield CounterMetricFamily("fairfleet_history_evicted_rows", "Rows forgotten, by age or size", value=evicted)
        if ages:
            told = {"min": min(ages), "mean": sum(ages) / len(ages), "max": max(ages)}
            yield _gauges("fairfleet_history_age_rounds", "How old kept updates are", "statistic", told)


def _told_of_direction(step: Direction) -> Iterator[Metric]:
    clients, layers = step.conflicting_clients, step.conflicting_layers
    yield _gauge("fairfleet_conflicting_clients", "Clients that the newest step's direction harms", clients)
    yield _gauge("fairfleet_conflicting_layers", "Layers in which it harms a client", layers)
    yield _gauge("fairfleet_history_standing_in_rows", "Rows of absent clients in the newest step", step.standing_in)
    if step.norm is not None:
        yield _gauge("fairfleet_direction_norm", "Length of the newest step's direction", step.norm)


def _told_of_served(served: Served) -> Iterator[Metric]:
    yield _gauge("fairfleet_evaluation_version", "The newest version that clients evaluated", served.version)
    yield _gauge("fairfleet_evaluation_clients", "Clients that evaluated it", served.loss.clients)
    yield from _told_of_measure("fairfleet_loss", "", "Loss of clients on their own test data", served.loss)
    if served.accuracy:
        about = "Accuracy of clients on their own test data, 0 to 1"
        yield from _told_of_measure("fairfleet_accuracy", "_ratio", about, served.accuracy)
    if served.improved is not None:
        about = "Share of clients whose loss fell since the evaluation before"
        yield _gauge("fairfleet_improved_clients_ratio", about, served.improved)


def _told_of_measure(name: str, unit: str, about: str, fairness: Fairness) -> Iterator[Metric]:
    values = {statistic: getattr(fairness, field) for statistic, field in STATISTICS.items()}
    yield _gauges(f"{name}{unit}", about, "statistic", values)
    angle = "Angle between that, one value per client, and all alike"
    yield _gauge(f"{name}_angle_degrees", angle, fairness.angle_degrees)


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value=float(value))


def _gauges(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    return _filled(GaugeMetricFamily(name, about, labels=[label]), values)


def _counters(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    return _filled(CounterMetricFamily(name, about, labels=[label]), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for value in values:
        family.add_metric([value], float(values[value]))
    return family
