"""A lock for the uploads of one client, on which the event loop never waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Work = Callable[[], None]


def at_once(work: Work) -> None:
    """Run the work in this thread, now."""
    work()


class UploadLock:
    """Lets one thread at a time work on the uploads of a client.

    All uploads of a client share it: their files may have the same name, so the files of one are
    removed before the next begins.
    """

    def __init__(self, later: Callable[[Work], object] = at_once) -> None:
        """`later` runs work in another thread."""
        self._later = later
        self._lock = threading.Lock()
        self._pending: deque[Work] = deque()

    @property
    def is_free(self) -> bool:
        """Whether the lock can be taken without waiting."""
        return not self._lock.locked() and not self._pending

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the lock while the block runs, after doing the pending work."""
        with self._lock:
            while self._pending:
                self._pending.popleft()()
            yield

    def clear_away(self, work: Work) -> None:
        """Leave work to the next holder of the lock, and take the lock soon. Does not wait."""
        self._pending.append(work)
        self._later(self._clear)

    def _clear(self) -> None:
        with self.taken():
            pass
