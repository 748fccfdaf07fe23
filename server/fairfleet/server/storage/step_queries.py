"""The tables of steps: clients' trials, the measured improvement, and clients that were cut off.

A step is the change of the model that a round commits.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fairfleet.common.reports import TrainReport
from fairfleet.common.training_plan import LossMeasurement
from fairfleet.server.storage.queries import ReadableStore, Write, writing
from fairfleet.server.storage.round_record import CutOffClient, RoundRecord, StepImprovement
from fairfleet.server.storage.schema import cut_off, measures, trials


@dataclass(frozen=True)
class ReportedLoss:
    """A client's loss on its training data, of the model that a round trained."""

    loss: float
    round: int
    measurement: LossMeasurement = "exact"

    @classmethod
    def of(cls, report: TrainReport, round_number: int) -> ReportedLoss:
        """Return the loss in a report about this round."""
        return cls(report.loss_before, round_number, report.loss_measurement)

    @property
    def label(self) -> str | None:
        """How the loss was measured; None: exactly."""
        return None if self.measurement == "exact" else self.measurement


# ---- trials of a step --------------------------------------------------------------------------


def trial_write(
    round_number: int, client: str, step: bytes, losses: Sequence[float] | None, failure: str
) -> Write:
    """Record the losses that a client measured for a step, or why it could not.

    An earlier answer is replaced: it may be of other lengths, from before a restart with other
    settings.
    """
    row = {
        "round": round_number,
        "client": client,
        "step": step.hex(),
        "losses": None if losses is None else json.dumps(list(losses)),
        "failure": failure,
        "unix_seconds": time.time(),
    }
    keys = ("round", "client", "step")
    is_same_trial = sa.and_(*(trials.c[key] == row[key] for key in keys))

    def write(connection: Connection) -> None:
        connection.execute(trials.delete().where(is_same_trial))
        connection.execute(trials.insert(), row)

    return write


def trials_of(
    store: ReadableStore, round_number: int, step: bytes
) -> dict[str, tuple[float, ...] | None]:
    """Return, by client, the losses that it measured; None if it could not try this step."""
    query = sa.select(trials.c.client, trials.c.losses)
    rows = store.rows(query.where(trials.c.round == round_number, trials.c.step == step.hex()))
    return {
        row.client: None if row.losses is None else tuple(json.loads(row.losses)) for row in rows
    }


# ---- measured steps, and clients that were cut off ---------------------------------------------


def measure_write(
    round_number: int, improved: float, strictly_improved: float, clients: int
) -> Write:
    """Record the shares of the clients whose loss did not rise, and fell, by a round's step."""
    row = {
        "round": round_number,
        "improved": improved,
        "strictly_improved": strictly_improved,
        "clients": clients,
    }
    return writing(measures.insert(), row)


def cut_off_write(round_number: int, clients: Mapping[str, ReportedLoss | None]) -> Write:
    """Record that a round continues without these clients, with their newest losses."""
    rows = [
        {
            "round": round_number,
            "client": client,
            "loss_before": newest.loss if newest else None,
            "round_before": newest.round if newest else None,
            "measurement_before": newest.label if newest else None,
        }
        for client, newest in clients.items()
    ]
    return writing(cut_off.insert(), rows)


def came_back_write(reports: Mapping[str, ReportedLoss]) -> Write:
    """Record the next losses of clients that were cut off."""

    def write(connection: Connection) -> None:
        for client, now in reports.items():
            waiting = (
                (cut_off.c.client == client)
                & cut_off.c.loss_after.is_(None)
                & (cut_off.c.round < now.round)
            )
            values = {
                "loss_after": now.loss,
                "round_after": now.round,
                "measurement_after": now.label,
            }
            connection.execute(cut_off.update().where(waiting).values(values))

    return write


def late_report_write(client: str, now: ReportedLoss) -> Write:
    """Record the loss in a late update: the client's loss when the round continued without it."""
    is_cut_off = (cut_off.c.client == client) & (cut_off.c.round == now.round)
    values = {
        "loss_before": now.loss,
        "round_before": now.round,
        "measurement_before": now.label,
    }
    return writing(cut_off.update().where(is_cut_off).values(values))


def still_away(store: ReadableStore) -> set[str]:
    """Return the clients that were cut off and have not reported since."""
    return {
        row.client
        for row in store.rows(sa.select(cut_off.c.client).where(cut_off.c.loss_after.is_(None)))
    }


def completed(
    store: ReadableStore, records: list[RoundRecord], first: int, last: int
) -> list[RoundRecord]:
    """Return the records with what became known later: measured steps and clients cut off."""
    improvements = {
        row.round: StepImprovement(row.improved, row.clients, row.strictly_improved)
        for row in store.rows(sa.select(measures).where(measures.c.round.between(first, last)))
    }
    missing: defaultdict[int, list[CutOffClient]] = defaultdict(list)
    query = (
        sa.select(cut_off).where(cut_off.c.round.between(first, last)).order_by(cut_off.c.client)
    )
    for row in store.rows(query):
        losses = (row.loss_before, row.round_before, row.loss_after, row.round_after)
        measurements = (row.measurement_before, row.measurement_after)
        missing[row.round].append(CutOffClient(row.client, *losses, *measurements))
    return [
        replace(
            record,
            measured=improvements.get(record.round),
            cut_off=tuple(missing[record.round]),
        )
        for record in records
    ]
