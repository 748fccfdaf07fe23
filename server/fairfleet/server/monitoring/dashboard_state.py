"""What the dashboard shows, updated from events: clients, rounds, evaluations and headlines.

Every entry carries the revision of the state at which it last changed. A viewer that has seen
revision r needs only newer entries, and a new viewer needs all of them: `since(r)` and `since(0)`.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fairfleet.common.cli.event_text import headline
from fairfleet.common.fairness import Fairness, mean, worst
from fairfleet.common.wire import measured_as
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.monitoring.measures import Conflicts, FleetEvaluation, StepTaken
from fairfleet.server.storage.server_evaluation_table import ServerEvaluation

ROUNDS = 200  # entries shown; the database has all of them
EVALUATIONS = 400
HEADLINES = 200
BUSY = ("training", "delivered", "verifying", "evaluating")
AWAY = ("gone", "revoked", "retired")  # states that a client leaves only by joining
OF_HISTORY = (  # fields of a client's row
    *("updates", "last_round", "accuracy", "loss", "measures", "evaluated", "failure"),
    *("coefficient", "cosine", "conflicts", "streak"),
)
QUANTILES = (0, 10, 25, 50, 75, 90, 100)


@dataclass
class ClientRow:
    """What is shown of one client."""

    client: str
    revision: int = 0
    # gone, revoked, retired, idle, one of BUSY, lost (missed by its round), or done (all is over)
    state: str = "gone"
    connected: bool = False
    device: str = ""
    software: str = ""  # name and version
    not_selected_because: str = ""  # empty: it can be selected
    samples: int = 0  # to train on
    seen_unix: float | None = None  # when it last called
    asked: int = 0  # times selected to train
    asked_round: int = -1  # the round of the last time
    updates: int = 0  # updates that counted
    last_round: int | None = None  # that it took part in
    accuracy: float | None = None
    loss: float | None = None
    measures: Mapping[str, float] = field(default_factory=dict)  # of the task's own, by name
    evaluated: int | None = None  # which version
    failure: str = ""  # why the newest evaluation has no result for it
    coefficient: float | None = None  # in the last round that it took part in
    cosine: float | None = None  # with the direction of that round
    # Remembered rounds whose direction harmed it, and how many of its own rounds in a row until
    # now; None: not computed.
    conflicts: int | None = 0
    streak: int | None = 0


class DashboardState:
    """The entries that the dashboard shows, and the revision of the newest change."""

    def __init__(self) -> None:
        self.revision = 0
        self._rebuilt = 0  # the revision at which everything was told anew
        self.conflicts = Conflicts()
        self._clients: dict[str, ClientRow] = {}
        self._joined_here: set[str] = set()  # since the server's start
        # By client with an unanswered request: its state while it is connected.
        self._owed: dict[str, str] = {}
        self._rounds: deque[dict[str, Any]] = deque(maxlen=ROUNDS)
        self._evaluations: deque[dict[str, Any]] = deque(maxlen=EVALUATIONS)
        self._server_evaluations: deque[dict[str, Any]] = deque(maxlen=EVALUATIONS)
        self._headlines: deque[dict[str, Any]] = deque(maxlen=HEADLINES)

    def since(self, revision: int) -> dict[str, Any]:
        """Return every entry that changed after a revision; all of them if they are told anew."""
        revision = revision if revision >= self._rebuilt else 0
        return {
            "whole": revision == 0,
            "revision": self.revision,
            "clients": [vars(row) for row in self._clients.values() if row.revision > revision],
            "rounds": [entry for entry in self._rounds if entry["revision"] > revision],
            "evaluations": [entry for entry in self._evaluations if entry["revision"] > revision],
            "server_evaluations": [
                entry for entry in self._server_evaluations if entry["revision"] > revision
            ],
            "events": [entry for entry in self._headlines if entry["revision"] > revision],
        }

    def set(self, client: str, **changes: Any) -> ClientRow:
        """Change fields of a client's row, which is added if it is new, and return the row."""
        row = self._clients.get(client)
        if row is None:
            row = self._clients[client] = ClientRow(client)
        for name, value in changes.items():
            setattr(row, name, value)
        self.revision += 1
        row.revision = self.revision
        return row

    def forget_history(self) -> None:
        """Forget rounds, evaluations and what they mean for clients, for all viewers."""
        for entries in (self._rounds, self._evaluations, self._server_evaluations):
            entries.clear()
        self.conflicts = Conflicts()
        unknown = {name: getattr(ClientRow(""), name) for name in OF_HISTORY}
        for client in self._clients:
            self.set(client, **unknown)
        self.revision += 1
        self._rebuilt = self.revision

    def compare(
        self,
        connected: Set[str],
        revoked: Set[str],
        retired: Mapping[str, str],
        *,
        finished: bool,
    ) -> None:
        """Update rows for which there is no event, from sets of clients.

        A client that disconnects after the last round causes no event, for example. `retired` has
        the reasons of the clients' owners.
        """
        for row in self._clients.values():
            if row.connected != (row.client in connected):
                self.set(row.client, connected=row.client in connected)
            if row.client in revoked and (row.state != "revoked" or row.streak):
                self.conflicts.forget([row.client])
                self.set(row.client, state="revoked", streak=0)
            elif row.client in retired and row.state == "gone":
                reason = retired[row.client] or row.not_selected_because
                self.set(row.client, state="retired", not_selected_because=reason)
            elif finished and not row.connected and self._stayed(row):
                self.set(row.client, state="done")

    def _stayed(self, row: ClientRow) -> bool:
        """Return whether a client took part to the end of a federation that is over.

        Of a client that did not join since the server's start, only its rounds are known.
        """
        if row.state == "gone" and row.client not in self._joined_here and self._rounds:
            return bool(row.last_round == self._rounds[-1]["round"])
        return row.state in ("idle", *BUSY)

    def describe(self, client: str, software: str, samples: int, not_selected_because: str) -> None:
        """Update what is known of a client's software and data, if it has changed."""
        row, known = self._clients.get(client), (software, samples, not_selected_because)
        if row and (row.software, row.samples, row.not_selected_because) != known:
            reason = not_selected_because
            self.set(client, software=software, samples=samples, not_selected_because=reason)

    # ---- events --------------------------------------------------------------------------------

    def observe(self, event: pb.Event) -> None:
        """Update the entries for an event. An event of an unknown kind changes nothing."""
        kind = event.WhichOneof("kind")
        if kind is None:
            return
        self._update_clients(kind, getattr(event, kind), event)
        if kind == "step_measured":
            self._measured(event.step_measured.round, event.step_measured.measured.improved)
        if (text := headline(event)) is not None:
            self.revision += 1
            entry = {
                "revision": self.revision,
                "unix_seconds": event.unix_seconds,
                "round": event.round,
                "kind": kind,
                "text": text,
            }
            self._headlines.append(entry)

    def _update_clients(self, kind: str, fields: Any, event: pb.Event) -> None:
        match kind:
            case "client_joined":
                self._joined(fields, event.unix_seconds)
            case "client_gone":
                self._gone(fields, event.unix_seconds)
            case "round_started":
                self._ask_to_train(fields.clients, event.round)
            case "update_received" | "step_tried":
                self._answered(fields.client, "delivered", event.unix_seconds)
            case "verification_started":
                self._ask(fields.clients, "verifying")
            case "evaluation_started":
                self._ask(fields.clients, "evaluating")
            case "evaluation_reported":
                self._answered(fields.client, "idle", event.unix_seconds)
            case "evaluation_finished":
                self._release("evaluating")

    def _joined(self, joined: pb.ClientJoined, unix_seconds: float) -> None:
        self._joined_here.add(joined.client)
        self.set(
            joined.client,
            state=self._owed.get(joined.client, "idle"),
            seen_unix=unix_seconds,
            device=joined.device,
            samples=joined.train_samples,
        )

    def _gone(self, gone: pb.ClientGone, unix_seconds: float) -> None:
        self._owed.pop(gone.client, None)
        state = "revoked" if gone.reason == "revoked" else "retired" if gone.retired else "gone"
        changes = {"not_selected_because": gone.reason} if gone.retired else {}
        self.set(gone.client, state=state, seen_unix=unix_seconds, **changes)

    def _ask_to_train(self, clients: Iterable[str], round_number: int) -> None:
        self._ask(clients, "training")
        for client in clients:
            row = self._clients[client]
            if row.asked_round != round_number:  # a restart selects the same clients again
                row.asked, row.asked_round = row.asked + 1, round_number

    def _ask(self, clients: Iterable[str], state: str) -> None:
        for client in clients:
            self._owed[client] = state
            self._move(client, state)

    def _answered(self, client: str, state: str, unix_seconds: float) -> None:
        self._owed.pop(client, None)
        self._move(client, state, seen_unix=unix_seconds)

    def _release(self, *states: str) -> None:
        """Drop the requests of these states: the round or evaluation is over."""
        self._owed = {client: state for client, state in self._owed.items() if state not in states}
        for client in [row.client for row in self._clients.values() if row.state in states]:
            self.set(client, state="idle")

    def _move(self, client: str, state: str, **changes: Any) -> None:
        """Set the state of a client, unless it is away."""
        row = self._clients.get(client)
        is_away = row is not None and row.state in AWAY
        self.set(client, **changes, **({} if is_away else {"state": state}))

    def _measured(self, round_number: int, improved: float) -> None:
        for entry in self._rounds:
            if entry["round"] == round_number:
                self.revision += 1
                entry.update(revision=self.revision, measured=finite(improved))

    def committed(self, record: pb.RoundRecord, step: StepTaken, *, live: bool = True) -> None:
        """Add a committed round; `live` is false for one of an earlier run of the server."""
        if self._rounds and record.round <= self._rounds[-1]["round"]:
            return
        clients = [contribution.client for contribution in record.contributions]
        self.conflicts.add(record.round, clients, step.conflicts)
        for client in clients:
            row = self._contributed(client, record.round, step)
            row.updates += live
        if live:
            self._end_round(record.dropped)
        self.revision += 1
        self._rounds.append({"revision": self.revision, **round_entry(record, step)})

    def _contributed(self, client: str, round_number: int, step: StepTaken) -> ClientRow:
        are_known = self.conflicts.are_known
        return self.set(
            client,
            last_round=round_number,
            coefficient=finite(step.coefficients.get(client)),
            cosine=finite(step.cosines.get(client)),
            conflicts=self.conflicts.counts[client] if are_known else None,
            streak=self.conflicts.streaks[client] if are_known else None,
        )

    def _end_round(self, dropped: Iterable[str]) -> None:
        for client in dropped:
            if client in self._clients and self._clients[client].state == "training":
                self.set(client, state="lost")
        self._release("training", "verifying", "delivered")

    def evaluated(self, evaluation: FleetEvaluation, unix_seconds: float) -> None:
        """Add a finished evaluation."""
        for client, result in evaluation.evaluations.items():
            own = {name: row.value for name, row in result.measures.items()}
            self.set(
                client,
                measures=own,
                accuracy=result.accuracy,
                loss=result.loss,
                evaluated=evaluation.version,
                failure="",
            )
        for client, failure in evaluation.failures.items():
            self.set(client, failure=failure)
        self.revision += 1
        entry = {"revision": self.revision, **evaluation_entry(evaluation, unix_seconds)}
        self._evaluations.append(entry)

    def server_evaluated(self, result: ServerEvaluation) -> None:
        """Add what the server's own test data say about a version."""
        figures = result.evaluation.figures() if result.evaluation else {}
        self.revision += 1
        entry = {
            "revision": self.revision,
            "version": result.version,
            "failure": result.failure,
            "seconds": result.seconds,
            "measures": {name: figure.value for name, figure in figures.items()},
        }
        self._server_evaluations.append(entry)


