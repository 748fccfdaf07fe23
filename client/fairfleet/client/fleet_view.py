"""What a watcher knows of a federation: a value that `fold` carries on from each thing observed.

Pure, so that what people see can be tested without a server or a terminal. An observation may be
folded twice, or an older one after a newer, as happens around a snapshot: counts are taken as told,
never added up here.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fairfleet.common.fairness import Fairness
from fairfleet.proto.v1 import operator_pb2 as pb

RECENT = 20  # rounds that the pace is judged by


class Doing(enum.Enum):
    IDLE = "idle"
    TRAINING = "training"
    DELIVERED = "delivered"
    VERIFYING = "verifying"
    EVALUATING = "evaluating"
    FAILED = "failed"  # to evaluate, or to try a step
    LOST = "lost"  # to the round under way, or to the newest
    GONE = "gone"
    REVOKED = "revoked"


@dataclass(frozen=True)
class Client:
    name: str
    doing: Doing = Doing.IDLE
    device: str = ""
    samples: int = 0
    updates: int = 0  # counted
    steps: tuple[int, int] | None = None  # done and planned, of a training that takes a while
    train_loss: float | None = None  # of the newest model it received, on its training data
    accuracy: float | None = None  # on its own test data, as is `loss`
    loss: float | None = None
    evaluated: int | None = None  # which version


@dataclass(frozen=True)
class Pace:
    """When a round was committed, how long its phases took, and whom its step harmed."""

    unix_seconds: float
    training_seconds: float
    aggregation_seconds: float
    verification_seconds: float  # 0 where the step was not tried
    commit_seconds: float
    clients: int = 0  # that took part
    conflicts: int | None = None  # how many of them the direction harms; None where the server does not say


@dataclass(frozen=True)
class Served:
    """How the fleet was served by one version."""

    version: int
    mean: float
    worst: float
    worst_client: str
    worst_10: float  # mean of the worst-served tenth
    angle_degrees: float  # to all alike: 0 is even


@dataclass(frozen=True)
class View:
    status: pb.StatusResponse = field(default_factory=pb.StatusResponse)  # the newest, with later events worked in
    clients: Mapping[str, Client] = field(default_factory=dict)
    recent: tuple[Pace, ...] = ()
    evaluations: tuple[Served, ...] = ()
    ended: str = ""  # why the federation is over
    trouble: str = ""  # why nothing is heard from the server

    @property
    def finished(self) -> bool:
        return self.status.phase == pb.PHASE_FINISHED

    def by_need(self) -> list[Client]:
        """The worst served first; as long as nothing is known of any, by name."""
        return sorted(self.clients.values(), key=lambda client: (*_need(client), client.name))

    def seconds_left(self, now: float) -> float | None:
        """By the pace of the newest rounds; None while there is none."""
        if len(self.recent) < 2 or self.finished:
            return None
        per_round = (self.recent[-1].unix_seconds - self.recent[0].unix_seconds) / (len(self.recent) - 1)
        # bounded, since the server's clock need not be ours
        under_way = min(max(0.0, now - self.recent[-1].unix_seconds), per_round)
        return max(0.0, per_round * (self.status.rounds_planned - self.status.version) - under_way)


@dataclass(frozen=True)
class Snapshot:
    """All that can be asked at one time."""

    status: pb.StatusResponse
    clients: tuple[pb.ClientRecord, ...] = ()
    recent: tuple[pb.RoundRecord, ...] = ()


@dataclass(frozen=True)
class Disconnected:
    why: str


Observation = Snapshot | pb.StatusResponse | pb.Event | Disconnected


def fold(view: View, seen: Observation) -> View:
    match seen:
        case Snapshot():
            return _anew(view, seen)
        case pb.StatusResponse():
            return replace(view, status=seen, trouble="")
        case Disconnected(why):
            return replace(view, trouble=why)
        case pb.Event():
            kind = seen.WhichOneof("kind")
            return _happened(view, seen, getattr(seen, kind)) if kind else view  # a newer server may tell more


def _anew(view: View, snapshot: Snapshot) -> View:
    clients = {record.client: _client(view.clients.get(record.client), record) for record in snapshot.clients}
    for contribution in snapshot.recent[-1].contributions if snapshot.recent else ():
        if contribution.client in clients:
            known = clients[contribution.client]
            clients[contribution.client] = replace(known, train_loss=contribution.report.loss_before)
    recent = tuple(_pace(record) for record in snapshot.recent[-RECENT:])
    view = replace(view, status=snapshot.status, clients=clients, recent=recent, trouble="")
    newest = max((client.evaluated or 0 for client in clients.values()), default=0)
    return replace(view, evaluations=_with_evaluation(view, newest))


def _client(known: Client | None, record: pb.ClientRecord) -> Client:
    doing = {
        pb.CLIENT_STATE_TRAINING: Doing.TRAINING,
        pb.CLIENT_STATE_VERIFYING: Doing.VERIFYING,
        pb.CLIENT_STATE_EVALUATING: Doing.EVALUATING,
        pb.CLIENT_STATE_GONE: Doing.GONE,
        pb.CLIENT_STATE_REVOKED: Doing.REVOKED,
    }
    client = replace(
        known or Client(record.client),
        doing=doing.get(record.state, Doing.IDLE),
        device=record.device,
        samples=record.train_samples,
        updates=record.updates_counted,
    )
    return _evaluated(client, record.evaluated_version, record.evaluation) if record.HasField("evaluation") else client


def _evaluated(client: Client, version: int, evaluation: Any) -> Client:
    accuracy = evaluation.accuracy if evaluation.HasField("accuracy") else None
    return replace(client, accuracy=accuracy, loss=evaluation.loss, evaluated=version)


def _happened(view: View, event: pb.Event, news: Any) -> View:
    match news:
        case pb.ClientJoined():
            doing = {"doing": Doing.IDLE, "device": news.device, "samples": news.train_samples}
            return _connected(_with(view, [news.client], **doing), news.connected)
        case pb.ClientGone():
            known = view.clients.get(news.client)
            owed = known is not None and known.doing in (Doing.TRAINING, Doing.VERIFYING, Doing.EVALUATING)
            return _connected(_with(view, [news.client], doing=Doing.LOST if owed else Doing.GONE), news.connected)
        case pb.RoundStarted():
            asked = {"version": event.round, "attempt": news.attempt, "asked": len(news.clients)}
            view = _standing(view, phase=pb.PHASE_TRAINING, received=news.received, missing=0, **asked)
            return _with(view, news.clients, doing=Doing.TRAINING, steps=None)
        case pb.TrainingProgress():
            steps = (news.steps_done, news.steps_planned) if news.steps_planned else None
            return _with(view, [news.client], steps=steps)
        case pb.UpdateReceived():
            view = _standing(view, received=news.received, asked=news.asked)
            return _with(view, [news.client], doing=Doing.DELIVERED, steps=None, train_loss=news.report.loss_before)
        case pb.AggregationStarted():
            return _standing(view, phase=pb.PHASE_AGGREGATING, received=news.updates)
        case pb.RoundCommitted():
            view = _with(view, [name for name in news.record.dropped if name in view.clients], doing=Doing.LOST)
            view = replace(view, recent=(*view.recent, _pace(news.record))[-RECENT:])
            return _standing(view, version=news.record.round + 1, phase=pb.PHASE_WAITING)
        case pb.VerificationStarted():
            view = _standing(view, phase=pb.PHASE_VERIFYING, asked=len(news.clients))
            return _with(view, news.clients, doing=Doing.VERIFYING)
        case pb.StepTried():
            view = _with(view, [news.client], doing=Doing.FAILED if news.failure else Doing.DELIVERED, steps=None)
            return _standing(view, asked=_still(view, Doing.VERIFYING))
        case pb.EvaluationStarted():
            view = _standing(view, phase=pb.PHASE_EVALUATING, asked=len(news.clients))
            return _with(view, news.clients, doing=Doing.EVALUATING)
        case pb.EvaluationReported():
            return _reported(view, event.round, news)
        case pb.EvaluationFinished():
            return replace(view, evaluations=_with_evaluation(view, event.round))
        case pb.FederationPaused():
            return _standing(view, paused=True)
        case pb.FederationResumed():
            return _standing(view, paused=False)
        case pb.FederationFinished():
            return replace(_standing(view, phase=pb.PHASE_FINISHED), ended=news.reason)
    return view


def _reported(view: View, version: int, news: pb.EvaluationReported) -> View:
    view = _with(view, [news.client], doing=Doing.FAILED if news.failure else Doing.IDLE)
    view = _standing(view, asked=_still(view, Doing.EVALUATING))
    if news.failure:
        return view
    client = _evaluated(view.clients[news.client], version, news.evaluation)
    return replace(view, clients={**view.clients, news.client: client})


def _still(view: View, doing: Doing) -> int:
    return sum(client.doing is doing for client in view.clients.values())


def _with_evaluation(view: View, version: int) -> tuple[Served, ...]:
    """The evaluations with one more, unless no client measures accuracy."""
    known = {
        client.name: client.accuracy
        for client in view.clients.values()
        if client.evaluated == version and client.accuracy is not None
    }
    others = tuple(served for served in view.evaluations if served.version != version)
    if not known:
        return others
    worst = min(known, key=lambda name: known[name])
    fairness = Fairness.of(list(known.values()))
    newest = Served(version, fairness.mean, known[worst], worst, fairness.worst_10, fairness.angle_degrees)
    return (*others, newest)


def _need(client: Client) -> tuple[int, float]:
    if client.accuracy is not None:
        return 0, client.accuracy
    return (1, -client.train_loss) if client.train_loss is not None else (2, 0.0)


def _with(view: View, names: Iterable[str], **changes: Any) -> View:
    changed = {name: replace(view.clients.get(name) or Client(name), **changes) for name in names}
    return replace(view, clients={**view.clients, **changed})


def _connected(view: View, connected: int) -> View:
    more = connected - view.status.connected
    return _standing(view, connected=connected, missing=max(0, view.status.missing - more))


def _standing(view: View, **changes: Any) -> View:
    status = pb.StatusResponse()
    status.CopyFrom(view.status)  # a view is a value: what others hold does not change
    for name, value in changes.items():
        setattr(status, name, value)
    return replace(view, status=status)


def _pace(record: pb.RoundRecord) -> Pace:
    trying = record.verification.seconds
    seconds = record.training_seconds, record.aggregation_seconds, trying, record.commit_seconds
    told = json.loads(record.diagnostics_json) if record.diagnostics_json else {}
    conflicts = len(told["conflicts"]) if "conflicts" in told else None
    return Pace(record.unix_seconds, *seconds, len(record.contributions), conflicts)
