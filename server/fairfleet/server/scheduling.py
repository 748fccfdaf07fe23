"""Whom a round asks, how long it waits, and when the federation has trained enough.

It remembers what the policies need (who took part when, with what loss, how long trainings took, what evaluations
found) and decides nothing by itself: the policies are pure functions, and what they say becomes an event of the round.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from fairfleet.common import fairness
from fairfleet.server import deadlines, rounds, selection
from fairfleet.server.endings import reason_to_end
from fairfleet.server.rounds import Phase, Round
from fairfleet.server.selection import Candidate
from fairfleet.server.sessions import Session
from fairfleet.server.settings import ServerSettings
from fairfleet.server.store import Store, StoredUpdate


class Scheduler:
    def __init__(self, settings: ServerSettings, store: Store) -> None:
        self._wanted, self._ending, self._seed = settings.round, settings.end.ending(), settings.seed
        self._past = store.past_candidates()
        accuracies = store.accuracies()
        self._worst = {version: _worst_tenth(found) for version, found in accuracies.items()}
        newest = max(accuracies, default=0)
        self._evaluating = (newest, accuracies.get(newest, {}))  # it may still be under way
        self._durations: deque[float] = deque(maxlen=deadlines.REMEMBERED)
        self._began_unix = store.began_unix()

    # ---- what it is told -----------------------------------------------------------------------

    def took(self, seconds: float) -> None:
        """A client's training and upload."""
        self._durations.append(seconds)

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
        if len(sessions) < self._wanted.minimum_clients:
            return None
        if round.phase is Phase.EVALUATING and not round.asked:
            return rounds.ClientsChosen(self._evaluators(round, sessions))
        if round.phase is not Phase.WAITING or round.paused:
            return None
        busy = round.asked | round.received
        candidates = [self._candidate(session) for session in sessions if session.client not in busy]
        # Who was asked before and is still silent holds no place: others are asked instead.
        places = self._wanted.clients - len(round.received) if self._wanted.clients else len(candidates)
        return self._drawn(round, candidates, places) if candidates and places > 0 else None

    def patience(self, phase: Phase) -> float:
        """How long to wait, in seconds."""
        wanted = self._wanted
        if phase is Phase.EVALUATING:
            return wanted.evaluation_deadline_seconds
        if wanted.deadline == "fixed":
            return wanted.deadline_seconds
        return deadlines.adaptive(
            self._durations,
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

    def too_few(self, connected: int) -> str:
        """In words, how many clients are missing."""
        needed = self._wanted.minimum_clients
        return f"waiting for {needed - connected} more clients: {connected} of at least {needed} are connected"

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
        seed = (self._seed, round.number, round.attempt)
        chosen = choose(candidates, math.ceil(places * self._wanted.over_selection), seed)
        return rounds.ClientsChosen(chosen, min(places, len(chosen)))


def _worst_tenth(accuracies: Mapping[str, float]) -> float:
    return fairness.worst(list(accuracies.values()), 10)
