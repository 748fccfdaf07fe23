"""Work on the event loop that must not get lost: what runs in the background, and what must run to its end.

A failure of our own (a full disk, a bug) in any of it ends the server; the state directory stays as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fairfleet.common.errors import FleetError

T = TypeVar("T")


class Tasks:
    def __init__(self) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._background: set[asyncio.Task[None]] = set()
        self._units: set[asyncio.Task[Any]] = set()  # transactions under way, with their effects

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._over)

    async def whole(self, work: Coroutine[Any, Any, T]) -> T:
        """To its end, even if the caller hangs up in the middle: no transaction without its effects."""
        task = asyncio.create_task(work)
        self._units.add(task)
        task.add_done_callback(self._unit_over)
        return await asyncio.shield(task)

    def fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    async def end(self) -> None:
        """Waits for what must run to its end, and cuts the rest off."""
        await asyncio.gather(*self._units, return_exceptions=True)
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.fail(error)

    def _unit_over(self, task: asyncio.Task[Any]) -> None:
        self._units.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, FleetError):  # which the caller is told
            self.fail(error)
