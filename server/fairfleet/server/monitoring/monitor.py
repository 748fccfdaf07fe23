"""Follow a federation's events and answer HTTP requests about it.

The monitor serves a dashboard for people, /metrics for Prometheus, and /healthz and /readyz for
orchestrators. It only observes: its failures are logged, and the federation continues without being
measured.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from fairfleet.common.errors import LimitReached
from fairfleet.common.wire import evaluation_in
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.federation.event_stream import record_message
from fairfleet.server.federation.federation_state import FederationState
from fairfleet.server.monitoring.dashboard import Dashboard
from fairfleet.server.monitoring.event_log import log_event
from fairfleet.server.monitoring.http_endpoint import Answer, Page, Request
from fairfleet.server.monitoring.measures import Comparison, StepTaken
from fairfleet.server.monitoring.prometheus import Metrics
from fairfleet.server.monitoring.recorded_history import RecordedHistory, newest_evaluation, recall
from fairfleet.server.monitoring.tensorboard import FederationEventFiles
from fairfleet.server.storage.server_evaluation_table import ServerEvaluation
from fairfleet.server.storage.store import Store

log = logging.getLogger(__name__)


class Monitor:
    """Metrics, dashboard, event log and event files of one federation.

    Events count from construction on. Until `start`, metrics and dashboard answer 503.
    """

    def __init__(self, federation: FederationState, store: Store) -> None:
        self.metrics = Metrics(federation, CollectorRegistry())
        self.dashboard = Dashboard(federation, store)
        self._federation = federation
        self._store = store
        folder = federation.settings.tensorboard
        self._files = FederationEventFiles(folder) if folder else None
        self._events = federation.watch()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read what earlier runs of the server recorded, then follow events."""
        try:
            self._show(await self._recorded())
        except Exception:
            log.exception("cannot measure what earlier runs of the server recorded")
        self._task = asyncio.create_task(self._watch())

    async def _recorded(self) -> RecordedHistory:
        current = self._federation.round
        return await asyncio.to_thread(recall, self._store, current, self._comparison())

    def _comparison(self) -> Comparison:
        return Comparison(self._federation.measure, self._federation.direction_of)

    async def stop(self) -> None:
        """Stop following events, and close the event files."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._files:
            self._files.close()

    # ---- pages ---------------------------------------------------------------------------------

    async def answer(self, request: Request) -> Answer:
        """Return the answer to a request; 404 for an unknown path."""
        if asset := self.dashboard.assets.get(request.path):
            return asset
        if probe := self._probe(request.path):
            return probe
        if self._task is None:
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"starting\n")
        if request.path == "/metrics":
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
            return Page(HTTPStatus.OK, encode(self.metrics.registry), content_type)
        answer = await self.dashboard.answer(request)
        not_found = Page(HTTPStatus.NOT_FOUND, b"there are /, /metrics, /healthz and /readyz\n")
        return answer or not_found

    def _probe(self, path: str) -> Page | None:
        match path:
            case "/healthz" if self._federation.has_failed:
                return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"failed; see the log\n")
            case "/healthz":
                return Page(HTTPStatus.OK, b"healthy\n")
            case "/readyz" if self._federation.stopping:
                return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"stopping\n")
            case "/readyz" if self._task:
                return Page(HTTPStatus.OK, b"ready\n")
        return None

    # ---- events --------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while not self._federation.stopping:
            try:
                async for event in self._events:
                    await self._observe(event)
            except LimitReached:
                log.warning("metrics fell behind: some events are not counted")
                self._events = self._federation.watch()

    async def _observe(self, event: pb.Event) -> None:
        try:
            log_event(event)
            self.metrics.observe(event)
            self.dashboard.state.observe(event)
            if event.HasField("round_committed"):
                await self._round_committed(event.round_committed.record)
            if event.HasField("evaluation_finished"):
                await self._evaluation_finished(event)
            if event.HasField("federation_continued"):
                await self._continued()
            if event.HasField("server_evaluated"):
                await self._server_evaluated(event)
        except Exception:
            log.exception("cannot measure event %d", event.sequence)

    async def _round_committed(self, record: pb.RoundRecord) -> None:
        step = StepTaken.of(self._diagnostics(record))
        self.metrics.committed(record, step)
        self.dashboard.state.committed(record, step)
        if self._files:
            await asyncio.to_thread(self._files.write_round, record, step)

    def _diagnostics(self, record: pb.RoundRecord) -> Mapping[str, Any]:
        """Return a round's diagnostics; decode their JSON only if a newer round was committed."""
        newest = self._federation.newest_record
        if newest and newest.round == record.round:
            return newest.diagnostics
        diagnostics: dict[str, Any] = json.loads(record.diagnostics_json)
        return diagnostics

    async def _evaluation_finished(self, event: pb.Event) -> None:
        evaluation = await asyncio.to_thread(
            newest_evaluation, self._store, event.round, self._comparison()
        )
        self.metrics.evaluation = evaluation
        if evaluation and evaluation.version == event.round:
            self.dashboard.state.evaluated(evaluation, event.unix_seconds)
            if self._files:
                unix_seconds = event.unix_seconds
                await asyncio.to_thread(self._files.write_evaluation, evaluation, unix_seconds)

    async def _server_evaluated(self, event: pb.Event) -> None:
        message = event.server_evaluated
        evaluation = evaluation_in(message.evaluation) if message.HasField("evaluation") else None
        result = ServerEvaluation(message.version, evaluation, message.failure, message.seconds)
        self.metrics.server_evaluation = result
        self.dashboard.state.server_evaluated(result)
        if self._files:
            write = self._files.write_server_evaluation
            await asyncio.to_thread(write, result, event.unix_seconds)

    async def _continued(self) -> None:
        """Show only what still counts: the federation may have gone back to an earlier version."""
        history = await self._recorded()
        self.metrics.forget_history()
        self.dashboard.state.forget_history()
        self._show(history, live=True)

    # ---- what is recorded ----------------------------------------------------------------------

    def _show(self, history: RecordedHistory, *, live: bool = False) -> None:
        """Show what is recorded; with `live`, the clients' states are known from events."""
        retired = self._federation.retired.keys()
        for client in history.updates.keys() | history.heard.keys() | history.revoked | retired:
            self._show_client(client, history, live=live)
        for evaluation, unix in zip(history.evaluations, history.evaluated_unix, strict=True):
            self.metrics.evaluation = evaluation
            self.dashboard.state.evaluated(evaluation, unix)
        for result in history.server_evaluations:
            self.metrics.server_evaluation = result
            self.dashboard.state.server_evaluated(result)
        for record in history.records:
            step, message = StepTaken.of(record.diagnostics), record_message(record, "")
            self.metrics.recall(message, step)
            if record.contributions:  # otherwise it only went back to an earlier version
                self.dashboard.state.committed(message, step, live=False)
        improvements = [record.measured for record in history.records if record.measured]
        self.metrics.measured = improvements[-1] if improvements else None

    def _show_client(self, client: str, history: RecordedHistory, *, live: bool) -> None:
        self.metrics.seen.add(client)
        update_count, last_round = history.updates.get(client, (0, None))
        times_asked, asked_round = history.asked.get(client, (0, -1))
        self.dashboard.state.set(
            client,
            updates=update_count,
            last_round=last_round,
            asked=times_asked,
            asked_round=asked_round,
        )
        if not live:
            self.dashboard.state.set(
                client,
                state="revoked" if client in history.revoked else "gone",
                seen_unix=history.heard.get(client),
                software=self._federation.book.software_of(client).software,
            )
