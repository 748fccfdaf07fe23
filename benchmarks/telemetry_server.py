"""Run a server for telemetry.py, with measured telemetry or without telemetry.

    SPENT=file python benchmarks/telemetry_server.py with server --listen …

At the end it writes the CPU seconds of its telemetry into the file SPENT.
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

from fairfleet.common.cli.main import main
from fairfleet.server import app
from fairfleet.server.aggregation import diagnostics
from fairfleet.server.aggregation.conflict_map import ConflictMap
from fairfleet.server.monitoring.dashboard import Dashboard
from fairfleet.server.monitoring.http_endpoint import _Handler
from fairfleet.server.monitoring.monitor import Monitor

spent = 0.0  # CPU seconds, over all threads


def count_cpu_time(owner: Any, name: str) -> None:
    """Count the CPU time of this function as telemetry.

    None of the counted functions calls another one, or waits for anything except disk and peers.
    """
    work = getattr(owner, name)

    def counted(*arguments: Any) -> Any:
        global spent
        began = time.thread_time()
        try:
            return work(*arguments)
        finally:
            spent += time.thread_time() - began

    async def counted_async(*arguments: Any) -> Any:
        global spent
        began = time.thread_time()
        try:
            return await work(*arguments)
        finally:
            spent += time.thread_time() - began

    setattr(owner, name, counted_async if asyncio.iscoroutinefunction(work) else counted)


class NoTelemetry:
    """Replaces the monitor and the conflict map, and does nothing."""

    async def start(self) -> None:
        """Start no monitor."""

    def of(self, *_: Any) -> None:
        """Return no conflict map."""


@contextlib.asynccontextmanager
async def unmonitored(*_: Any) -> AsyncIterator[tuple[NoTelemetry, str]]:
    """Replace the server's monitoring."""
    yield NoTelemetry(), "nowhere"


if __name__ == "__main__":
    if sys.argv.pop(1) == "with":
        for owner, name in (
            (Monitor, "_observe"),
            (Monitor, "answer"),
            (Dashboard, "_status"),
            (Dashboard, "_message"),
            (_Handler, "do_GET"),
            (ConflictMap, "of"),
        ):
            count_cpu_time(owner, name)
    else:
        app._monitored = unmonitored  # type: ignore[assignment]
        diagnostics.ConflictMap = NoTelemetry()  # type: ignore[assignment,misc]
    try:
        main()
    finally:
        Path(os.environ["SPENT"]).write_text(str(spent))
