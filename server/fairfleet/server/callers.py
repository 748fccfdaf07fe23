"""Who calls: the identity behind the call under way, and all calls of an identity, which can be ended at once.

In the clear nobody proves who they are: then there is no identity, and nothing is refused for its sake.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fairfleet.common.errors import NotAllowed, Revoked
from fairfleet.common.identity import Identity, Role

CUT_SECONDS = 5.0  # for a peer that does not read to take the message that is on its way, and then the refusal

caller: ContextVar[Identity | None] = ContextVar("caller", default=None)


def check_speaks_for(client: str, what: str) -> None:
    """A certificate speaks for the client that it names and for no other, whatever it knows of that one."""
    who = caller.get()
    if who is not None and who != Identity(Role.CLIENT, client):
        raise NotAllowed(f"{who} cannot speak for another: {what}. A certificate is good for its own name only.")


class Call:
    """One call under way, as the one who may have to end it sees it."""

    def __init__(self) -> None:
        self.task = asyncio.current_task()
        self.at_work = True  # in our code; else gRPC is sending a message, and nothing of ours would notice the end
        self.ended: str | None = None

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Round the `yield` of a message."""
        self.at_work = False
        yield
        self.at_work = True
        if self.ended is not None:
            raise Revoked(self.ended)


class OpenCalls:
    def __init__(self) -> None:
        self._calls: defaultdict[Identity, set[Call]] = defaultdict(set)

    @contextmanager
    def of(self, who: Identity) -> Iterator[Call]:
        """The call is open for as long as the block runs; if it is ended meanwhile, the block fails with Revoked."""
        call = Call()
        self._calls[who].add(call)
        try:
            yield call
        except asyncio.CancelledError:
            if call.ended is None or call.task is None:
                raise
            call.task.uncancel()
            raise Revoked(call.ended) from None
        finally:
            self._calls[who].discard(call)
            if not self._calls[who]:
                del self._calls[who]

    def end(self, who: Identity, why: str) -> None:
        """All of them, but the one that asks for it."""
        calls = [call for call in self._calls.get(who, ()) if call.task is not asyncio.current_task()]
        for call in calls:
            call.ended = why
        for task in {call.task for call in calls if call.task and call.at_work}:
            task.cancel()
        asyncio.get_running_loop().call_later(CUT_SECONDS, self._cut, who, calls)

    def _cut(self, who: Identity, ended: list[Call]) -> None:
        left = self._calls.get(who, set())
        for task in {call.task for call in ended if call.task and call in left}:
            task.cancel()
