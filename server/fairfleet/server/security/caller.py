"""The identity behind the current call, and the open calls of each identity, which can be ended.

Identities come from certificates. Without TLS no peer proves who it is: then there is no identity,
and no call is refused because of one. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fairfleet.common.errors import NotAllowed, Revoked
from fairfleet.common.pki.identity import Identity, Role

# A peer that does not read gets this long to take the message in flight and then the refusal.
CUT_SECONDS = 5.0

caller: ContextVar[Identity | None] = ContextVar("caller", default=None)


def check_speaks_for(client: str, what: str) -> None:
    """Raise NotAllowed unless the caller's certificate names this client.

    A certificate speaks for no other client, even if its owner knows that client's secrets.
    """
    who = caller.get()
    if who is not None and who != Identity(Role.CLIENT, client):
        raise NotAllowed(
            f"{who} cannot speak for another: {what}. A certificate is valid for its own name only."
        )


class Call:
    """One open call, and what is needed to end it."""

    def __init__(self) -> None:
        self.task = asyncio.current_task()
        # False while gRPC sends a message: our code would not notice a cancellation then.
        self.at_work = True
        self.ended: str | None = None

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Wrap the `yield` of a message; raise Revoked after it if the call was ended meanwhile."""
        self.at_work = False
        yield
        self.at_work = True
        if self.ended is not None:
            raise Revoked(self.ended)


class OpenCalls:
    """All open calls by identity, so that a revocation can end them."""

    def __init__(self) -> None:
        self._calls: defaultdict[Identity, set[Call]] = defaultdict(set)

    @contextmanager
    def of(self, who: Identity) -> Iterator[Call]:
        """Register a call while the block runs; if it is ended, the block fails with Revoked."""
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
        """End all calls of this identity, except the one that runs this method."""
        calls = [
            call for call in self._calls.get(who, ()) if call.task is not asyncio.current_task()
        ]
        for call in calls:
            call.ended = why
        for task in {call.task for call in calls if call.task and call.at_work}:
            task.cancel()
        asyncio.get_running_loop().call_later(CUT_SECONDS, self._cut, who, calls)

    def _cut(self, who: Identity, ended: list[Call]) -> None:
        """Cancel those of the ended calls that are still open."""
        still_open = self._calls.get(who, set())
        for task in {call.task for call in ended if call.task and call in still_open}:
            task.cancel()
