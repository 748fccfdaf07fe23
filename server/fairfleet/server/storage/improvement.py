"""Measures what steps did to the clients' losses, from the reports that clients send anyway.

A client that takes part in two consecutive rounds has reported its loss before and after the first
round's step. Only losses that were measured exactly are compared: a mean of batch losses, or a
sample, differs from the next one for other reasons too. A client that a deadline cut off is
followed until its next report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fairfleet.common.fairness import improved_share
from fairfleet.server.storage import step_queries as records
from fairfleet.server.storage.client_queries import newest_reports
from fairfleet.server.storage.queries import Write
from fairfleet.server.storage.step_queries import ReportedLoss
from fairfleet.server.storage.store import Store, StoredUpdate


@dataclass(frozen=True)
class MeasuredStep:
    """A step, measured by the clients that reported their loss before and after it."""

    round: int
    improved: float  # ρ: share of the clients whose loss did not rise
    strictly_improved: float  # share of the clients whose loss fell
    clients: int


@dataclass(frozen=True)
class ImprovementReport:
    """What a round's reports show about earlier rounds."""

    writes: list[Write] = field(default_factory=list)
    measured: MeasuredStep | None = None


class ImprovementTracker:
    """Holds the newest reported loss of each client, and which clients were cut off."""

    def __init__(self, store: Store, round_number: int) -> None:
        self._newest = {
            client: ReportedLoss.of(report, number)
            for client, (number, report) in newest_reports(store, before=round_number).items()
        }
        self._away = records.still_away(store)

    def committed(
        self, round_number: int, updates: Sequence[StoredUpdate], cut_off: Sequence[str]
    ) -> ImprovementReport:
        """Count a round with these updates; the `cut_off` clients missed its deadline."""
        now = {update.client: ReportedLoss.of(update.report, round_number) for update in updates}
        measured = measure(round_number - 1, self._newest, now)
        back = {client: now[client] for client in now.keys() & self._away}
        report = ImprovementReport([records.came_back_write(back)] if back else [], measured)
        if measured:
            report.writes.append(
                records.measure_write(
                    measured.round,
                    measured.improved,
                    measured.strictly_improved,
                    measured.clients,
                )
            )
        if cut_off:
            report.writes.append(
                records.cut_off_write(
                    round_number, {name: self._newest.get(name) for name in cut_off}
                )
            )
        self._newest |= now
        self._away = (self._away - back.keys()) | set(cut_off)
        return report


def measure(
    round_number: int, before: Mapping[str, ReportedLoss], after: Mapping[str, ReportedLoss]
) -> MeasuredStep | None:
    """Return what the step of a round did, from losses of the models before and after it."""
    clients = [
        client
        for client in sorted(after)
        if client in before
        and before[client].round == round_number
        and before[client].measurement == after[client].measurement == "exact"
    ]
    if not clients:
        return None
    losses = (
        [before[client].loss for client in clients],
        [after[client].loss for client in clients],
    )
    improved, strictly_improved = (
        improved_share(*losses, higher_is_better=False, strictly=strictly)
        for strictly in (False, True)
    )
    return MeasuredStep(round_number, improved, strictly_improved, len(clients))
