"""What the page shows, kept up to date from events: clients, rounds, evaluations, and what happened.

Everything in it carries the revision of the picture at which it last changed. So a viewer that has seen revision r
needs only what is newer, and one that has seen nothing needs everything: both are the same question, `since(r)`.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from fairfleet.common.fairness import Fairness, mean, worst
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.measures import Conflicts, Served, StepTaken
from fairfleet.server.news import headline

ROUNDS = 200  # shown; the database has them all
EVALUATIONS = 400
HEADLINES = 200
BUSY = ("training", "delivered", "verifying", "evaluating")
AWAY = ("gone", "revoked")  # only who joins leaves these
QUANTILES = (0, 10, 25, 50, 75, 90, 100)


@dataclass
class ClientRow:
    client: str
    revision: int = 0
    state: str = "gone"  # revoked, idle, one of BUSY, lost (to its round), or done (told that all is finished)
    connected: bool = False
    device: str = ""
    samples: int = 0  # to train on
    seen_unix: float | None = None  # when something was last heard of it
    asked: int = 0  # times selected to train
    asked_round: int = -1  # the last time
    updates: int = 0  # counted
    last_round: int | None = None  # that it took part in
    accuracy: float | None = None
    loss: float | None = None
    evaluated: int | None = None  # which version
    failure: str = ""  # why the newest evaluation has no result of it
    coefficient: float | None = None  # in the last round that it took part in
    cosine: float | None = None  # with the direction of that round
    conflicts: int = 0  # rounds of those remembered in which the direction harmed it
    streak: int = 0  # of its own rounds, in a row until now


class Picture:
    def __init__(self) -> None:
        self.revision = 0
        self.conflicts = Conflicts()
        self._clients: dict[str, ClientRow] = {}
        self._owed: dict[str, str] = {}  # by client: the state that it is in once it is back, for it was asked
        self._rounds: deque[dict[str, Any]] = deque(maxlen=ROUNDS)
        self._evaluations: deque[dict[str, Any]] = deque(maxlen=EVALUATIONS)
        self._headlines: deque[dict[str, Any]] = deque(maxlen=HEADLINES)

    def since(self, revision: int) -> dict[str, Any]:
        return {
            "revision": self.revision,
            "clients": [vars(row) for row in self._clients.values() if row.revision > revision],
            "rounds": [entry for entry in self._rounds if entry["revision"] > revision],
            "evaluations": [entry for entry in self._evaluations if entry["revision"] > revision],
            "events": [entry for entry in self._headlines if entry["revision"] > revision],
        }

    def set(self, client: str, **changes: Any) -> ClientRow:
        row = self._clients.get(client)
        if row is None:
            row = self._clients[client] = ClientRow(client)
        for name, value in changes.items():
            setattr(row, name, value)
        self.revision += 1
        row.revision = self.revision
        return row

    def compare(self, connected: Set[str], revoked: Set[str], *, finished: bool) -> None:
        """With who is there: not everything has an event, such as the leaving of those told that all is finished."""
        for row in self._clients.values():
            if row.connected != (row.client in connected):
                self.set(row.client, connected=row.client in connected)
            if row.client in revoked and (row.state != "revoked" or row.streak):
                self.conflicts.forget([row.client])
                self.set(row.client, state="revoked", streak=0)
            elif finished and not row.connected and row.state in ("idle", *BUSY):
                self.set(row.client, state="done")

    # ---- what happens --------------------------------------------------------------------------

    def observe(self, event: pb.Event) -> None:
        kind = event.WhichOneof("kind")
        if kind is None:
            return  # of a newer server
        news: Any = getattr(event, kind)
        match kind:
            case "client_joined":
                told = {"device": news.device, "samples": news.train_samples}
                state = self._owed.get(news.client, "idle")
                self.set(news.client, state=state, seen_unix=event.unix_seconds, **told)
            case "client_gone":
                self._owed.pop(news.client, None)
                state = "revoked" if news.reason == "revoked" else "gone"
                self.set(news.client, state=state, seen_unix=event.unix_seconds)
            case "round_started":
                self._asked(news.clients, event.round)
            case "update_received" | "step_tried":
                self._answered(news.client, "delivered", event.unix_seconds)
            case "verification_started":
                self._ask(news.clients, "verifying")
            case "evaluation_started":
                self._ask(news.clients, "evaluating")
            case "evaluation_reported":
                self._answered(news.client, "idle", event.unix_seconds)
            case "evaluation_finished":
                self._release("evaluating")
            case "step_measured":
                self._measured(news.round, news.measured.improved)
        if (line := headline(event)) is not None:
            self.revision += 1
            told = {"unix_seconds": event.unix_seconds, "round": event.round, "kind": kind, "text": line}
            self._headlines.append({"revision": self.revision, **told})

    def _asked(self, clients: Iterable[str], round: int) -> None:
        self._ask(clients, "training")
        for client in clients:
            row = self._clients[client]
            if row.asked_round != round:  # after a restart the same clients are asked again
                row.asked, row.asked_round = row.asked + 1, round

    def _ask(self, clients: Iterable[str], state: str) -> None:
        for client in clients:
            self._owed[client] = state
            self._move(client, state)

    def _answered(self, client: str, state: str, unix_seconds: float) -> None:
        self._owed.pop(client, None)
        self._move(client, state, seen_unix=unix_seconds)

    def _release(self, *states: str) -> None:
        """Whoever owes one of these owes it no more."""
        self._owed = {client: state for client, state in self._owed.items() if state not in states}
        for client in [row.client for row in self._clients.values() if row.state in states]:
            self.set(client, state="idle")

    def _move(self, client: str, state: str, **changes: Any) -> None:
        known = self._clients.get(client)
        away = known is not None and known.state in AWAY
        self.set(client, **changes, **({} if away else {"state": state}))

    def _measured(self, round: int, improved: float) -> None:
        for entry in self._rounds:
            if entry["round"] == round:
                self.revision += 1
                entry.update(revision=self.revision, measured=finite(improved))

    def committed(self, record: pb.RoundRecord, step: StepTaken, *, live: bool = True) -> None:
        """A round, as it is committed or as it is found in the records of an earlier run."""
        if self._rounds and record.round <= self._rounds[-1]["round"]:
            return
        clients = [contribution.client for contribution in record.contributions]
        self.conflicts.add(record.round, clients, step.conflicts)
        for client in clients:
            row = self.set(
                client,
                last_round=record.round,
                coefficient=finite(step.coefficients.get(client)),
                cosine=finite(step.cosines.get(client)),
                conflicts=self.conflicts.counts[client],
                streak=self.conflicts.streaks[client],
            )
            row.updates += live
        for client in record.dropped if live else ():
            if client in self._clients and self._clients[client].state == "training":
                self.set(client, state="lost")
        if live:
            self._release("training", "verifying", "delivered")
        self.revision += 1
        self._rounds.append({"revision": self.revision, **round_entry(record, step)})

    def evaluated(self, served: Served, unix_seconds: float) -> None:
        for client, found in served.evaluations.items():
            told = {"accuracy": found.accuracy, "loss": found.loss, "evaluated": served.version, "failure": ""}
            self.set(client, **told)
        for client, failure in served.failures.items():
            self.set(client, failure=failure)
        self.revision += 1
        self._evaluations.append({"revision": self.revision, **evaluation_entry(served, unix_seconds)})


# ---- entries -------------------------------------------------------------------------------------


def round_entry(record: pb.RoundRecord, step: StepTaken) -> dict[str, Any]:
    losses = [contribution.report.loss_before for contribution in record.contributions]
    return {
        "round": record.round,
        "unix_seconds": record.unix_seconds,
        "training_seconds": record.training_seconds,
        "aggregation_seconds": record.aggregation_seconds,
        "verification_seconds": record.verification.seconds,  # 0 where the step was not tried
        "commit_seconds": record.commit_seconds,
        "attempts": record.attempts,
        "updates": len(record.contributions),
        "dropped": len(record.dropped),
        "bytes_received": record.bytes_received,
        "loss_mean": finite(mean(losses)),
        "loss_worst_10": finite(worst(losses, 10, higher_is_better=False)),
        "conflicts": len(step.conflicts),
        "conflicting_layers": step.conflicting_layers,
        "direction_norm": finite(step.norm),
        "standing_in": step.standing_in,
        "status": step.status,
        "promised": finite(record.promised) if record.HasField("promised") else None,
        "measured": finite(record.measured.improved) if record.HasField("measured") else None,  # known later
        "admission": dict(Counter(one.decision for one in record.admission)),
        "factor": record.verification.factor if record.HasField("verification") else None,
    }


def evaluation_entry(served: Served, unix_seconds: float) -> dict[str, Any]:
    accuracies = [found.accuracy for found in served.evaluations.values() if found.accuracy is not None]
    losses = [found.loss for found in served.evaluations.values()]
    return {
        "version": served.version,
        "unix_seconds": unix_seconds,
        "outcomes": served.outcomes(),
        "improved": finite(served.improved),
        "accuracy": _measures(served.accuracy, accuracies),
        "loss": _measures(served.loss, losses),
    }


def _measures(fairness: Fairness | None, values: list[float]) -> dict[str, Any] | None:
    if fairness is None:
        return None
    told = {name: finite(value) for name, value in vars(fairness).items()}
    return told | {"quantiles": [float(value) for value in np.percentile(values, QUANTILES)]}


def finite(value: float | None) -> float | None:
    """JSON has no word for NaN and infinity."""
    return value if value is not None and math.isfinite(value) else None
