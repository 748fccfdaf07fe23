"""What clients request of a running federation, apart from sending updates.

A client joins, polls for tasks, reports progress and results, and leaves. Every request but the
first names a session; it is checked that the session is the caller's and that the client was not
revoked. `UpdateReceiver` handles updates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from fairfleet.common.errors import Revoked, short
from fairfleet.common.pki.identity import Identity, Role
from fairfleet.common.privacy import PrivacyTerms
from fairfleet.common.reports import Evaluation
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.federation.background import loop_time
from fairfleet.server.federation.clients.assignments import (
    POLL_SECONDS,
    Assignment,
    Kind,
    round_trained,
)
from fairfleet.server.federation.clients.client_book import ClientBook
from fairfleet.server.federation.clients.departures import Departures, revocation_message
from fairfleet.server.federation.clients.sessions import (
    SUPERSEDED_REMEMBERED,
    ClientDescription,
    Session,
)
from fairfleet.server.federation.reported_results import ReportedResults
from fairfleet.server.federation.round_commit import RoundCommits
from fairfleet.server.federation.round_runner import RoundRunner
from fairfleet.server.rounds.state_machine import Phase
from fairfleet.server.security.caller import Call, OpenCalls, check_speaks_for
from fairfleet.server.security.request_limits import RequestLimits
from fairfleet.server.storage.quarantine import QuarantinedUpdate
from fairfleet.server.transfer.prediction_bases import PredictionBases
from fairfleet.server.transfer.published_model import PublishedModel

log = logging.getLogger(__name__)

NO_DATA_PAUSE_SECONDS = 20.0  # between the polls of a client without data, less than its lease


class ClientRequests:
    """Answers the requests of clients."""

    def __init__(
        self,
        runner: RoundRunner,
        commits: RoundCommits,
        departures: Departures,
        limits: RequestLimits,
        calls: OpenCalls,
        book: ClientBook,
    ) -> None:
        self._runner, self._commits, self._departures = runner, commits, departures
        self._results = ReportedResults(runner)
        self._limits, self._calls, self._book = limits, calls, book
        self._warned: dict[str, str] = {}  # of what a client lacks, so that each is logged once
        self._sessions, self._assignments = runner.sessions, runner.assignments

    # ---- sessions ------------------------------------------------------------------------------

    async def join(self, member: ClientDescription) -> Session:
        """Open a session for a client; it replaces the client's earlier one."""
        client = member.client
        check_speaks_for(client, f"it would join as {client}")
        self.refuse_revoked(client)
        self._limits.joins.take(client, loop_time())
        self._limits.known.add(client)
        session = self._sessions.join(member, loop_time())
        self._runner.upload_registry.close(client)
        # A poll of the session that was just superseded returns now.
        self._assignments.wake(client)
        self._announce_join(member)
        self._book.note(member)
        # The software of a client may have been another one before it was restarted.
        if (assignment := self._assignments.assignment(client)) and not self._can_do(
            member, assignment.kind
        ):
            await self._departures.lose(client)
        # In these phases the client may be the one that was missing.
        phases = (Phase.WAITING, Phase.EVALUATING)
        if self._runner.lock.locked() or self._runner.round.phase in phases:
            await self._runner.record()
        return session

    async def update_counts(
        self, session_id: str, train_samples: int | None, test_samples: int | None
    ) -> None:
        """Note a client's new numbers of samples; None: unchanged."""
        session = self.session(session_id)
        before = session.member
        session.member = replace(
            before,
            train_samples=before.train_samples if train_samples is None else train_samples,
            test_samples=before.test_samples if test_samples is None else test_samples,
        )
        if session.member == before:
            return
        log.info(
            "client %s has %d training samples now, and %d for tests",
            session.client,
            session.member.train_samples,
            session.member.test_samples,
        )
        if before.waits_for_data and self._runner.round.phase is Phase.WAITING:
            await self._runner.record()  # it may be the client that was missing

    def _announce_join(self, member: ClientDescription) -> None:
        client, device, samples = member.client, member.device, member.train_samples
        about = {"client": client, "round": self._runner.round.number}
        log.info("client %s joined (%s, %d samples)", client, short(device), samples, extra=about)
        joined = pb.ClientJoined(
            client=client, device=device, train_samples=samples, connected=len(self._sessions)
        )
        self._runner.emit(client_joined=joined)
        obstacle = self._runner.requirements.obstacle(member)
        if obstacle != self._warned.get(client, ""):
            if len(self._warned) >= SUPERSEDED_REMEMBERED:
                self._warned.clear()
            self._warned[client] = obstacle
            if obstacle:
                log.warning("client %s is not selected: %s", client, obstacle, extra=about)

    def _can_do(self, member: ClientDescription, kind: Kind) -> bool:
        """Return whether a client has the features for a task of this kind."""
        able = member.verifies or kind != "verify"
        return able and self._runner.requirements.allow(member, kind)

    def session(self, session_id: str) -> Session:
        """Return the caller's session and renew its lease."""
        client = self._sessions.find(session_id).client
        check_speaks_for(client, "the session is another client's")
        self.refuse_revoked(client)
        # The lease is renewed last, so that no other caller can keep it alive.
        return self._sessions.of(session_id, loop_time())

    def refuse_revoked(self, client: str) -> None:
        """Raise Revoked if the client was revoked."""
        revoked = self._runner.revoked
        if client in revoked:
            raise Revoked(revocation_message(client, revoked[client]))

    async def leave(self, session_id: str, reason: str, *, retires: bool = False) -> None:
        """End the session of a client that leaves; `retires`: its privacy budget is spent."""
        session, retired = self.session(session_id), self._runner.retired
        if retires and len(retired) < self._limits.limits.clients:
            await self._departures.retire(session.client, reason or "its privacy budget is spent")
        await self._departures.depart(session, reason or "left", for_good=retires)

    def acknowledge_finish(self, session_id: str) -> None:
        """Note that a client was informed of the end. It may fetch the result before it leaves."""
        self.session(session_id).finished = True

    # ---- tasks ---------------------------------------------------------------------------------

    async def next_task(self, session_id: str) -> Assignment | None:
        """Wait for the client's next task; None if there is none yet, or the round is finished."""
        session = self.session(session_id)
        self._limits.polls.take(session.client, loop_time())
        await self._take_back(session.client)
        await self._wait_for_task(session)
        return self._assignment(session)

    async def next_model(self, session_id: str) -> PublishedModel | None:
        """Wait for the model of the client's next task; it may still be being committed.

        None: there is no task yet, or the federation is finished. `task_of_model` returns the task.
        """
        session = self.session(session_id)
        self._limits.polls.take(session.client, loop_time())
        await self._take_back(session.client)
        if self._early_model(session.client) is None:
            await self._wait_for_task(session, for_models=True)
        if self._assignments.assignment(session.client) is not None:
            return self._runner.committer.publication
        return self._early_model(session.client)

    async def task_of_model(self, session_id: str) -> Assignment | None:
        """Wait for the task of the model that the client was just sent."""
        session = self.session(session_id)
        if self._early_model(session.client) is not None:
            await self._wait_for_task(session)
        return self._assignment(session)

    async def _take_back(self, client: str) -> None:
        """Let a retired client take part again: its owner has raised the limit.

        One that was only started again joins, and leaves without asking for a task.
        """
        if client in self._runner.retired:
            await self._departures.retire(client, None)
            await self._runner.record()  # it may be the client that was missing

    def _early_model(self, client: str) -> PublishedModel | None:
        early = self._runner.early_publication
        return early.publication if early and client in early.clients else None

    async def _wait_for_task(self, session: Session, *, for_models: bool = False) -> None:
        member = session.member
        if member.waits_for_data and not member.test_samples:
            return  # It has nothing to wait for here: it asks again after a pause.
        idle = self._assignments.assignment(session.client) is None
        finished = self._runner.result is not None
        if idle and not finished and not self._runner.stopping:
            await self._assignments.wait(session, for_models=for_models)
            self.session(session.id)  # it may have been superseded or revoked meanwhile

    def _assignment(self, session: Session) -> Assignment | None:
        assignment = self._assignments.assignment(session.client)
        if assignment is not None and assignment.id != session.last_task:
            session.last_task = assignment.id
            # A poll that returns a new task is free: a fast fleet with short rounds polls often.
            self._limits.polls.give_back(session.client)
        return assignment

    def idle_retry_seconds(self, session_id: str) -> float:
        """Return how long an idle client should wait before its next poll, and extend its lease.

        Polls of a large fleet are spread over time.
        """
        session = self.session(session_id)
        seconds = poll_pause_seconds(len(self._sessions), self._limits.limits.polls_per_second)
        if session.member.waits_for_data:
            seconds = max(seconds, NO_DATA_PAUSE_SECONDS)
        session.last_seen = loop_time() + seconds
        return seconds

    def progress(self, session_id: str, task: str, done: int, planned: int, loss: float) -> bool:
        """Accept a busy client's sign of life; return whether its task is still wanted.

        A client may train on past the deadline if its update is of use for the history. It may be
        selected again meanwhile: that task waits until the client has sent this one's result.
        """
        client = self.session(session_id).client
        if not self._assignments.holds(client, task):
            number = round_trained(task)
            return number is not None and self._runner.wants(client, number)
        progress = pb.TrainingProgress(
            client=client, steps_done=done, steps_planned=planned, loss=loss
        )
        self._runner.emit(training_progress=progress)
        return True

    async def give_up(self, session_id: str, task: str, why: str) -> None:
        """Continue the round without a client that cannot do its task."""
        client = self.session(session_id).client
        if self._assignments.holds(client, task):
            about = {"client": client, "round": self._runner.round.number}
            log.warning("client %s cannot do %s: %s", client, task, short(why, 300), extra=about)
            await self._departures.lose(client, gave_up=True)

    # ---- transfers and reports -----------------------------------------------------------------

    @contextmanager
    def transferring(self, client: str) -> Iterator[Call]:
        """Keep the client's lease during a transfer; a revocation ends the transfer."""
        session = self._sessions.get(client)
        with self._calls.of(Identity(Role.CLIENT, client)) as call:
            if session is None:
                yield call
                return
            session.polls += 1
            try:
                yield call
            finally:
                session.polls -= 1
                session.last_seen = loop_time()

    async def report_evaluation(
        self,
        session_id: str,
        version: int,
        evaluation: Evaluation | None,
        failure: str,
        applied: PrivacyTerms,
    ) -> None:
        """Accept an evaluation; `applied` is the noise that the client added to it."""
        client = self.session(session_id).client
        await self._runner.background.run_to_completion(
            self._results.take_evaluation(client, version, evaluation, failure, applied)
        )

    async def report_verification(
        self, session_id: str, number: int, step: bytes, losses: Sequence[float], failure: str
    ) -> None:
        """Accept the losses that a client measured for a proposed step."""
        client = self.session(session_id).client
        await self._runner.background.run_to_completion(
            self._results.take_trial(client, number, step, losses, failure)
        )

    def quarantine_notice(self, client: str) -> QuarantinedUpdate | None:
        """Return the client's last update if its round was committed without it."""
        return self._commits.quarantine_notices.get(client)

    @property
    def prediction_bases(self) -> PredictionBases | None:
        """The updates that new ones may be delta-coded against; None if delta coding is off."""
        return self._runner.prediction_bases


def poll_pause_seconds(clients: int, polls_per_second: int) -> float:
    """Return how long each idle client pauses between polls, besides the time a poll is open.

    >>> poll_pause_seconds(1_000, 200), poll_pause_seconds(10_000, 200)
    (0.0, 25.0)
    """
    return max(0.0, clients / polls_per_second - POLL_SECONDS)
