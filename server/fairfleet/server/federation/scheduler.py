"""Applies the policies of a round: which clients it selects, how long it waits, when training ends.

The scheduler holds what the policies need: past participation, losses, training durations and
evaluations. It decides nothing itself: the policies are pure functions in `server.rounds`, and
their results become events of the round.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import replace

from fairfleet.server.federation.clients.feature_requirements import (
    NO_REQUIREMENTS,
    FeatureRequirements,
)
from fairfleet.server.federation.clients.sessions import Session
from fairfleet.server.privacy.budget import PrivacyBudget
from fairfleet.server.rounds import deadlines, selection, state_machine
from fairfleet.server.rounds.attendance import AttendanceBook
from fairfleet.server.rounds.deadlines import TrainingDuration
from fairfleet.server.rounds.selection import Candidate
from fairfleet.server.rounds.state_machine import Phase, Round
from fairfleet.server.rounds.stopping import reason_to_end
from fairfleet.server.rounds.version_scores import VersionScores
from fairfleet.server.settings import ServerSettings
from fairfleet.server.storage.client_queries import past_candidates, recorded_attendance
from fairfleet.server.storage.evaluation_queries import recorded_evaluations
from fairfleet.server.storage.operations.progress import counted_after
from fairfleet.server.storage.store import Store, StoredUpdate


class TrainingTimes:
    """When the round began, and when each of its clients was selected, in the event loop's time."""

    def __init__(self, now: float) -> None:
        self.began = now  # the round, or this run of the server
        self._selected: dict[str, float] = {}

    def begin(self, now: float) -> None:
        """Begin a round."""
        self.began, self._selected = now, {}

    def select(self, clients: Iterable[str], now: float) -> None:
        """Note that clients are selected."""
        self._selected |= dict.fromkeys(clients, now)

    def selected_at(self, client: str) -> float:
        """Return when a client was selected; if unknown, when the round began."""
        return self._selected.get(client, self.began)


