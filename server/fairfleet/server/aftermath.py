"""What steps did to the clients' losses, from the reports that they send anyway.

A client that takes part in two rounds running has told its loss before and after the first one's step. Whoever a
deadline cut off is followed until its next report: what became of its loss meanwhile?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fairfleet.common.fairness import improved_share
from fairfleet.server import descent_records as records
from fairfleet.server.client_records import past_candidates
from fairfleet.server.descent_records import Reported
from fairfleet.server.facts import Write
from fairfleet.server.store import Store, StoredUpdate


@dataclass(frozen=True)
class Measured:
    """A step, by those who reported their loss before and after it."""

    round: int
    improved: float  # share of them whose loss fell
    clients: int


@dataclass(frozen=True)
class Told:
    """What a round's reports tell of earlier rounds."""

    writes: list[Write] = field(default_factory=list)
    measured: Measured | None = None


class Aftermath:
    def __init__(self, store: Store, round_number: int) -> None:
        past = past_candidates(store, before=round_number).items()
        self._newest = {client: Reported(one.loss or 0.0, one.last_round or 0) for client, one in past}
        self._away = records.still_away(store)

    def committed(self, round_number: int, updates: Sequence[StoredUpdate], cut_off: Sequence[str]) -> Told:
        """A round is about to be committed, of these updates and without those who missed a deadline."""
        now = {update.client: Reported(update.report.loss_before, round_number) for update in updates}
        measured = measure(round_number - 1, self._newest, now)
        back = {client: now[client] for client in now.keys() & self._away}
        told = Told([records.came_back_write(back)] if back else [], measured)
        if measured:
            told.writes.append(records.measure_write(measured.round, measured.improved, measured.clients))
        if cut_off:
            told.writes.append(records.cut_off_write(round_number, {name: self._newest.get(name) for name in cut_off}))
        self._newest |= now
        self._away = (self._away - back.keys()) | set(cut_off)
        return told


def measure(round_number: int, before: Mapping[str, Reported], after: Mapping[str, Reported]) -> Measured | None:
    """Of the step of that round: by reports of the model that it trained, and of the next."""
    both = [one for one in sorted(after) if one in before and before[one].round == round_number]
    if not both:
        return None
    losses = [before[one].loss for one in both], [after[one].loss for one in both]
    return Measured(round_number, improved_share(*losses, higher_is_better=False), len(both))