# ---- entries -------------------------------------------------------------------------------------


def round_entry(record: pb.RoundRecord, step: StepTaken) -> dict[str, Any]:
    """Return what is shown of a round; None stands for a figure that was not computed."""
    reports = [contribution.report for contribution in record.contributions]
    losses = [report.loss_before for report in reports]
    return {
        "round": record.round,
        "unix_seconds": record.unix_seconds,
        "training_seconds": record.training_seconds,
        "aggregation_seconds": record.aggregation_seconds,
        "verification_seconds": record.verification.seconds,  # 0: the step was not tried
        "commit_seconds": record.commit_seconds,
        "attempts": record.attempts,
        "updates": len(record.contributions),
        "dropped": len(record.dropped),
        "bytes_received": record.bytes_received,
        "loss_mean": finite(mean(losses)),
        "loss_measurement": measured_as(reports),
        "loss_worst_10": finite(worst(losses, 10, higher_is_better=False)),
        "conflicts": None if step.conflicts is None else len(step.conflicts),
        "conflicting_layers": step.conflicting_layers,
        "diagnostics": step.level,
        "direction_norm": finite(step.norm),
        "standing_in": step.standing_in,
        "status": step.status,
        "promised": finite(record.promised) if record.HasField("promised") else None,
        "measured": finite(record.measured.improved) if record.HasField("measured") else None,
        "admission": dict(Counter(finding.decision for finding in record.admission)),
        "factor": record.verification.factor if record.HasField("verification") else None,
    }


def evaluation_entry(evaluation: FleetEvaluation, unix_seconds: float) -> dict[str, Any]:
    """Return what is shown of an evaluation."""
    return {
        "version": evaluation.version,
        "unix_seconds": unix_seconds,
        "outcomes": evaluation.outcomes(),
        "improved": finite(evaluation.improved),
        "strictly_improved": finite(evaluation.strictly_improved),
        "accuracy": _measures(evaluation.accuracy, evaluation.values("accuracy")),
        "loss": _measures(evaluation.loss, evaluation.values("loss")),
        "measures": {
            name: {
                **(_measures(row, evaluation.values(name)) or {}),
                "better": evaluation.directions[name],
            }
            for name, row in evaluation.own.items()
        },
    }


def _measures(fairness: Fairness | None, values: list[float]) -> dict[str, Any] | None:
    if fairness is None:
        return None
    statistics = {name: finite(value) for name, value in vars(fairness).items()}
    return statistics | {"quantiles": [float(value) for value in np.percentile(values, QUANTILES)]}


def finite(value: float | None) -> float | None:
    """Return None for NaN and infinity, which JSON cannot express."""
    return value if value is not None and math.isfinite(value) else None
