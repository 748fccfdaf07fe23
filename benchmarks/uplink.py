"""Limit the uplink of each client of a benchmark with a TCP relay.

The downlink is not limited. The relay needs no privileges, unlike the kernel's traffic shaping.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

PIECE_BYTES = 16 << 10


@contextmanager
def slow_links(count: int, server_port: int, megabits_per_second: float) -> Iterator[list[int]]:
    """Yield the ports of this many relays, one for each client."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    bytes_per_second = megabits_per_second * 1e6 / 8
    process = context.Process(
        target=_run, args=(sender, count, server_port, bytes_per_second), daemon=True
    )
    process.start()
    try:
        yield receiver.recv()
    finally:
        process.terminate()
        process.join(10)


def _run(ports: Connection, count: int, server_port: int, bytes_per_second: float) -> None:
    asyncio.run(_relay(ports, count, server_port, bytes_per_second))


async def _relay(ports: Connection, count: int, server_port: int, bytes_per_second: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", server_port)
        except OSError:  # The server does not listen yet; the client tries again.
            writer.close()
            return
        await asyncio.gather(
            _pass(reader, to_server, bytes_per_second), _pass(from_server, writer, None)
        )

    servers = [
        await asyncio.start_server(connected, "127.0.0.1", 0, limit=PIECE_BYTES)
        for _ in range(count)
    ]
    ports.send([server.sockets[0].getsockname()[1] for server in servers])
    await asyncio.Event().wait()


async def _pass(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bytes_per_second: float | None
) -> None:
    clock = asyncio.get_running_loop().time
    due = clock()
    try:
        while data := await reader.read(PIECE_BYTES):
            if bytes_per_second is not None:
                due = max(due, clock()) + len(data) / bytes_per_second
                await asyncio.sleep(due - clock())
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()
