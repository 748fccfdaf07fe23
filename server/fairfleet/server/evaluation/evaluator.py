"""Evaluates committed versions on the server's own test data, never in the way of a round.

It follows the events of the federation like a monitor. At most one version waits; a newer one takes
its place. A result, or why there is none, is recorded first and announced then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from fairfleet.common.errors import LimitReached, UsageError
from fairfleet.common.wire import evaluation_out
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.evaluation.worker_process import WorkerDied, WorkerProcess
from fairfleet.server.federation.coordinator import Coordinator
from fairfleet.server.settings import ServerEvaluationSettings
from fairfleet.server.storage.server_evaluation_table import (
    ServerEvaluation,
    recorded_server_evaluations,
    server_evaluation_write,
)
from fairfleet.server.storage.store import Store

log = logging.getLogger(__name__)

ATTEMPTS = 2  # per version, if the worker dies


class ServerEvaluator:
    """Decides which versions are evaluated, and runs the worker."""

    def __init__(
        self, coordinator: Coordinator, store: Store, settings: ServerEvaluationSettings, every: int
    ) -> None:
        """Prepare to evaluate each version that is a multiple of `every`, and the last one."""
        self._coordinator, self._store = coordinator, store
        self._settings, self._every = settings, every
        self._recorded = {result.version for result in recorded_server_evaluations(store)}
        self._next: int | None = None  # the version that waits
        self._changed = asyncio.Condition()
        self._busy = False
        self._worker: WorkerProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the worker. Raises UsageError if the task cannot be used."""
        newest = self._store.kept_models()[-1]
        with self._store.files.reading(newest.file) as path:
            self._worker = await WorkerProcess.start(self._settings, path)

    def follow(self) -> None:
        """Begin to evaluate: what an earlier run did not get to, and what is committed now."""
        events = self._coordinator.state.watch()
        state = self._coordinator.state
        newest = state.publication.version
        is_last = bool(state.finished_reason)  # there is no event about an end before this one
        self._next = self._offered(newest if is_last else newest - newest % self._every)
        self._tasks = [asyncio.create_task(self._watch(events)), asyncio.create_task(self._run())]

    async def finish(self) -> None:
        """Wait until the last version is evaluated."""
        await self._offer(self._coordinator.state.publication.version)
        async with self._changed:
            await self._changed.wait_for(lambda: self._next is None and not self._busy)

    async def stop(self) -> None:
        """End the worker; the next run of the server evaluates what is missing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._worker is not None:
            await self._worker.stop()

    # ---- which versions ------------------------------------------------------------------------

    async def _watch(self, events: AsyncIterator[pb.Event]) -> None:
        while not self._coordinator.state.stopping:
            try:
                async for event in events:
                    await self._observe(event)
            except LimitReached:
                events = self._coordinator.state.watch()

    async def _observe(self, event: pb.Event) -> None:
        match event.WhichOneof("kind"):
            case "round_committed" if not (event.round_committed.record.round + 1) % self._every:
                await self._offer(event.round_committed.record.round + 1)
            case "federation_finished":
                await self._offer(self._coordinator.state.publication.version)

    async def _offer(self, version: int) -> None:
        async with self._changed:
            if (offered := self._offered(version)) is not None:
                if self._next is not None and self._next != offered:
                    log.info("version %d is not evaluated here: a newer one is", self._next)
                self._next = offered
                self._changed.notify_all()

    def _offered(self, version: int) -> int | None:
        """Return a version if it is still to be evaluated; the initial one never is."""
        return version if version and version not in self._recorded else None

    # ---- evaluating ----------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._next is not None)
                version, self._next, self._busy = self._next or 0, None, True
                self._recorded.add(version)
            try:
                await self._evaluate(version)
            except Exception:  # an observer's failure never ends the federation
                log.exception("version %d cannot be evaluated here", version)
            async with self._changed:
                self._busy = False
                self._changed.notify_all()

    async def _evaluate(self, version: int) -> None:
        model = await self._coordinator.in_database(self._store.model, version)
        if model is None:
            log.info("version %d is not evaluated here: it is not kept any more", version)
            return
        with self._store.files.reading(model.file) as path:
            result = await self._answer(version, path)
        if result.failure:
            about = {"round": version}
            log.error(
                "version %d could not be evaluated here: %s", version, result.failure, extra=about
            )
        await self._coordinator.in_database(self._store.write, server_evaluation_write(result))
        message = pb.ServerEvaluated(
            version=version,
            failure=result.failure,
            seconds=result.seconds,
            evaluation=evaluation_out(result.evaluation) if result.evaluation else None,
        )
        self._coordinator.events.emit(version, server_evaluated=message)

    async def _answer(self, version: int, path: Path) -> ServerEvaluation:
        """Return the worker's answer, or a failure; a worker that dies is started again."""
        why, limit = "", self._settings.deadline_seconds
        for _ in range(ATTEMPTS):
            try:
                if self._worker is None:
                    self._worker = await WorkerProcess.start(self._settings, path)
                return await asyncio.wait_for(self._worker.evaluate(version, path), limit)
            except TimeoutError:
                await self._drop_worker()
                why = f"it took longer than evaluation.deadline_seconds: {limit:g} s"
                return ServerEvaluation(version, None, why, limit)
            except UsageError as error:
                return ServerEvaluation(version, None, str(error), 0.0)
            except WorkerDied as error:
                log.warning("the worker that evaluates version %d: %s", version, error)
                await self._drop_worker()
                why = f"the worker process died: {error}"
        return ServerEvaluation(version, None, f"{why}, {ATTEMPTS} times", 0.0)

    async def _drop_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            with suppress(ProcessLookupError):
                await worker.stop()
