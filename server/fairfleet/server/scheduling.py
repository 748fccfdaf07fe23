"""Whom a round asks, how long it waits, and when the federation has trained enough.

It remembers what the policies need (who took part when, with what loss, how long trainings took, what evaluations
found) and decides nothing by itself: the policies are pure functions, and what they say becomes an event of the round.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from fairfleet.common import fairness
from fairfleet.server import deadlines, rounds, selection
from fairfleet.server.client_records import past_candidates
from fairfleet.server.deadlines import Pace
from fairfleet.server.endings import reason_to_end
from fairfleet.server.evaluation_records import accuracies
from fairfleet.server.rounds import Phase, Round
from fairfleet.server.selection import Candidate
from fairfleet.server.sessions import Session
from fairfleet.server.settings import ServerSettings
from fairfleet.server.store import Store, StoredUpdate


class Scheduler:
    def __init__(self, settings: ServerSettings, store: Store) -> None:
        self._wanted, self._ending, self._seed = settings.round, settings.end.ending(), settings.seed
        self._verification_seconds = settings.trying.deadline_seconds
        self._past = past_candidates(store)
        found = accuracies(store)
        self._worst = {version: _worst_tenth(of_clients) for version, of_clients in found.items()}
        newest = max(found, default=0)
        self._evaluating = (newest, found.get(newest, {}))  # it may still be under way
        self._durations: dict[tuple[str, int], float] = {}  # of trainings, by client and round; the newest last
        self._paces: dict[str, Pace] = {}
        self._cut_off: dict[tuple[str, int], float] = {}  # by client and round: when it was asked
        self._began_unix = store.began_unix()
        private = settings.privacy is not None and settings.privacy.amplification
        self._secret = (secrets.randbits(128),) if private else ()  # else whoever knows the seed knows who is drawn
        self._lot: tuple[int, int, int] = (-1, 0, 0)  # the newest: round, drawn, among

    # ---- what it is told -----------------------------------------------------------------------

    def took(self, client: str, round_number: int, seconds: float) -> None:
        """A client's training and upload."""
        self._paces[client] = Pace(seconds)
        self._remember(client, round_number, seconds)

    def cut_off(self, client: str, round_number: int, asked_at: float, now: float) -> None:
        """The round went on without it: it would have taken longer, who knows how much."""
        pace = self._paces[client] = self._paces.get(client, Pace(0.0)).cut_off(now - asked_at)
        if pace.hangs:  # which says nothing of how long trainings take
            for key in [key for key in self._cut_off if key[0] == client]:
                del self._cut_off[key]
                self._durations.pop(key, None)
        else:
            self._remember(client, round_number, now - asked_at)
            self._cut_off[client, round_number] = asked_at

    def came_late(self, client: str, round_number: int, now: float) -> None:
        """It announces an update: if its training was cut off, now it is known how long that took."""
        asked_at = self._cut_off.pop((client, round_number), None)  # a repetition says nothing new
        if asked_at is not None:
            self._paces[client] = replace(self._paces[client], seconds=now - asked_at)
            self._remember(client, round_number, now - asked_at)

    def counted(self, updates: Iterable[StoredUpdate]) -> None:
        for update in updates:
            loss = update.report.loss_before
            self._past[update.client] = Candidate(update.client, last_round=update.round, loss=loss)

    def evaluated(self, version: int, client: str, accuracy: float | None) -> None:
        if self._evaluating[0] != version:
            self._evaluating = (version, {})
        if accuracy is not None:
            self._evaluating[1][client] = accuracy
            self._worst.pop(version, None)  # more is known of it now

    # ---- what it says --------------------------------------------------------------------------

    def choose(self, round: Round, sessions: Sequence[Session]) -> rounds.ClientsChosen | None:
        """Who is to be asked now, if anybody. It may be that nobody can evaluate: then the empty set is chosen."""
        # An evaluation asks whoever is there: also fewer than a round needs have something to say.
        if round.phase is Phase.EVALUATING and not round.asked and sessions:
            return rounds.ClientsChosen(self._evaluators(round, sessions))
        if round.phase is not Phase.WAITING or round.paused or len(sessions) < self._wanted.minimum_clients:
            return None
        busy = round.asked | round.received
        candidates = [self._candidate(session) for session in sessions if session.client not in busy]
        # Who was asked before and is still silent holds no place: others are asked instead.
        places = self._wanted.clients - len(round.received) if self._wanted.clients else len(candidates)
        return self._drawn(round, candidates, places) if candidates and places > 0 else None

    def patience(self, phase: Phase, asked: Set[str]) -> float:
        """How long to wait for these clients, in seconds."""
        wanted = self._wanted
        if phase is Phase.EVALUATING:
            return wanted.evaluation_deadline_seconds
        if phase is Phase.VERIFYING:
            return self._verification_seconds
        if wanted.deadline == "fixed":
            return wanted.deadline_seconds
        return deadlines.adaptive(
            list(self._durations.values()),
            [self._paces[client] for client in asked if client in self._paces],
            longest=wanted.deadline_seconds,
            shortest=min(wanted.shortest_deadline_seconds, wanted.deadline_seconds),
            factor=wanted.deadline_factor,
        )

    def reason_to_end(self, unix_seconds: float) -> str | None:
        version, found = self._evaluating
        if found and version not in self._worst:
            self._worst[version] = _worst_tenth(found)
        worst = [self._worst[version] for version in sorted(self._worst)]
        return reason_to_end(self._ending, unix_seconds - self._began_unix, worst)

    def next_lot(self, connected: int) -> tuple[int, int]:
        """How many would be drawn now, among how many."""
        places = self._wanted.clients or connected
        return min(math.ceil(places * self._wanted.over_selection), connected), connected

    def lot_of(self, round: Round) -> tuple[int, int]:
        """How many clients were drawn for a round, and among how many; as if all were, where more were asked later."""
        number, drawn, among = self._lot
        return (drawn, among) if number == round.number and round.attempt == 0 else (0, 0)

    def too_few(self, connected: int) -> str:
        """In words, how many clients are missing."""
        needed = self._wanted.minimum_clients
        return f"waiting for {needed - connected} more clients: {connected} of at least {needed} are connected"

    def _remember(self, client: str, round_number: int, seconds: float) -> None:
        self._durations[client, round_number] = seconds
        if len(self._durations) > deadlines.REMEMBERED:
            oldest = next(iter(self._durations))
            del self._durations[oldest]
            self._cut_off.pop(oldest, None)

    def _evaluators(self, round: Round, sessions: Sequence[Session]) -> frozenset[str]:
        able = [self._candidate(session) for session in sessions if session.member.test_samples]
        return selection.uniform(able, self._wanted.evaluation_clients or len(able), (self._seed, round.number))

    def _candidate(self, session: Session) -> Candidate:
        member = session.member
        past = self._past.get(member.client)
        if past is None:
            return Candidate(member.client, member.train_samples)
        return Candidate(member.client, member.train_samples, past.last_round, past.loss)

    def _drawn(self, round: Round, candidates: list[Candidate], places: int) -> rounds.ClientsChosen:
        choose = selection.POLICIES[self._wanted.selection]
        seed = (self._seed, round.number, round.attempt, *self._secret)
        chosen = choose(candidates, math.ceil(places * self._wanted.over_selection), seed)
        self._lot = (round.number, len(chosen), len(candidates))
        return rounds.ClientsChosen(chosen, min(places, len(chosen)))


def _worst_tenth(accuracies: Mapping[str, float]) -> float:
    return fairness.worst(list(accuracies.values()), 10)
