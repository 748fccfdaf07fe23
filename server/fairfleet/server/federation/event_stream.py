"""The stream of events to watchers, and the larger messages in it.

A watcher that is too slow is disconnected: it never slows the server down.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from fairfleet.common.errors import LimitReached
from fairfleet.common.wire import MEASUREMENTS, direction_out, report_out
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.rounds.state_machine import Round
from fairfleet.server.rounds.version_ranking import VersionScore
from fairfleet.server.storage.improvement import MeasuredStep
from fairfleet.server.storage.round_record import (
    Contribution,
    CutOffClient,
    RoundRecord,
    StepImprovement,
)
from fairfleet.server.storage.store import StoredUpdate

BACKLOG = 10_000  # events that a watcher may fall behind


class EventStream:
    """Numbers events and queues them for each watcher."""

    def __init__(self) -> None:
        self._sequence = 0
        self._watchers: set[asyncio.Queue[pb.Event | None]] = set()

    def emit(self, round_number: int, **kind: Any) -> None:
        """Send an event of this round to all watchers; `kind` is its field and message."""
        self._sequence += 1
        event = pb.Event(
            sequence=self._sequence, unix_seconds=time.time(), round=round_number, **kind
        )
        for queue in list(self._watchers):
            if queue.qsize() >= BACKLOG:
                # The watcher's stream ends when it has read its backlog.
                self._watchers.discard(queue)
            else:
                queue.put_nowait(event)

    def close(self) -> None:
        """End the streams of all watchers."""
        for queue in self._watchers:
            queue.put_nowait(None)
        self._watchers.clear()

    def watch(self) -> AsyncIterator[pb.Event]:
        """Return all events from this call on; raise LimitReached if the watcher is too slow."""
        queue: asyncio.Queue[pb.Event | None] = asyncio.Queue()
        self._watchers.add(queue)
        return self._read(queue)

    async def _read(self, queue: asyncio.Queue[pb.Event | None]) -> AsyncIterator[pb.Event]:
        try:
            while queue in self._watchers or not queue.empty():
                event = await queue.get()
                if event is None:
                    return
                yield event
            raise LimitReached(
                f"this watcher fell {BACKLOG} events behind and was cut off; watch again",
                reason="watchers",
            )
        finally:
            self._watchers.discard(queue)


# ---- messages ----------------------------------------------------------------------------------


def update_received_message(update: StoredUpdate, round_: Round) -> pb.UpdateReceived:
    """Return the message about a complete update; `round_` already counts it."""
    return pb.UpdateReceived(
        client=update.client,
        size_bytes=update.size_bytes,
        report=report_out(update.report),
        received=len(round_.received),
        asked=len(round_.asked),
    )


def step_improvement(message: pb.Measured) -> StepImprovement:
    """Return what a step did, as its message says."""
    return StepImprovement(
        message.improved,
        message.clients,
        message.strictly_improved if message.HasField("strictly_improved") else None,
    )


def step_measured_message(step: MeasuredStep) -> pb.StepMeasured:
    """Return the message about the losses before and after a step."""
    measured = pb.Measured(
        improved=step.improved, clients=step.clients, strictly_improved=step.strictly_improved
    )
    return pb.StepMeasured(round=step.round, measured=measured)


def score_message(score: VersionScore) -> pb.VersionScore:
    """Return the message of a version's score."""
    return pb.VersionScore(
        measure=score.measure,
        direction=direction_out("higher" if score.higher_is_better else "lower"),
        mean=score.mean,
        worst_10_percent=score.worst_10_percent,
        clients=score.clients,
    )


def record_message(record: RoundRecord, diagnostics_json: str | None = None) -> pb.RoundRecord:
    """Return the record as it is sent; `diagnostics_json` saves encoding them a second time."""
    if diagnostics_json is None:
        diagnostics_json = json.dumps(record.diagnostics)
    measured, verification = record.measured, record.verification
    return pb.RoundRecord(
        round=record.round,
        digest=record.digest,
        contributions=[_contribution_message(part) for part in record.contributions],
        dropped=record.dropped,
        attempts=record.attempts,
        training_seconds=record.training_seconds,
        aggregation_seconds=record.aggregation_seconds,
        commit_seconds=record.commit_seconds,
        bytes_received=record.bytes_received,
        diagnostics_json=diagnostics_json,
        unix_seconds=record.unix_seconds,
        promised=record.promised,
        measured=pb.Measured(**asdict(measured)) if measured else None,
        verification=pb.Verification(**asdict(verification)) if verification else None,
        cut_off=[_cut_off_message(client) for client in record.cut_off],
        admission=[pb.AdmissionFinding(**asdict(finding)) for finding in record.admission],
        settings_digest=record.settings_digest,
        undone=record.undone,
    )


def _contribution_message(part: Contribution) -> pb.ClientContribution:
    return pb.ClientContribution(
        client=part.client, weight=part.weight, report=report_out(part.report)
    )


def _cut_off_message(client: CutOffClient) -> pb.CutOff:
    fields = {key: value for key, value in asdict(client).items() if value is not None}
    for key in ("measurement_before", "measurement_after"):
        if key in fields:
            fields[key] = MEASUREMENTS[fields[key]]
    return pb.CutOff(**fields)
