"""What Prometheus is told: how the federation stands, what happened in it, and how evenly it serves its clients.

Counters and durations are fed with the events that watchers get; everything else is read from the coordinator when
a scrape asks for it. Labels have few values; a client is named only while the fleet is small.
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
from fairfleet.server.admission_metrics import AdmissionTally
from fairfleet.server.coordinator import Coordinator
from fairfleet.server.measures import Conflicts, Served, StepTaken
from fairfleet.server.metric_families import (
    client_families,
    counters,
    gauge,
    gauges,
    served_families,
    step_families,
)
from fairfleet.server.rounds import Phase

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)


class Metrics(Collector):
    """To be asked on the coordinator's event loop."""

    def __init__(self, coordinator: Coordinator, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.seen: set[str] = set()  # every client that ever took part
        self.served: Served | None = None
        self.step: StepTaken | None = None
        self.promised: float | None = None  # share of clients whose loss the newest step lowers to first order
        self.measured: float | None = None  # share of clients whose loss fell, of the newest step that reports tell of
        self.verified: pb.Verification | None = None  # of the newest step
        self.conflicts = Conflicts()
        self.committed_unix = time.time()  # or, before the first commit, when the server began: so a stall shows
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
        for outcome in ("accepted", "searched", "commit", "smallest", "skip"):
            self._verifications.labels(outcome)
        self._round_seconds = Histogram(
            "fairfleet_round_duration_seconds", "Training to commit", registry=registry, buckets=SECONDS
        )
        self._phase_seconds = Histogram(
            "fairfleet_phase_duration_seconds", "Time in a phase", ["phase"], registry=registry, buckets=SECONDS
        )
        self._steps = Counter(
            "fairfleet_steps", "Committed steps by how they came about", ["status"], registry=registry
        )
        self._steps.labels("ok")
        self._admission = AdmissionTally(coordinator.settings.admission)
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
                self._admission.received()
            case "step_measured":
                self.measured = event.step_measured.measured.improved
            case "evaluation_started":
                self._evaluation_began = event.unix_seconds
            case "evaluation_finished" if self._evaluation_began is not None:
                self._phase("evaluating", event.unix_seconds - self._evaluation_began)
                self._evaluation_began = None  # the next one may ask nobody

    def committed(self, record: pb.RoundRecord, step: StepTaken) -> None:
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
        self._admission.committed(record)
        self.recall(record, step)
        self._steps.labels(step.status).inc()
        self._stand_ins.inc(step.standing_in)

    def recall(self, record: pb.RoundRecord, step: StepTaken) -> None:
        """What is shown of the newest round, be it of this run of the server or of an earlier one."""
        self.step, self.committed_unix = step, record.unix_seconds
        self.promised = record.promised if record.HasField("promised") else None
        self.conflicts.add(record.round, [each.client for each in record.contributions], step.conflicts)

    def _phase(self, phase: str, seconds: float) -> None:
        self._phase_seconds.labels(phase).observe(max(0.0, seconds))  # a clock may have been set back

    # ---- how things stand ----------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        self.conflicts.forget(self._coordinator.revoked)
        yield from self._federation()
        yield from self._fleet()
        yield from self._moved()
        yield from self._history()
        yield from self._privacy()
        if self.step:
            yield from step_families(self.step, self.layers)
            yield from self._streaks()
        yield from self._descent()
        if self.served:
            yield from served_families(self.served)
        if len(self.seen) <= self._coordinator.settings.http.client_series:
            yield from client_families(self.served, self.step, self.conflicts.streaks, sorted(self.seen))

    @property
    def layers(self) -> list[str]:
        """Names of the blocks that rules see a model in."""
        return [tensor.name for tensor, _ in self._coordinator.signature.spans(Section.PARAMETERS) if tensor.size]

    def _federation(self) -> Iterator[Metric]:
        coordinator, round = self._coordinator, self._coordinator.round
        about = {"federation": coordinator.settings.name, "rule": coordinator.recipe.name}
        yield InfoMetricFamily("fairfleet_federation", "Which federation this is", about)
        build = {"version": version("fairfleet"), "python": platform.python_version()}
        yield InfoMetricFamily("fairfleet_build", "What serves it", build)
        yield gauge("fairfleet_round", "Number of the round under way", round.number)
        yield gauge("fairfleet_round_attempt", "Attempt of the round under way, from 0", round.attempt)
        yield gauge("fairfleet_rounds_planned", "Rounds after which the federation ends", coordinator.settings.rounds)
        yield gauge("fairfleet_model_version", "Committed rounds", coordinator.publication.version)
        yield gauge("fairfleet_paused", "1 while no new round may begin", round.paused)
        phases = {phase.value: phase is round.phase for phase in Phase}
        yield gauges("fairfleet_phase", "1 for the phase of the round under way", "phase", phases)
        meaning = "When the newest round was committed; before the first, when the server began"
        yield gauge("fairfleet_commit_timestamp_seconds", meaning, self.committed_unix)

    def _fleet(self) -> Iterator[Metric]:
        round, traffic = self._coordinator.round, self._coordinator.traffic
        yield gauges("fairfleet_clients", "Clients by what they do", "state", self._clients())
        answers = {"asked": round.asked, "received": round.received, "lost": round.lost}
        counts = {state: len(clients) for state, clients in answers.items()}
        yield gauges("fairfleet_round_clients", "Clients of the round under way by their answer", "state", counts)
        outcomes = {name: self._tally[name] for name in ("counted", "missed")}
        outcomes |= {name: traffic.outcomes[name] for name in ("late", "repeated", "refused")}
        yield counters("fairfleet_updates", "Updates by what became of them", "outcome", outcomes)
        refused = self._coordinator.gate.refusals.counts()
        yield counters("fairfleet_refused", "What peers were refused, by the limit that they met", "reason", refused)
        yield self._admission.family(traffic)

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
        if self.promised is not None:
            about = "Share of clients whose loss the newest step lowers to first order (g_k . d > 0)"
            yield gauge("fairfleet_step_promised_clients_ratio", about, self.promised)
        if self.measured is not None:
            about = "Share of clients whose loss fell by the newest step that their reports tell of"
            yield gauge("fairfleet_step_improved_clients_ratio", about, self.measured)
        about = "Part of the newest step that was taken: 1 unless clients tried it before; 0: none"
        yield gauge("fairfleet_step_factor", about, self.verified.factor if self.verified else 1.0)

    def _moved(self) -> Iterator[Metric]:
        traffic = self._coordinator.traffic
        moved = CounterMetricFamily(
            "fairfleet_transferred_bytes", "Encoded updates in, models out", labels=["direction", "codec"]
        )
        for direction, by_codec in (("received", traffic.received), ("sent", traffic.sent)):
            for codec, size_bytes in by_codec.items():
                moved.add_metric([direction, codec], size_bytes)
        yield moved
        ratios = {codec: traffic.decoded[codec] / size for codec, size in traffic.encoded.items() if size}
        about = "How many times smaller whole updates came in than they are in float32"
        yield gauges("fairfleet_compression_ratio", about, "codec", ratios)
        about = "Uploads that went on where they had broken off"
        yield CounterMetricFamily("fairfleet_upload_resumes", about, value=traffic.resumed)

    def _history(self) -> Iterator[Metric]:
        coordinator, now = self._coordinator, self._coordinator.round.number
        ages = [now - past.round for past in coordinator.past_rows()]
        yield gauge("fairfleet_history_rows", "Clients whose latest update is kept", len(ages))
        width = 2 if coordinator.settings.history.precision == "float16" else 4
        size = len(ages) * width * coordinator.signature.size(Section.PARAMETERS)
        yield gauge("fairfleet_history_size_bytes", "What these rows take", size)
        about = "Rows forgotten, by age or size"
        yield CounterMetricFamily("fairfleet_history_evicted_rows", about, value=coordinator.rows_evicted)
        if ages:
            told = {"min": min(ages), "mean": sum(ages) / len(ages), "max": max(ages)}
            yield gauges("fairfleet_history_age_rounds", "How old kept updates are", "statistic", told)

    def _privacy(self) -> Iterator[Metric]:
        spending = self._coordinator.spending
        if spending is None:
            return
        about = "Differential privacy spent so far on the client of whom most was released"
        yield gauge("fairfleet_privacy_epsilon", about, spending.epsilon())
        yield gauge("fairfleet_privacy_delta", "That goes with it", spending.privacy.delta)

    def _streaks(self) -> Iterator[Metric]:
        about = "Longest run of its own rounds in which the direction harmed one and the same connected client"
        connected = (session.client for session in self._coordinator.sessions.all())
        yield gauge("fairfleet_conflict_streak_rounds", about, self.conflicts.longest_streak(connected))
