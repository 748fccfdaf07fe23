"""A server for telemetry.py: with telemetry, and its CPU time noted; or with all of it cut out.

SPENT=file python benchmarks/telemetry_server.py with server --listen …
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fairfleet.common.cli import main
from fairfleet.server import diagnostics, serve
from fairfleet.server.conflict_map import ConflictMap
from fairfleet.server.dashboard import Dashboard
from fairfleet.server.http_endpoint import _Handler
from fairfleet.server.monitoring import Monitoring

spent = 0.0  # CPU seconds, whichever thread they were spent in


def note(owner: Any, name: str) -> None:
    """What this function takes is telemetry. None of them calls another, or waits for anything but disk and peers."""
    work = getattr(owner, name)

    def noting(*given: Any) -> Any:
        global spent
        began = time.thread_time()
        try:
            return work(*given)
        finally:
            spent += time.thread_time() - began

    async def noting_async(*given: Any) -> Any:
        global spent
        began = time.thread_time()
        try:
            return await work(*given)
        finally:
            spent += time.thread_time() - began

    setattr(owner, name, noting_async if asyncio.iscoroutinefunction(work) else noting)


class Nobody:
    """Neither watches nor draws a map."""

    async def start(self) -> None:
        pass

    def of(self, *_: Any) -> None:
        return None


@contextlib.asynccontextmanager
async def unwatched(*_: Any) -> AsyncIterator[tuple[Nobody, str]]:
    yield Nobody(), "nowhere"


if __name__ == "__main__":
    if sys.argv.pop(1) == "with":
        for owner, name in (
            (Monitoring, "_take"), (Monitoring, "answer"), (Dashboard, "_status"), (Dashboard, "_message"),
            (_Handler, "do_GET"), (ConflictMap, "of"),
        ):  # fmt: skip
            note(owner, name)
    else:
        serve._monitored = unwatched  # type: ignore[assignment]
        diagnostics.ConflictMap = Nobody()  # type: ignore[assignment,misc]
    try:
        main()
    finally:
        Path(os.environ["SPENT"]).write_text(str(spent))
