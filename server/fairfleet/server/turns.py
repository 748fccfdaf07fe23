"""One thread at a time with a client's upload, and nobody on the event loop waits for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Work = Callable[[], None]


def at_once(work: Work) -> None:
    work()


class Turn:
    """Shared by all uploads of a client: their files may bear the same name, so what one leaves is cleared away
    before the next begins.
    """

    def __init__(self, later: Callable[[Work], object] = at_once) -> None:
        """`later` does some work in another thread."""
        self._later = later
        self._lock = threading.Lock()
        self._left: deque[Work] = deque()

    @property
    def is_free(self) -> bool:
        return not self._lock.locked() and not self._left

    @contextmanager
    def taken(self) -> Iterator[None]:
        with self._lock:
            while self._left:
                self._left.popleft()()
            yield

    def clear_away(self, work: Work) -> None:
        """Done by whoever takes the turn next, and soon. Does not wait."""
        self._left.append(work)
        self._later(self._clear)

    def _clear(self) -> None:
        with self.taken():
            pass