class Scheduler:
    """What the policies know about clients and rounds, and their current results."""

    def __init__(
        self,
        settings: ServerSettings,
        store: Store,
        requirements: FeatureRequirements = NO_REQUIREMENTS,
        budget: PrivacyBudget | None = None,
        retired: Collection[str] = (),
    ) -> None:
        """`retired` are the clients whose owners let them take part no more; it may change."""
        self._retired = retired
        self._settings, self._ending = settings.round, settings.end.ending()
        self._requirements, self._budget = requirements, budget
        self._seed = settings.seed
        self._verification_seconds = settings.trying.deadline_seconds
        self.recall(store)
        # The evaluations of later versions count for the end of the federation.
        self._counted_after = counted_after(store)
        self.scores = VersionScores(settings.measure)
        for version, client, evaluation in recorded_evaluations(store):
            self.scores.add(version, client, evaluation)
        # Seconds of training and upload, by client and round, the newest last.
        self._durations: dict[tuple[str, int], float] = {}
        self._paces: dict[str, TrainingDuration] = {}
        # When it was selected, by client and round.
        self._cut_off: dict[tuple[str, int], float] = {}
        private = settings.privacy is not None and settings.privacy.amplification
        # With amplification, knowing the seed must not reveal which clients are drawn.
        self._secret = (secrets.randbits(128),) if private else ()
        # Of the newest selection: the round, how many clients were drawn, and among how many.
        self._lot: tuple[int, int, int] = (-1, 0, 0)

    def recall(self, store: Store) -> None:
        """Read which rounds each client took part in."""
        self._past = past_candidates(store)
        # No other policy uses which rounds a client missed.
        by_turn = self._settings.selection == "least_recent"
        self._attendance = recorded_attendance(store) if by_turn else AttendanceBook()

    def limit(self, seconds: float | None) -> None:
        """Let the federation run for so long in all; None: without a limit."""
        self._ending = replace(self._ending, after_seconds=seconds)

    def count_evaluations_after(self, version: int) -> None:
        """Let only the evaluations of later versions count for the end of the federation."""
        self._counted_after = version

    # ---- what happened -------------------------------------------------------------------------

    def record_duration(self, client: str, round_number: int, seconds: float) -> None:
        """Record how long a client's training and upload took."""
        self._paces[client] = TrainingDuration(seconds)
        self._remember(client, round_number, seconds)

    def cut_off(self, client: str, round_number: int, asked_at: float, now: float) -> None:
        """Record that the round continued without a client that trains for longer than this."""
        pace = self._paces[client] = self._paces.get(client, TrainingDuration(0.0)).cut_off(
            now - asked_at
        )
        if pace.hangs:  # its times say nothing about how long training takes
            for key in [key for key in self._cut_off if key[0] == client]:
                del self._cut_off[key]
                self._durations.pop(key, None)
        else:
            self._remember(client, round_number, now - asked_at)
            self._cut_off[client, round_number] = asked_at

    def record_late_announcement(self, client: str, round_number: int, now: float) -> None:
        """Record the duration of a training that was cut off, now that its update is announced."""
        asked_at = self._cut_off.pop((client, round_number), None)
        if asked_at is not None:
            self._paces[client] = replace(self._paces[client], seconds=now - asked_at)
            self._remember(client, round_number, now - asked_at)

    def counted(self, updates: Iterable[StoredUpdate]) -> None:
        """Record the updates of a round that is being committed."""
        for update in updates:
            loss = update.report.loss_before
            self._attendance.deliver([update.client])
            self._past[update.client] = Candidate(update.client, last_round=update.round, loss=loss)

    def spared(self, clients: Iterable[str], round_number: int) -> None:
        """Record clients that were not needed: enough others were done earlier."""
        self._attendance.spare(clients, round_number)

    # ---- what the policies say -----------------------------------------------------------------

    def choose(
        self, round_: Round, sessions: Sequence[Session]
    ) -> state_machine.ClientsChosen | None:
        """Return the clients to select now; None if there is nothing to select.

        The selection is empty if no connected client can evaluate.
        """
        # An evaluation needs no minimum number of clients.
        if round_.phase is Phase.EVALUATING and not round_.asked and sessions:
            return state_machine.ClientsChosen(self._evaluators(round_, sessions))
        if round_.phase is not Phase.WAITING or round_.paused or self.held_because:
            return None
        able = self.able_to_train(sessions)
        if len(able) < self._settings.minimum_clients:
            return None
        busy = round_.unavailable()
        candidates = [self._candidate(session) for session in able if session.client not in busy]
        # Clients that were selected before and are lost are replaced by others.
        places = (
            self._settings.clients - len(round_.received)
            if self._settings.clients
            else len(candidates)
        )
        return self._drawn(round_, candidates, places) if candidates and places > 0 else None

    def patience(self, phase: Phase, asked: Set[str]) -> float:
        """Return how long to wait for these clients, in seconds."""
        settings = self._settings
        if phase is Phase.EVALUATING:
            return settings.evaluation_deadline_seconds
        if phase is Phase.VERIFYING:
            return self._verification_seconds
        if settings.deadline == "fixed":
            return settings.deadline_seconds
        return deadlines.adaptive(
            list(self._durations.values()),
            [self._paces[client] for client in asked if client in self._paces],
            longest=settings.deadline_seconds,
            shortest=min(settings.shortest_deadline_seconds, settings.deadline_seconds),
            factor=settings.deadline_factor,
        )

    def reason_to_end(self, elapsed_seconds: float) -> str | None:
        """Return why the federation has trained enough; None if it has not."""
        scores = self.scores
        worst = [] if self.held_because else scores.worst_tenths(after=self._counted_after)
        return reason_to_end(self._ending, elapsed_seconds, worst, scores.measure, scores.direction)

    def still_reached(
        self, version: int, seconds: float | None, elapsed_seconds: float
    ) -> str | None:
        """Return why a federation that goes on from a version would end at once, with this limit.

        None: it would go on.
        """
        ending, scores = replace(self._ending, after_seconds=seconds), self.scores
        worst = [] if self.held_because else scores.worst_tenths(after=version - 1, until=version)
        return reason_to_end(ending, elapsed_seconds, worst, scores.measure, scores.direction)

    @property
    def held_because(self) -> str:
        """Why no round may begin: a stopping rule can never apply. Empty if rounds may begin."""
        return self.scores.why_never(self._ending)

    def next_lot(self, connected: int) -> tuple[int, int]:
        """Return how many clients would be drawn now, and among how many."""
        places = self._settings.clients or connected
        return min(math.ceil(places * self._settings.over_selection), connected), connected

    def lot_of(self, round_: Round) -> tuple[int, int]:
        """Return how many clients were drawn for a round, and among how many.

        (0, 0) stands for a round without sampling: its clients were selected more than once, or by
        an earlier run of the server.
        """
        number, drawn, among = self._lot
        return (drawn, among) if number == round_.number and round_.attempt == 0 else (0, 0)

    def able_to_train(self, sessions: Sequence[Session]) -> Sequence[Session]:
        """Return the sessions of the clients that can be selected to train."""
        return [session for session in sessions if self._may_train(session)]

    def _may_train(self, session: Session) -> bool:
        return (
            self._requirements.allow(session.member, "train")
            and (self._budget is None or self._budget.may_train(session.client))
            and session.client not in self._retired
        )

    def may_evaluate(self, session: Session) -> bool:
        """Return whether a client with test data can be selected to evaluate."""
        return (
            self._requirements.allow(session.member, "evaluate")
            and (self._budget is None or self._budget.may_evaluate(session.client))
            and session.client not in self._retired
        )

    def missing_clients(self, round_: Round, sessions: Sequence[Session]) -> int:
        """Return how many more clients must connect before the round can begin."""
        if round_.phase is not Phase.WAITING:
            return 0
        return max(0, self._settings.minimum_clients - len(self.able_to_train(sessions)))

    def too_few(self, sessions: Sequence[Session]) -> str:
        """Return how many clients are missing, as text."""
        needed, able = self._settings.minimum_clients, len(self.able_to_train(sessions))
        shortage = (
            f"waiting for {needed - able} more clients: {able} of at least {needed} are connected"
        )
        unable = len(sessions) - able
        return f"{shortage}, and {unable} that cannot be selected" if unable else shortage

    def _remember(self, client: str, round_number: int, seconds: float) -> None:
        self._durations[client, round_number] = seconds
        if len(self._durations) > deadlines.REMEMBERED:
            oldest = next(iter(self._durations))
            del self._durations[oldest]
            self._cut_off.pop(oldest, None)

    def _evaluators(self, round_: Round, sessions: Sequence[Session]) -> frozenset[str]:
        able = [
            self._candidate(session)
            for session in sessions
            if session.member.test_samples and self.may_evaluate(session)
        ]
        return selection.uniform(
            able, self._settings.evaluation_clients or len(able), (self._seed, round_.number)
        )

    def _candidate(self, session: Session) -> Candidate:
        member = session.member
        past = self._past.get(member.client, Candidate(member.client))
        attendance = self._attendance.of(member.client)
        return Candidate(
            member.client, member.train_samples, past.last_round, past.loss, *attendance
        )

    def _drawn(
        self, round_: Round, candidates: list[Candidate], places: int
    ) -> state_machine.ClientsChosen:
        choose = selection.POLICIES[self._settings.selection]
        seed = (self._seed, round_.number, round_.attempt, *self._secret)
        chosen = choose(candidates, math.ceil(places * self._settings.over_selection), seed)
        self._attendance.select(chosen, round_.number)
        self._lot = (round_.number, len(chosen), len(candidates))
        return state_machine.ClientsChosen(chosen, min(places, len(chosen)))
