"""What a client did: the calls that a server saw, in order, and how to wait for the next one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from fairfleet.proto.v1.model_pb2 import Chunk

UPDATES_KEPT = 4


class CheckFailed(Exception):
    """A client did not do what a check expects."""


@dataclass(frozen=True)
class ObservedCall:
    """A call, or a step of one, such as the receipt at the end of an upload."""

    number: int
    name: str
    request: Any
    response: Any = None
    at: float = 0.0  # monotonic seconds


Condition = Callable[[ObservedCall], bool]


def always(call: ObservedCall) -> bool:
    """Return True: every call of the name will do."""
    return True


@dataclass
class CallLog:
    """All observed calls, oldest first."""

    patience_seconds: float  # how long to wait for a call
    calls: list[ObservedCall] = field(default_factory=list)
    is_silent: bool = False  # the last expected call did not come

    def __post_init__(self) -> None:
        self._changed = asyncio.Event()
        # By update and offset: the chunks of an update may arrive in several streams.
        self._chunks = dict[bytes, dict[int, bytes]]()

    def keep_chunk(self, digest: bytes, message: bytes) -> None:
        """Keep a chunk of the update with this digest; those of old updates are dropped."""
        if digest not in self._chunks and len(self._chunks) >= UPDATES_KEPT:
            del self._chunks[next(iter(self._chunks))]
        chunks = self._chunks.setdefault(digest, {})
        with contextlib.suppress(DecodeError):  # the server refuses what is no chunk
            chunks[Chunk.FromString(message).offset_bytes] = message

    def chunks_of(self, digest: bytes) -> list[bytes]:
        """Return the chunks of an update, in order, as they were sent."""
        chunks = self._chunks.get(digest, {})
        return [chunks[offset] for offset in sorted(chunks)]

    def add(self, name: str, request: Any, response: Any = None) -> ObservedCall:
        """Record a call and wake those who wait for one."""
        call = ObservedCall(len(self.calls), name, request, response, time.monotonic())
        self.calls.append(call)
        self._changed.set()
        return call

    @property
    def position(self) -> int:
        """The number of the next call."""
        return len(self.calls)

    def named(self, name: str) -> list[ObservedCall]:
        """Return all calls of a name."""
        return [call for call in self.calls if call.name == name]

    def newest(self, name: str) -> ObservedCall:
        """Return the newest call of a name, which must exist."""
        return next(call for call in reversed(self.calls) if call.name == name)

    def since(self, position: int, names: Collection[str]) -> list[ObservedCall]:
        """Return the calls of these names from a position on."""
        return [call for call in self.calls[position:] if call.name in names]

    async def next(
        self,
        name: str,
        position: int,
        what: str,
        where: Condition = always,
        *,
        forbidden: Collection[str] = (),
        is_forbidden: Condition = always,
        seconds: float | None = None,
    ) -> ObservedCall:
        """Return the first such call from a position on, and wait for it.

        Raises CheckFailed if it does not come in time, or a forbidden call comes first. `what`
        completes "expected …" in the message.
        """
        deadline = time.monotonic() + (seconds or self.patience_seconds)
        while True:
            for call in self.calls[position:]:
                if call.name == name and where(call):
                    return call
                if call.name in forbidden and is_forbidden(call):
                    raise CheckFailed(f"found a call of {call.name}; expected {what}")
                if call.name == "Refused":
                    raise_refusal(call, what)
            position = len(self.calls)
            await self._wait(deadline, what)

    async def quiet(self, name: str, position: int, seconds: float, what: str) -> None:
        """Raise CheckFailed if a call of this name comes within some seconds."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self.since(position, [name]):
                raise CheckFailed(f"found a call of {name}; expected {what}")
            await self._pause(left)

    async def _wait(self, deadline: float, what: str) -> None:
        left = deadline - time.monotonic()
        self.is_silent = left <= 0
        if self.is_silent:
            names = ", ".join(call.name for call in self.calls[-5:]) or "none"
            raise CheckFailed(f"expected {what}; it did not come in time. Last calls: {names}")
        await self._pause(left)

    async def _pause(self, seconds: float) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()


def raise_refusal(call: ObservedCall, what: str) -> None:
    """Raise CheckFailed for a call that the server refused because the client was wrong."""
    raise CheckFailed(f"{call.request} was refused: {call.response}; expected {what}")
