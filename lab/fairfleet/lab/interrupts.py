"""Ctrl-C and other signals to end, heard between two rounds: there a simulation can be kept and taken up again.

The first is put off until the round is over; a second one is not, since a round may be long.
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


class EndIfAsked(Protocol):
    def __call__(self, *, before: Callable[[], None]) -> None:
        """Ends as the signal would have, after doing this; does nothing where none came."""


@contextmanager
def put_off() -> Iterator[EndIfAsked]:
    """While it lasts, a signal to end waits for the next call of what this yields, or for the end."""
    asked: list[int] = []
    usual = _handlers()

    def hear(number: int, frame: FrameType | None) -> None:
        if asked:
            usual[number](number, frame)
        asked.append(number)
        print("stopping after this round; once more stops at once", file=sys.stderr)

    def end_if_asked(*, before: Callable[[], None]) -> None:
        if asked:
            before()
            usual[asked[0]](asked[0], None)

    for number in usual:
        signal.signal(number, hear)
    try:
        yield end_if_asked
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    if asked:  # after the last call: in a round that failed, say
        usual[asked[0]](asked[0], None)


def _handlers() -> dict[int, Callable[[int, FrameType | None], object]]:
    """Of the signals that would end us by an exception. Only the main thread may ask for them."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in SIGNALS}
    return {number: handler for number, handler in found.items() if callable(handler)}
