"""Delay Ctrl-C and other stop signals until the end of a round, where a checkpoint is possible.

The first signal waits for the end of the round. A second one takes effect at once, because a round
may be long.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopIfSignalled(Protocol):
    """A function that delivers a delayed signal."""

    def __call__(self, *, before: Callable[[], None]) -> None:
        """Call `before` and stop as the signal would have; do nothing if no signal arrived."""


@contextmanager
def delay_signals() -> Iterator[StopIfSignalled]:
    """Delay stop signals until the yielded function is called, or until the block ends."""
    received: list[int] = []
    original_handlers = _handlers()

    def _handle(number: int, frame: FrameType | None) -> None:
        if received:
            original_handlers[number](number, frame)
        received.append(number)
        print("stopping after this round; repeat to stop at once", file=sys.stderr)

    def _stop_if_signalled(*, before: Callable[[], None]) -> None:
        if received:
            before()
            original_handlers[received[0]](received[0], None)

    for number in original_handlers:
        signal.signal(number, _handle)
    try:
        yield _stop_if_signalled
    finally:
        for number, handler in original_handlers.items():
            signal.signal(number, handler)
    if received:  # The signal arrived after the last call, for example in a round that failed.
        original_handlers[received[0]](received[0], None)


def _handlers() -> dict[int, Callable[[int, FrameType | None], object]]:
    """Return the handlers of the signals that stop the process by an exception.

    Only the main thread may set signal handlers, so other threads get none.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    return {number: handler for number, handler in handlers.items() if callable(handler)}
