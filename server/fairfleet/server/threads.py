"""The server's threads: what takes long runs in them, so that the event loop only moves messages.

One writes to the database, so that facts keep their order; one aggregates, so that its scratch memory is there once;
a few do the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

WORKERS = 4


class Threads:
    def __init__(self) -> None:
        self.workers = ThreadPoolExecutor(WORKERS, "worker")
        self._database = ThreadPoolExecutor(1, "database")
        self._aggregator = ThreadPoolExecutor(1, "aggregator")

    async def in_worker(self, work: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.workers, work, *given)

    async def in_aggregator(self, work: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._aggregator, work, *given)

    async def in_database(self, work: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._database, work, *given)

    def shut_down(self) -> None:
        """When what they were given is done."""
        for pool in (self._aggregator, self.workers, self._database):
            pool.shutdown(wait=True)
