"""What a watcher knows about a federation: a value that `fold` updates with each observation.

It is pure, so what people see can be tested without a server or a terminal. An observation may be
folded twice, or an older one after a newer one, as happens around a snapshot. So counts are taken
from the server and never added up here.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fairfleet.common.fairness import Fairness
from fairfleet.proto.v1 import fleet_pb2 as fleet_pb
from fairfleet.proto.v1 import operator_pb2 as pb

RECENT = 20  # rounds from which the pace is estimated


class ClientActivity(enum.Enum):
    """What a client is doing, as far as the watcher knows."""

    IDLE = "idle"
    TRAINING = "training"
    DELIVERED = "delivered"
    VERIFYING = "verifying"
    EVALUATING = "evaluating"
    FAILED = "failed"  # to evaluate, or to try a step
    LOST = "lost"  # to the round under way, or to the newest
    GONE = "gone"
    REVOKED = "revoked"
    FINISHED = "finished"  # it knows that the federation is
    RETIRED = "retired"  # its privacy budget is spent


@dataclass(frozen=True)
class ClientView:
    """What a watcher knows about one client."""

    name: str
    doing: ClientActivity = ClientActivity.IDLE
    device: str = ""
    samples: int = 0
    updates: int = 0  # counted
    steps: tuple[int, int] | None = None  # done and planned, while a long training runs
    train_loss: float | None = None  # of the newest model it received, on its training data
    accuracy: float | None = None  # on its own test data
    loss: float | None = None  # on its own test data
    measures: Mapping[str, float] = field(default_factory=dict)  # of the task's own, by name
    evaluated: int | None = None  # the version that these figures belong to

    def figure(self, measure: str) -> float | None:
        """Return the newest value of a measure; None without it."""
        if measure in ("accuracy", "loss"):
            value: float | None = getattr(self, measure)
            return value
        return self.measures.get(measure)


@dataclass(frozen=True)
class RoundTiming:
    """When a round was committed, how long its phases took, and how many clients it harmed."""

    unix_seconds: float
    training_seconds: float
    aggregation_seconds: float
    verification_seconds: float  # 0 if the step was not tried
    commit_seconds: float
    clients: int = 0  # that took part
    conflicts: int | None = None  # clients that the direction harms; None: not computed


@dataclass(frozen=True)
class VersionFairness:
    """How well one version of the model serves the fleet."""

    version: int
    mean: float
    worst: float
    worst_client: str
    worst_10: float  # mean of the worst-served tenth
    angle_degrees: float  # between the values and an equal distribution; 0 is even
    measure: str = "accuracy"


@dataclass(frozen=True)
class FleetView:
    """What a watcher knows about the federation at one moment."""

    # The newest status, with later events applied to it.
    status: pb.StatusResponse = field(default_factory=pb.StatusResponse)
    clients: Mapping[str, ClientView] = field(default_factory=dict)
    recent: tuple[RoundTiming, ...] = ()
    evaluations: tuple[VersionFairness, ...] = ()
    ended: str = ""  # why the federation is over
    trouble: str = ""  # why the server does not answer

    @property
    def finished(self) -> bool:
        """Whether the federation is over."""
        return self.status.phase == pb.PHASE_FINISHED

    @property
    def measure(self) -> str:
        """The measure that clients are compared by; a server without a choice means accuracy."""
        return self.status.measure or "accuracy"

    @property
    def sign(self) -> int:
        """1 if higher values of the measure are better, -1 if lower ones are."""
        chosen = self.status.measure_direction if self.status.measure else fleet_pb.DIRECTION_HIGHER
        return -1 if chosen == fleet_pb.DIRECTION_LOWER else 1

    def by_need(self) -> list[ClientView]:
        """Return the clients, worst served first; by name until any loss is known."""
        clients = self.clients.values()
        return sorted(clients, key=lambda client: (*self._need(client), client.name))

    def _need(self, client: ClientView) -> tuple[int, float]:
        """Return a sort key: by the measure, then by highest training loss, then the rest."""
        value = client.figure(self.measure)
        if value is not None:
            return 0, self.sign * value
        return (1, -client.train_loss) if client.train_loss is not None else (2, 0.0)

    def seconds_left(self, now: float) -> float | None:
        """Return the remaining time by the pace of the newest rounds; None if it is unknown."""
        if len(self.recent) < 2 or self.finished:
            return None
        per_round = (self.recent[-1].unix_seconds - self.recent[0].unix_seconds) / (
            len(self.recent) - 1
        )
        # The bound limits the harm if the clocks of server and watcher differ.
        under_way = min(max(0.0, now - self.recent[-1].unix_seconds), per_round)
        return max(0.0, per_round * (self.status.rounds_planned - self.status.version) - under_way)


@dataclass(frozen=True)
class Snapshot:
    """Everything that the server reports about one moment."""

    status: pb.StatusResponse
    clients: tuple[pb.ClientRecord, ...] = ()
    recent: tuple[pb.RoundRecord, ...] = ()


@dataclass(frozen=True)
class Disconnected:
    """The connection to the server was lost."""

    why: str


Observation = Snapshot | pb.StatusResponse | pb.Event | Disconnected

ACTIVITIES = {
    pb.CLIENT_STATE_TRAINING: ClientActivity.TRAINING,
    pb.CLIENT_STATE_VERIFYING: ClientActivity.VERIFYING,
    pb.CLIENT_STATE_EVALUATING: ClientActivity.EVALUATING,
    pb.CLIENT_STATE_GONE: ClientActivity.GONE,
    pb.CLIENT_STATE_REVOKED: ClientActivity.REVOKED,
    pb.CLIENT_STATE_RETIRED: ClientActivity.RETIRED,
    pb.CLIENT_STATE_FINISHED: ClientActivity.FINISHED,
}
# A client that disconnects while it does one of these owes the server an answer.
BUSY = (ClientActivity.TRAINING, ClientActivity.VERIFYING, ClientActivity.EVALUATING)


def fold(view: FleetView, observation: Observation) -> FleetView:
    """Return the view after an observation; the given view does not change."""
    match observation:
        case Snapshot():
            return _from_snapshot(view, observation)
        case pb.StatusResponse():
            return replace(view, status=observation, trouble="")
        case Disconnected(why):
            return replace(view, trouble=why)
        case pb.Event():
            kind = observation.WhichOneof("kind")
            if kind is None:
                return view  # A newer server may send events that this program does not know.
            return _after_event(view, observation, getattr(observation, kind))


def _from_snapshot(view: FleetView, snapshot: Snapshot) -> FleetView:
    clients = {
        record.client: _client(view.clients.get(record.client), record)
        for record in snapshot.clients
    }
    for contribution in snapshot.recent[-1].contributions if snapshot.recent else ():
        if contribution.client in clients:
            clients[contribution.client] = replace(
                clients[contribution.client], train_loss=contribution.report.loss_before
            )
    standing = [record for record in snapshot.recent if not record.undone]
    recent = tuple(_timing(record) for record in standing[-RECENT:])
    view = replace(view, status=snapshot.status, clients=clients, recent=recent, trouble="")
    newest = max((client.evaluated or 0 for client in clients.values()), default=0)
    return replace(view, evaluations=_with_evaluation(view, newest))


def _client(previous: ClientView | None, record: pb.ClientRecord) -> ClientView:
    client = replace(
        previous or ClientView(record.client),
        doing=ACTIVITIES.get(record.state, ClientActivity.IDLE),
        device=record.device,
        samples=record.train_samples,
        updates=record.updates_counted,
    )
    if not record.HasField("evaluation"):
        return client
    return _evaluated(client, record.evaluated_version, record.evaluation)


def _evaluated(client: ClientView, version: int, evaluation: Any) -> ClientView:
    return replace(
        client,
        accuracy=evaluation.accuracy if evaluation.HasField("accuracy") else None,
        loss=evaluation.loss if evaluation.HasField("loss") else None,
        measures={measure.name: measure.value for measure in evaluation.measures},
        evaluated=version,
    )


def _after_event(view: FleetView, event: pb.Event, fields: Any) -> FleetView:
    match fields:
        case pb.ClientJoined() | pb.ClientGone():
            return _after_membership(view, fields)
        case pb.RoundStarted() | pb.TrainingProgress() | pb.UpdateReceived():
            return _after_training(view, event.round, fields)
        case pb.AggregationStarted() | pb.RoundCommitted():
            return _after_aggregation(view, fields)
        case pb.VerificationStarted() | pb.StepTried():
            return _after_verification(view, fields)
        case pb.EvaluationStarted() | pb.EvaluationReported() | pb.EvaluationFinished():
            return _after_evaluation(view, event.round, fields)
        case pb.FederationPaused() | pb.FederationResumed():
            is_paused = isinstance(fields, pb.FederationPaused)
            reason = getattr(fields, "reason", "")
            return _with_status(view, paused=is_paused, held_because=reason)
        case pb.FederationContinued():
            if fields.version > view.status.version:  # it went back, and some count no more
                view = replace(view, evaluations=())
            changes = {"version": fields.version, "rounds_planned": fields.rounds_planned}
            return replace(_with_status(view, phase=pb.PHASE_WAITING, **changes), ended="")
        case pb.FederationFinished():
            return replace(_with_status(view, phase=pb.PHASE_FINISHED), ended=fields.reason)
    return view


def _after_membership(view: FleetView, change: pb.ClientJoined | pb.ClientGone) -> FleetView:
    changes: dict[str, Any] = {"doing": ClientActivity.RETIRED}
    if isinstance(change, pb.ClientJoined):
        device, samples = change.device, change.train_samples
        changes = {"device": device, "samples": samples, "doing": ClientActivity.IDLE}
    elif not change.retired:
        previous = view.clients.get(change.client)
        was_busy = previous is not None and previous.doing in BUSY
        changes = {"doing": ClientActivity.LOST if was_busy else ClientActivity.GONE}
    return _with_connected(_with_clients(view, [change.client], **changes), change.connected)


def _after_training(
    view: FleetView,
    round_number: int,
    fields: pb.RoundStarted | pb.TrainingProgress | pb.UpdateReceived,
) -> FleetView:
    match fields:
        case pb.RoundStarted():
            view = _with_status(
                view,
                phase=pb.PHASE_TRAINING,
                version=round_number,
                attempt=fields.attempt,
                asked=len(fields.clients),
                received=fields.received,
                missing=0,
            )
            return _with_clients(view, fields.clients, doing=ClientActivity.TRAINING, steps=None)
        case pb.TrainingProgress():
            steps = (fields.steps_done, fields.steps_planned) if fields.steps_planned else None
            return _with_clients(view, [fields.client], steps=steps)
    view = _with_status(view, received=fields.received, asked=fields.asked)
    loss, doing = fields.report.loss_before, ClientActivity.DELIVERED
    return _with_clients(view, [fields.client], doing=doing, steps=None, train_loss=loss)


def _after_aggregation(
    view: FleetView, fields: pb.AggregationStarted | pb.RoundCommitted
) -> FleetView:
    if isinstance(fields, pb.AggregationStarted):
        return _with_status(view, phase=pb.PHASE_AGGREGATING, received=fields.updates)
    dropped = [name for name in fields.record.dropped if name in view.clients]
    view = _with_clients(view, dropped, doing=ClientActivity.LOST)
    view = replace(view, recent=(*view.recent, _timing(fields.record))[-RECENT:])
    return _with_status(view, version=fields.record.round + 1, phase=pb.PHASE_WAITING)


def _after_verification(
    view: FleetView, fields: pb.VerificationStarted | pb.StepTried
) -> FleetView:
    if isinstance(fields, pb.VerificationStarted):
        view = _with_status(view, phase=pb.PHASE_VERIFYING, asked=len(fields.clients))
        return _with_clients(view, fields.clients, doing=ClientActivity.VERIFYING)
    doing = ClientActivity.FAILED if fields.failure else ClientActivity.DELIVERED
    view = _with_clients(view, [fields.client], doing=doing, steps=None)
    return _with_status(view, asked=_count_doing(view, ClientActivity.VERIFYING))


def _after_evaluation(
    view: FleetView,
    version: int,
    fields: pb.EvaluationStarted | pb.EvaluationReported | pb.EvaluationFinished,
) -> FleetView:
    match fields:
        case pb.EvaluationStarted():
            view = _with_status(view, phase=pb.PHASE_EVALUATING, asked=len(fields.clients))
            return _with_clients(view, fields.clients, doing=ClientActivity.EVALUATING)
        case pb.EvaluationReported():
            return _with_report(view, version, fields)
    if fields.HasField("score"):
        score = fields.score
        view = _with_status(view, measure=score.measure, measure_direction=score.direction)
    return replace(view, evaluations=_with_evaluation(view, version))


def _with_report(view: FleetView, version: int, report: pb.EvaluationReported) -> FleetView:
    doing = ClientActivity.FAILED if report.failure else ClientActivity.IDLE
    view = _with_clients(view, [report.client], doing=doing)
    view = _with_status(view, asked=_count_doing(view, ClientActivity.EVALUATING))
    if report.failure:
        return view
    client = _evaluated(view.clients[report.client], version, report.evaluation)
    return replace(view, clients={**view.clients, report.client: client})


def _count_doing(view: FleetView, activity: ClientActivity) -> int:
    return sum(client.doing is activity for client in view.clients.values())


def _with_evaluation(view: FleetView, version: int) -> tuple[VersionFairness, ...]:
    """Return the evaluations with that of a version, unless no client reports the measure."""
    values = {
        client.name: value
        for client in view.clients.values()
        if client.evaluated == version and (value := client.figure(view.measure)) is not None
    }
    previous = tuple(entry for entry in view.evaluations if entry.version != version)
    if not values:
        return previous
    worst = min(values, key=lambda name: view.sign * values[name])
    fairness = Fairness.of(list(values.values()), higher_is_better=view.sign > 0)
    newest = VersionFairness(
        version,
        fairness.mean,
        values[worst],
        worst,
        fairness.worst_10,
        fairness.angle_degrees,
        view.measure,
    )
    return (*previous, newest)


def _with_clients(view: FleetView, names: Iterable[str], **changes: Any) -> FleetView:
    changed = {
        name: replace(view.clients.get(name) or ClientView(name), **changes) for name in names
    }
    return replace(view, clients={**view.clients, **changed})


def _with_connected(view: FleetView, connected: int) -> FleetView:
    more = connected - view.status.connected
    return _with_status(view, connected=connected, missing=max(0, view.status.missing - more))


def _with_status(view: FleetView, **changes: Any) -> FleetView:
    status = pb.StatusResponse()
    status.CopyFrom(view.status)  # A view is a value: the old one must not change.
    for name, value in changes.items():
        setattr(status, name, value)
    return replace(view, status=status)


def _timing(record: pb.RoundRecord) -> RoundTiming:
    diagnostics = json.loads(record.diagnostics_json) if record.diagnostics_json else {}
    conflicts = diagnostics.get("conflicts")
    return RoundTiming(
        unix_seconds=record.unix_seconds,
        training_seconds=record.training_seconds,
        aggregation_seconds=record.aggregation_seconds,
        verification_seconds=record.verification.seconds,
        commit_seconds=record.commit_seconds,
        clients=len(record.contributions),
        conflicts=None if conflicts is None else len(conflicts),
    )
