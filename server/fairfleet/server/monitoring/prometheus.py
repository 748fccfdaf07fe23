"""Prometheus metrics of a federation: its state, its events, and its fairness to clients.

Counters and histograms are updated from the events that watchers get. Everything else is read from
the state of the federation at each scrape. Labels have few values; series per client exist only in
a small fleet.
"""

from __future__ import annotations

import platform
import time
from collections import Counter as Tally
from collections.abc import Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fairfleet.common.tensors import Section
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.aggregation.staging import layer_names
from fairfleet.server.federation.event_stream import step_improvement
from fairfleet.server.federation.federation_state import FederationState
from fairfleet.server.monitoring.measures import Conflicts, FleetEvaluation, StepTaken
from fairfleet.server.monitoring.prometheus_families import (
    AdmissionCounters,
    chosen_measure_family,
    client_families,
    counters,
    evaluation_families,
    gauge,
    gauges,
    improvement_families,
    server_evaluation_families,
    step_families,
)
from fairfleet.server.rounds.state_machine import Phase
from fairfleet.server.storage.round_record import StepImprovement
from fairfleet.server.storage.server_evaluation_table import ServerEvaluation

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)


class Metrics(Collector):
    """Collects the metrics. Use it only on the event loop of the coordinator."""

    def __init__(self, federation: FederationState, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.seen: set[str] = set()  # every client that ever took part
        self.evaluation: FleetEvaluation | None = None  # the newest
        # The newest on the server's own test data.
        self.server_evaluation: ServerEvaluation | None = None
        self.step: StepTaken | None = None
        # Share of clients whose loss the newest step lowers to first order.
        self.promised: float | None = None
        # What the newest step did for which there are reports.
        self.measured: StepImprovement | None = None
        self.verified: pb.Verification | None = None  # of the newest step
        self.conflicts = Conflicts()
        # Before the first commit it is the time of the server's start, so that a stall shows.
        self.committed_unix = time.time()
        self._state = federation
        self._evaluation_began: float | None = None
        self._joins = Counter("fairfleet_client_joins", "Clients that joined", registry=registry)
        self._departures = Counter(
            "fairfleet_client_departures",
            "Clients that left or stopped answering",
            registry=registry,
        )
        self._stand_ins = Counter(
            "fairfleet_history_stand_ins",
            "Rows of absent clients that steps used",
            registry=registry,
        )
        self._verifications = Counter(
            "fairfleet_verifications",
            "Steps that clients tried, by outcome",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("accepted", "searched", "commit", "smallest", "skip"):
            self._verifications.labels(outcome)
        self._round_seconds = Histogram(
            "fairfleet_round_duration_seconds",
            "Time from training to commit",
            registry=registry,
            buckets=SECONDS,
        )
        self._phase_seconds = Histogram(
            "fairfleet_phase_duration_seconds",
            "Time in a phase",
            ["phase"],
            registry=registry,
            buckets=SECONDS,
        )
        self._steps = Counter(
            "fairfleet_steps",
            "Committed steps by status: ok or the fallback used",
            ["status"],
            registry=registry,
        )
        self._steps.labels("ok")
        self._admission = AdmissionCounters(federation.settings.admission)
        self._tally: Tally[str] = Tally()  # updates by outcome, as events report them
        registry.register(self)
        ProcessCollector(registry=registry)

    # ---- events --------------------------------------------------------------------------------

    def observe(self, event: pb.Event) -> None:
        """Count an event; commits are counted by `committed`."""
        match event.WhichOneof("kind"):
            case "client_joined":
                self.seen.add(event.client_joined.client)
                self._joins.inc()
            case "client_gone":
                self._departures.inc()
            case "update_received":
                self._tally["counted"] += 1
                self._admission.count_received()
            case "step_measured":
                self.measured = step_improvement(event.step_measured.measured)
            case "evaluation_started":
                self._evaluation_began = event.unix_seconds
            case "evaluation_finished" if self._evaluation_began is not None:
                self._phase("evaluating", event.unix_seconds - self._evaluation_began)
                self._evaluation_began = None  # the next evaluation may select no client

    def committed(self, record: pb.RoundRecord, step: StepTaken) -> None:
        """Count a committed round, and show its figures."""
        seconds = {
            "training": record.training_seconds,
            "aggregating": record.aggregation_seconds,
            "committing": record.commit_seconds,
        }
        self.verified = record.verification if record.HasField("verification") else None
        if self.verified:
            seconds["verifying"] = self.verified.seconds
            self._verifications.labels(self.verified.outcome).inc()
        for phase, duration in seconds.items():
            self._phase(phase, duration)
        self._round_seconds.observe(sum(seconds.values()))
        self._tally["missed"] += len(record.dropped)
        self._admission.count_round(record)
        self.recall(record, step)
        self._steps.labels(step.status).inc()
        self._stand_ins.inc(step.standing_in)

    def recall(self, record: pb.RoundRecord, step: StepTaken) -> None:
        """Show the figures of the newest round, of this run of the server or an earlier one."""
        self.step, self.committed_unix = step, record.unix_seconds
        self.promised = record.promised if record.HasField("promised") else None
        clients = [contribution.client for contribution in record.contributions]
        self.conflicts.add(record.round, clients, step.conflicts)

    def forget_history(self) -> None:
        """Show no figures of rounds and evaluations, until they are recalled again."""
        self.evaluation = self.server_evaluation = None
        self.step = self.promised = self.measured = self.verified = None
        self.conflicts = Conflicts()

    def _phase(self, phase: str, seconds: float) -> None:
        # The duration is negative if the clock was set back.
        self._phase_seconds.labels(phase).observe(max(0.0, seconds))

    # ---- the current state ---------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """Yield the families that are read from the state at each scrape."""
        self.conflicts.forget(self._state.revoked)
        yield from self._federation()
        yield from self._fleet()
        yield from self._traffic()
        yield from self._history()
        yield from self._privacy()
        if self.step:
            yield from step_families(self.step, self.layers)
            yield from self._streaks() if self.conflicts.are_known else ()
        yield from self._descent()
        if self.evaluation:
            yield from evaluation_families(self.evaluation)
        if measure := self._state.measure:
            yield chosen_measure_family(measure, self._state.direction_of(measure))
        if self.server_evaluation:
            yield from server_evaluation_families(self.server_evaluation)
        if len(self.seen) <= self._state.settings.http.client_series:
            streaks = self.conflicts.streaks if self.conflicts.are_known else None
            yield from client_families(self.evaluation, self.step, streaks, sorted(self.seen))

    @property
    def layers(self) -> list[str]:
        """Names of the blocks that rules see a model in."""
        return layer_names(self._state.signature, self._state.recipe.rule.blocks())

    def _federation(self) -> Iterator[Metric]:
        federation, round_number = self._state, self._state.round
        about = {"federation": federation.settings.name, "rule": federation.recipe.name}
        yield InfoMetricFamily("fairfleet_federation", "Which federation this is", about)
        build = {"version": version("fairfleet"), "python": platform.python_version()}
        yield InfoMetricFamily("fairfleet_build", "Versions of FairFleet and Python", build)
        yield gauge("fairfleet_round", "Number of the round under way", round_number.number)
        yield gauge(
            "fairfleet_round_attempt",
            "Attempt of the round under way, from 0",
            round_number.attempt,
        )
        yield gauge(
            "fairfleet_rounds_planned",
            "Rounds after which the federation ends",
            federation.rounds_planned,
        )
        yield gauge("fairfleet_model_version", "Committed rounds", federation.publication.version)
        is_paused = round_number.paused or bool(federation.held_because)
        yield gauge("fairfleet_paused", "1 while no new round may begin", is_paused)
        phases = {phase.value: phase is round_number.phase for phase in Phase}
        yield gauges("fairfleet_phase", "1 for the phase of the round under way", "phase", phases)
        meaning = "When the newest round was committed; before the first, when the server began"
        yield gauge("fairfleet_commit_timestamp_seconds", meaning, self.committed_unix)

    def _fleet(self) -> Iterator[Metric]:
        round_number, traffic = self._state.round, self._state.traffic
        yield gauges("fairfleet_clients", "Clients by state", "state", self._clients())
        answers = {
            "asked": round_number.asked,
            "received": round_number.received,
            "lost": round_number.lost,
        }
        counts = {state: len(clients) for state, clients in answers.items()}
        yield gauges(
            "fairfleet_round_clients",
            "Clients of the round under way by their answer",
            "state",
            counts,
        )
        outcomes = {name: self._tally[name] for name in ("counted", "missed")}
        outcomes |= {name: traffic.outcomes[name] for name in ("late", "repeated", "refused")}
        yield counters("fairfleet_updates", "Updates by outcome", "outcome", outcomes)
        refused = self._state.refusal_counts()
        yield counters(
            "fairfleet_refused",
            "Refused requests by the limit that they exceeded",
            "reason",
            refused,
        )
        yield self._admission.family(traffic)

    def _clients(self) -> dict[str, int]:
        connected = {session.client for session in self._state.sessions()}
        revoked = self._state.revoked
        retired = (self._state.retired.keys() | self._state.exhausted) - connected - revoked
        doing = Tally(self._state.activity(client) for client in connected)
        return {
            "idle": doing[""],
            "training": doing["train"],
            "verifying": doing["verify"],
            "evaluating": doing["evaluate"],
            "gone": len(self.seen - connected - revoked - retired),
            "revoked": len(revoked),
            "retired": len(retired),
        }

    def _descent(self) -> Iterator[Metric]:
        """Yield the share of clients that gain: promised to first order, and measured."""
        if self.promised is not None:
            about = (
                "Share of clients whose loss the newest step lowers to first order (g_k . d > 0)"
            )
            yield gauge("fairfleet_step_promised_clients_ratio", about, self.promised)
        if self.measured is not None:
            yield from improvement_families(self.measured)
        about = "Factor applied to the newest step: 1 unless clients tried it before; 0: no step"
        yield gauge("fairfleet_step_factor", about, self.verified.factor if self.verified else 1.0)

    def _traffic(self) -> Iterator[Metric]:
        traffic = self._state.traffic
        about = "Encoded updates received, and models sent"
        labels = ["direction", "codec"]
        transferred = CounterMetricFamily("fairfleet_transferred_bytes", about, labels=labels)
        for direction, by_codec in (("received", traffic.received), ("sent", traffic.sent)):
            for codec, size_bytes in by_codec.items():
                transferred.add_metric([direction, codec], size_bytes)
        yield transferred
        ratios = {
            codec: traffic.decoded[codec] / size for codec, size in traffic.encoded.items() if size
        }
        about = "Size in float32 of received updates, divided by their encoded size"
        yield gauges("fairfleet_compression_ratio", about, "codec", ratios)
        about = "Uploads that resumed after an interruption"
        yield CounterMetricFamily("fairfleet_upload_resumes", about, value=traffic.resumed)

    def _history(self) -> Iterator[Metric]:
        federation, now = self._state, self._state.round.number
        ages = [now - past.round for past in federation.past_rows()]
        yield gauge("fairfleet_history_rows", "Clients whose latest update is kept", len(ages))
        width = 2 if federation.settings.history.precision == "float16" else 4
        size = len(ages) * width * federation.signature.size(Section.PARAMETERS)
        yield gauge("fairfleet_history_size_bytes", "Size of these rows", size)
        about = "Rows forgotten, by age or size"
        yield CounterMetricFamily(
            "fairfleet_history_evicted_rows", about, value=federation.rows_evicted
        )
        if ages:
            ages_by_statistic = {
                "min": min(ages),
                "mean": sum(ages) / len(ages),
                "max": max(ages),
            }
            about = "Age of the kept updates"
            yield gauges("fairfleet_history_age_rounds", about, "statistic", ages_by_statistic)

    def _privacy(self) -> Iterator[Metric]:
        budget = self._state.privacy_budget
        if budget is None:
            return
        about = "Epsilon spent so far on the client with the most releases"
        yield gauge("fairfleet_privacy_epsilon", about, budget.epsilon())
        yield gauge("fairfleet_privacy_delta", "The delta of that epsilon", budget.privacy.delta)

    def _streaks(self) -> Iterator[Metric]:
        about = "Longest streak of a connected client: its own rounds in a row that harmed it"
        connected = (session.client for session in self._state.sessions())
        yield gauge(
            "fairfleet_conflict_streak_rounds", about, self.conflicts.longest_streak(connected)
        )
