"""The faults of a server under test, and what changes in its answers.

A fault is armed for the next call of a method, and happens once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import Enum

from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.model_pb2 import Chunk

TaskChange = Callable[[pb.NextTaskResponse], None]


class Fault(Enum):
    """What goes wrong in one call."""

    CUT = "the connection breaks after a chunk"
    DAMAGE = "a byte of the first chunk changes on the way"
    PAUSE = "the server requests a pause"
    FORGET = "the server no longer knows the session"
    RESTART = "the server restarts after a chunk"


class StreamCut(asyncio.CancelledError):
    """Ends the handler of an upload as a broken connection does."""


@dataclass
class Faults:
    """The armed faults, and lasting changes of tasks."""

    armed: dict[str, Fault] = field(default_factory=dict)  # by method
    changes: dict[int, list[TaskChange]] = field(default_factory=dict)  # by round
    abandoned: str = ""  # id of a task whose heartbeats are answered with abandon
    refused_round: int = -1  # whose updates are refused until the client polls again

    def __post_init__(self) -> None:
        self.restart = asyncio.Event()  # set when a restart is due

    def arm(self, method: str, fault: Fault) -> None:
        """Let the next call of a method fail."""
        self.armed[method] = fault

    def take(self, method: str) -> Fault | None:
        """Return the fault of this call, which then is no longer armed."""
        return self.armed.pop(method, None)

    def disarm(self) -> None:
        """Forget what was armed and has not happened."""
        self.armed.clear()
        self.changes.clear()
        self.abandoned, self.refused_round = "", -1

    def change_task(self, round_number: int, change: TaskChange) -> None:
        """Change every task of a round before it is sent."""
        self.changes.setdefault(round_number, []).append(change)

    def changed(self, response: pb.NextTaskResponse) -> pb.NextTaskResponse:
        """Return the answer to a poll with the changes of its round."""
        kind = response.WhichOneof("task")
        if kind in ("train", "evaluate", "verify"):
            for change in self.changes.get(getattr(response, kind).model.version, ()):
                change(response)
        return response

    async def upload(
        self, stream: AsyncIterator[bytes], fault: Fault | None
    ) -> AsyncIterator[bytes]:
        """Yield the messages of an upload as they arrive with this fault."""
        is_first = True
        async for message in stream:
            if is_first and fault is Fault.DAMAGE:
                message = damaged(message)
            yield message
            if is_first and fault is Fault.CUT:
                raise StreamCut
            if is_first and fault is Fault.RESTART:
                self.restart.set()
                await asyncio.Event().wait()  # until the server stops
            is_first = False


def damaged(message: bytes) -> bytes:
    """Return a chunk in which one bit of the data differs."""
    chunk = Chunk.FromString(message)
    chunk.data = bytes([chunk.data[0] ^ 1]) + chunk.data[1:] if chunk.data else b"\0"
    return chunk.SerializeToString()
