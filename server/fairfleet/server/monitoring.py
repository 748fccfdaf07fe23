"""Lets others watch the server over HTTP: a page for people, /metrics for Prometheus, /healthz and /readyz for
orchestrators.

It only looks on: whatever goes wrong here is logged, and the federation goes on without being measured.
"""

from __future__ import annotations

import asyncio
import json
import logging
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from fairfleet.common.errors import LimitReached
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.coordinator import Coordinator
from fairfleet.server.dashboard import Dashboard
from fairfleet.server.event_files import FederationFiles
from fairfleet.server.event_log import write_down
from fairfleet.server.http_endpoint import Answer, Page, Request
from fairfleet.server.measures import StepTaken
from fairfleet.server.metrics import Metrics
from fairfleet.server.recalling import Recalled, newest_served, recall
from fairfleet.server.round_records import record_out
from fairfleet.server.store import Store

log = logging.getLogger(__name__)


class Monitoring:
    def __init__(self, coordinator: Coordinator, store: Store) -> None:
        self.metrics = Metrics(coordinator, CollectorRegistry())
        self.dashboard = Dashboard(coordinator, store)
        self._coordinator = coordinator
        self._store = store
        folder = coordinator.settings.tensorboard
        self._files = FederationFiles(folder) if folder else None
        self._events = coordinator.broadcast.watch()  # from here on nothing is missed
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """The coordinator has started; what earlier runs of the server saw is taken up from the records."""
        try:
            self._show(await asyncio.to_thread(recall, self._store, self._coordinator.round))
        except Exception:
            log.exception("cannot measure what earlier runs of the server recorded")
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        if self._watching:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._files:
            self._files.close()

    # ---- pages ---------------------------------------------------------------------------------

    async def answer(self, request: Request) -> Answer:
        if asset := self.dashboard.assets.get(request.path):
            return asset
        match request.path:
            case "/healthz" if self._coordinator.failed.done():
                return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"failed; see the log\n")
            case "/healthz":
                return Page(HTTPStatus.OK, b"healthy\n")
            case "/readyz" if self._coordinator.stopping:
                return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"stopping\n")
            case _ if self._watching is None:
                return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"starting\n")
            case "/readyz":
                return Page(HTTPStatus.OK, b"ready\n")
            case "/metrics":
                encode, content_type = choose_encoder(request.headers.get("accept", ""))
                return Page(HTTPStatus.OK, encode(self.metrics.registry), content_type)
        found = await self.dashboard.answer(request)
        return found or Page(HTTPStatus.NOT_FOUND, b"there are /, /metrics, /healthz and /readyz\n")

    # ---- watching ------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while not self._coordinator.stopping:
            try:
                async for event in self._events:
                    await self._take(event)
            except LimitReached:
                log.warning("metrics fell behind: some events are not counted")
                self._events = self._coordinator.broadcast.watch()

    async def _take(self, event: pb.Event) -> None:
        try:
            write_down(event)
            self.metrics.observe(event)
            self.dashboard.picture.observe(event)
            if event.HasField("round_committed"):
                record = event.round_committed.record
                step = StepTaken.of(self._diagnostics(record))
                self.metrics.committed(record, step)
                self.dashboard.picture.committed(record, step)
                if self._files:
                    await asyncio.to_thread(self._files.committed, record, step)
            if event.HasField("evaluation_finished"):
                await self._evaluated(event)
        except Exception:
            log.exception("cannot measure event %d", event.sequence)

    def _diagnostics(self, record: pb.RoundRecord) -> dict[str, Any]:
        """As they were made; what watchers elsewhere get is read only if a newer round has come meanwhile."""
        newest = self._coordinator.newest_record
        found: dict[str, Any] = (
            newest["diagnostics"] if newest.get("round") == record.round else json.loads(record.diagnostics_json)
        )
        return found

    async def _evaluated(self, event: pb.Event) -> None:
        served = await asyncio.to_thread(newest_served, self._store, event.round)
        self.metrics.served = served
        if served and served.version == event.round:
            self.dashboard.picture.evaluated(served, event.unix_seconds)
            if self._files:
                await asyncio.to_thread(self._files.evaluated, served, event.unix_seconds)

    def _show(self, recalled: Recalled) -> None:
        metrics, picture = self.metrics, self.dashboard.picture
        for client in recalled.updates.keys() | recalled.heard.keys() | recalled.revoked:
            metrics.seen.add(client)
            count, newest = recalled.updates.get(client, (0, None))
            asked, when = recalled.asked.get(client, (0, -1))
            state = "revoked" if client in recalled.revoked else "gone"
            picture.set(
                client,
                state=state,
                updates=count,
                last_round=newest,
                asked=asked,
                asked_round=when,
                seen_unix=recalled.heard.get(client),
            )
        for served, unix in zip(recalled.served, recalled.evaluated_unix, strict=True):
            metrics.served = served
            picture.evaluated(served, unix)
        for record in recalled.records:
            step, told = StepTaken.of(record["diagnostics"]), record_out(record, "")
            metrics.recall(told, step)
            picture.committed(told, step, live=False)
        measured = [record["measured"]["improved"] for record in recalled.records if record["measured"]]
        metrics.measured = measured[-1] if measured else None
