"""Lets others watch the server over HTTP: /metrics for Prometheus, /healthz and /readyz for orchestrators.

It only looks on: whatever goes wrong here is logged, and the federation goes on without being measured.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set
from http import HTTPStatus
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from fairfleet.common.errors import LimitReached
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.coordinator import Coordinator
from fairfleet.server.http_endpoint import Page
from fairfleet.server.metrics import Direction, Metrics, Served
from fairfleet.server.rounds import Phase, Round
from fairfleet.server.store import Store

log = logging.getLogger(__name__)


class Recalled(NamedTuple):
    seen: Set[str]
    served: Served | None
    direction: Direction | None
    measured: float | None


class Monitoring:
    def __init__(self, coordinator: Coordinator, store: Store) -> None:
        self.metrics = Metrics(coordinator, CollectorRegistry())
        self._coordinator = coordinator
        self._store = store
        self._events = coordinator.broadcast.watch()  # from here on nothing is missed
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """The coordinator has started; what earlier runs of the server saw is taken up from the records."""
        try:
            self._show(await asyncio.to_thread(self._recall, self._coordinator.round))
        except Exception:
            log.exception("cannot measure what earlier runs of the server recorded")
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        if self._watching:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    # ---- pages ---------------------------------------------------------------------------------

    async def page(self, path: str, accept: str) -> Page:
        match path:
            case "/healthz" if self._coordinator.failed.done():
                return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"failed; see the log\n")
            case "/healthz":
                return Page(HTTPStatus.OK, b"healthy\n")
            case "/readyz" if self._coordinator.stopping:
                return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"stopping\n")
            case "/readyz" | "/metrics" if self._watching is None:
                return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"starting\n")
            case "/readyz":
                return Page(HTTPStatus.OK, b"ready\n")
            case "/metrics":
                encode, content_type = choose_encoder(accept)
                return Page(HTTPStatus.OK, encode(self.metrics.registry), content_type)
        return Page(HTTPStatus.NOT_FOUND, b"there are /metrics, /healthz and /readyz\n")

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
            self.metrics.observe(event)
            if event.HasField("evaluation_finished"):
                self.metrics.served = await asyncio.to_thread(self._served, event.round)
        except Exception:
            log.exception("cannot measure event %d", event.sequence)

    def _recall(self, round: Round) -> Recalled:
        """From the database, in a thread."""
        finished = round.number - 1 if round.phase is Phase.EVALUATING else round.number
        seen = self._store.update_counts(round.number).keys() | self._store.newest_evaluations().keys()
        newest = self._store.records(round.number - 2, round.number - 1)
        measured = [record["measured"]["improved"] for record in newest if record["measured"]]
        direction = Direction.of(newest[-1]["diagnostics"], newest[-1].get("promised")) if newest else None
        return Recalled(seen, self._served(finished), direction, measured[-1] if measured else None)

    def _show(self, recalled: Recalled) -> None:
        self.metrics.seen |= recalled.seen
        self.metrics.served, self.metrics.direction = recalled.served, recalled.direction
        self.metrics.measured = recalled.measured

    def _served(self, last: int) -> Served | None:
        """By the newest version up to `last` that clients evaluated, compared with the one evaluated before it."""
        versions = self._store.evaluated_versions(last, 2)
        evaluations = [self._store.evaluations_of(version) for version in versions]
        return Served.of(versions[0], evaluations[0], evaluations[1] if versions[1:] else {}) if versions else None
