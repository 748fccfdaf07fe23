"""Background tasks, and threads for slow work.

`BackgroundTasks` runs coroutines that must not be lost. An error of the server itself (a full
disk, a bug) in any of them ends the server; the state directory stays as it is. `Executors` has
the threads, so that the event loop only moves messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fairfleet.common.errors import FleetError

T = TypeVar("T")

WORKERS = 4


class BackgroundTasks:
    """Coroutines that run in the background, and those that must run to their end."""

    def __init__(self) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._background: set[asyncio.Task[None]] = set()
        self._units: set[asyncio.Task[Any]] = set()  # transactions under way, with their effects

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background_ended)

    async def run_to_completion(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end even if the caller is cancelled.

        So no transaction is left without its effects in memory.
        """
        task = asyncio.create_task(work)
        self._units.add(task)
        task.add_done_callback(self._unit_ended)
        return await asyncio.shield(task)

    def fail(self, error: BaseException) -> None:
        """End the server with this error, unless another one ends it already."""
        if not self.failed.done():
            self.failed.set_exception(error)

    async def end(self) -> None:
        """Wait for what must run to its end, and cancel the rest."""
        await asyncio.gather(*self._units, return_exceptions=True)
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.fail(error)

    def _unit_ended(self, task: asyncio.Task[Any]) -> None:
        self._units.discard(task)
        error = None if task.cancelled() else task.exception()
        # A FleetError is the answer to the caller.
        if error is not None and not isinstance(error, FleetError):
            self.fail(error)


class Executors:
    """The server's threads.

    One thread uses the database, so that facts keep their order. One aggregates, so that its
    scratch memory exists once. A few workers do the rest.
    """

    def __init__(self) -> None:
        self.workers = ThreadPoolExecutor(WORKERS, "worker")
        self._database = ThreadPoolExecutor(1, "database")
        self._aggregator = ThreadPoolExecutor(1, "aggregator")

    async def in_worker(self, work: Callable[..., T], *args: Any) -> T:
        """Call a function in one of the worker threads."""
        return await asyncio.get_running_loop().run_in_executor(self.workers, work, *args)

    async def in_aggregator(self, work: Callable[..., T], *args: Any) -> T:
        """Call a function in the thread that aggregates."""
        return await asyncio.get_running_loop().run_in_executor(self._aggregator, work, *args)

    async def in_database(self, work: Callable[..., T], *args: Any) -> T:
        """Call a function in the thread that uses the database."""
        return await asyncio.get_running_loop().run_in_executor(self._database, work, *args)

    def shut_down(self) -> None:
        """End the threads when their work is done."""
        for pool in (self._aggregator, self.workers, self._database):
            pool.shutdown(wait=True)


def loop_time() -> float:
    """Return the time of the running event loop, in seconds."""
    return asyncio.get_running_loop().time()
