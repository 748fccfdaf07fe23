"""The Operator service: what people and tools can see of a federation, and what they can change.

Each method translates a request, calls one function of the federation or of the store, and
translates its result.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict

from fairfleet.common import wire
from fairfleet.common.errors import BadRequest, short
from fairfleet.common.features import software
from fairfleet.common.names import check_name
from fairfleet.common.tensors import Section
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.federation.clients.sessions import Session
from fairfleet.server.federation.coordinator import Coordinator
from fairfleet.server.federation.event_stream import record_message
from fairfleet.server.federation.operators.continuation import ContinuationWish
from fairfleet.server.rounds.state_machine import Phase
from fairfleet.server.rpc.handlers import Context
from fairfleet.server.rpc.model_archive import ModelArchive
from fairfleet.server.security.enrolment import EnrolmentAuthority
from fairfleet.server.security.operator_revocation import Operators
from fairfleet.server.storage.client_queries import update_counts
from fairfleet.server.storage.evaluation_queries import newest_evaluations
from fairfleet.server.storage.operations.audit_queries import AuditEntry, audit_entries
from fairfleet.server.storage.store import Store

MAX_REASON_CHARS = 300  # of a reason that is stored
PAGE = 100  # records read from the database at a time
ACTIVITIES = {
    "train": pb.CLIENT_STATE_TRAINING,
    "verify": pb.CLIENT_STATE_VERIFYING,
    "evaluate": pb.CLIENT_STATE_EVALUATING,
}


class OperatorService:
    """What operators call."""

    def __init__(
        self,
        coordinator: Coordinator,
        store: Store,
        operators: Operators,
        enrolment: EnrolmentAuthority,
    ) -> None:
        self._coordinator = coordinator
        self._store = store
        self._operators, self._enrolment = operators, enrolment
        self._audit = coordinator.audit
        self._archive = ModelArchive(coordinator, store)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        """Return the state of the federation."""
        coordinator, state = self._coordinator, self._coordinator.state
        budget = state.privacy_budget
        return pb.StatusResponse(
            federation=coordinator.settings.name,
            version=state.publication.version,
            rounds_planned=state.rounds_planned,
            finished_reason=state.finished_reason,
            phase=pb.Phase.Value(f"PHASE_{state.round.phase.name}"),
            attempt=state.round.attempt,
            paused=state.round.paused or bool(state.held_because),
            connected=state.connected,
            asked=len(state.round.asked),
            received=len(state.round.received),
            missing=state.missing_clients(),
            rule=coordinator.recipe.name,
            parameters=coordinator.signature.size(Section.PARAMETERS),
            bytes_received=state.traffic.received_bytes,
            bytes_sent=state.traffic.sent_bytes,
            uptime_seconds=state.uptime_seconds,
            measure=state.measure,
            measure_direction=wire.direction_out(state.direction_of(state.measure)),
            held_because=state.held_because,
            privacy=budget.status() if budget else None,
            settings_digest=coordinator.settings_digest,
            federation_id=state.federation_id,
            software=software(),
            best_version=state.best_version,
        )

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.Event]:
        """Send every event from now on."""
        events = self._coordinator.events.watch()
        # The contract: no event that happens after the initial metadata is missed.
        await context.send_initial_metadata(())
        async for event in events:
            yield event

    async def Rounds(
        self, request: pb.RoundsRequest, context: Context
    ) -> AsyncIterator[pb.RoundRecord]:
        """Send the records of committed rounds, in order."""
        newest = self._coordinator.state.publication.version - 1
        last = min(request.last or newest, newest)
        for first in range(request.first, last + 1, PAGE):
            for record in await asyncio.to_thread(
                self._store.records, first, min(first + PAGE - 1, last)
            ):
                yield record_message(record)

    async def Clients(
        self, request: pb.ClientsRequest, context: Context
    ) -> AsyncIterator[pb.ClientRecord]:
        """Send what is recorded of each client, by name."""
        committed = self._coordinator.state.publication.version
        counts = await asyncio.to_thread(update_counts, self._store, committed)
        evaluations = await asyncio.to_thread(newest_evaluations, self._store)
        revoked = await asyncio.to_thread(self._store.revoked)
        sessions = {session.client: session for session in self._coordinator.state.sessions()}
        state, book = self._coordinator.state, self._coordinator.state.book
        budget = state.privacy_budget
        recorded = counts.keys() | evaluations.keys() | revoked.keys()
        for client in sorted(recorded | sessions.keys() | set(book.clients())):
            record = pb.ClientRecord(client=client, state=self._state(client, client in revoked))
            if budget and not budget.privacy.amplification:
                record.epsilon = budget.epsilon_of(client)
            record.not_selected_because = state.retired.get(client, "")
            record.software, features = book.software_of(client)
            record.features.extend(features)
            if session := sessions.get(client):
                _add_session(record, session)
                record.missing_features.extend(state.missing_features(session))
                record.not_selected_because = state.not_selected_because(session)
            if client in counts:
                record.updates_counted, record.last_counted_round = counts[client]
                self._mark_finished(record, committed)
            if client in evaluations:
                record.evaluated_version, evaluation = evaluations[client]
                record.evaluation.MergeFrom(wire.evaluation_out(evaluation))
            yield record

    def _mark_finished(self, record: pb.ClientRecord, committed: int) -> None:
        """Call a client finished that was in the last round of a federation that is over.

        A server that was restarted since then does not know whom it told of the end.
        """
        state = self._coordinator.state
        is_over = state.round.phase is Phase.FINISHED and not state.has_left(record.client)
        was_in_last = record.last_counted_round == committed - 1
        if is_over and was_in_last and record.state == pb.CLIENT_STATE_GONE:
            record.state = pb.CLIENT_STATE_FINISHED

    def _state(self, client: str, revoked: bool) -> pb.ClientState.ValueType:
        if revoked:
            return pb.CLIENT_STATE_REVOKED
        state, budget = self._coordinator.state, self._coordinator.state.privacy_budget
        exhausted = budget is not None and not budget.may_train(client)
        if client in state.retired or (exhausted and state.was_told_of_end(client)):
            return pb.CLIENT_STATE_RETIRED
        if state.was_told_of_end(client):
            return pb.CLIENT_STATE_FINISHED
        if activity := ACTIVITIES.get(state.activity(client)):
            return activity
        if exhausted:
            return pb.CLIENT_STATE_RETIRED
        return pb.CLIENT_STATE_IDLE if state.is_connected(client) else pb.CLIENT_STATE_GONE

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        """Begin no round until `Resume`."""
        async with self._audit.recording("pause") as entry:
            await self._coordinator.operators.pause(entry)
        return pb.PauseResponse()

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        """Continue after `Pause`."""
        async with self._audit.recording("resume") as entry:
            await self._coordinator.operators.resume(entry)
        return pb.ResumeResponse()

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.StopResponse:
        """Finish the federation after the round under way."""
        reason = short(request.reason, MAX_REASON_CHARS) or "stopped by an operator"
        async with self._audit.recording("stop", reason=reason) as entry:
            await self._coordinator.operators.end(reason, entry)
        return pb.StopResponse()

    async def Continue(self, request: pb.ContinueRequest, context: Context) -> pb.ContinueResponse:
        """Let a finished federation go on."""
        wish = continuation_wish(request)
        async with self._audit.recording("continue", **wish._asdict()) as entry:
            version = await self._coordinator.continuation.go_on(wish, entry)
        planned = self._coordinator.state.rounds_planned
        return pb.ContinueResponse(version=version, rounds_planned=planned)

    async def Models(
        self, request: pb.ModelsRequest, context: Context
    ) -> AsyncIterator[pb.ModelRecord]:
        """Send what is known of the models that are kept."""
        async for record in self._archive.records():
            yield record

    async def Audit(
        self, request: pb.AuditRequest, context: Context
    ) -> AsyncIterator[pb.AuditRecord]:
        """Send what operators did, and changes of the settings, in order."""
        first = request.first
        while entries := await asyncio.to_thread(audit_entries, self._store, first, PAGE):
            for entry in entries:
                yield audit_message(entry)
            first = entries[-1].sequence + 1

    async def Revoke(self, request: pb.RevokeRequest, context: Context) -> pb.RevokeResponse:
        """Exclude a client or an operator permanently."""
        reason = short(request.reason, MAX_REASON_CHARS)
        who = {"operator" if request.operator else "client": request.client}
        async with self._audit.recording("revoke", **who, reason=reason) as entry:
            name = check_name(request.client, "the name to revoke", BadRequest)
            if request.operator:
                revoking = self._operators.revoke(name, reason, entry)
                await self._coordinator.run_to_completion(revoking)
            else:
                await self._coordinator.operators.revoke(name, reason, entry)
        return pb.RevokeResponse()

    async def MakeToken(
        self, request: pb.MakeTokenRequest, context: Context
    ) -> pb.MakeTokenResponse:
        """Return a new token, with which one device can enroll."""
        client, seconds = request.client, request.seconds
        validity = request.certificate_seconds
        recording = self._audit.recording(
            "make-token", client=client, seconds=seconds, certificate_seconds=validity
        )
        async with recording as entry:
            secret, ca = await self._enrolment.make_token(client, seconds, validity, entry)
        return pb.MakeTokenResponse(secret=secret, ca=ca, port=self._enrolment.port or 0)

    async def ExportModel(
        self, request: pb.ExportModelRequest, context: Context
    ) -> AsyncIterator[pb.FileChunk]:
        """Send the file of a model: the newest, the best, or the version that is given."""
        chunks = self._archive.export(request)
        version = request.version if request.HasField("version") else None
        async with self._audit.recording("export", version=version, best=request.best or None):
            chunk = await anext(chunks)  # a version that is not kept is refused here
            await self._audit.done("export", version=chunk.version)
        yield chunk
        async for chunk in chunks:
            yield chunk


def _add_session(record: pb.ClientRecord, session: Session) -> None:
    """Add what is known of a connected client."""
    idle_seconds = max(0.0, asyncio.get_running_loop().time() - session.last_seen)
    record.device = session.member.device
    record.train_samples = session.member.train_samples
    record.test_samples = session.member.test_samples
    record.seconds_since_seen = 0.0 if session.polls else idle_seconds


def continuation_wish(request: pb.ContinueRequest) -> ContinuationWish:
    """Return how an operator wishes the federation to go on."""
    return ContinuationWish(
        request.from_version if request.HasField("from_version") else None,
        request.rounds if request.HasField("rounds") else None,
        request.seconds if request.HasField("seconds") else None,
    )


def audit_message(entry: AuditEntry) -> pb.AuditRecord:
    """Return a row of the audit as it is sent."""
    return pb.AuditRecord(**asdict(entry))
