"""The numbers of samples that a client has, and those that its server knows of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fairfleet.common.features import COUNTS
from fairfleet.proto.v1 import fleet_pb2 as pb

T = TypeVar("T")


class SampleCounts:
    """Changed numbers go with the next poll, and with every later Join.

    The Join request holds the present numbers, so an older server learns them when it is joined
    again.
    """

    def __init__(self, join: pb.JoinRequest) -> None:
        self._join = join
        self._known: tuple[str, int, int] = ("", 0, 0)  # the session, and what its server knows

    def set(self, train_samples: int, test_samples: int, joined: pb.JoinResponse) -> None:
        """Note the present numbers.

        Where reports are made private the server is told no numbers, only whether there are data.
        """
        if joined.privacy.HasField("reports"):
            train_samples, test_samples = min(train_samples, 1), min(test_samples, 1)
        self._join.train_samples, self._join.test_samples = train_samples, test_samples

    def joined(self, session: str) -> None:
        """Note that the server knows the present numbers since it opened this session."""
        self._known = self._present(session)

    def tell(self, session: str, joined: pb.JoinResponse, poll: Callable[..., T]) -> T:
        """Poll, with the numbers if they have changed and the server reads them."""
        present = self._present(session)
        _, train_samples, test_samples = present
        if COUNTS not in joined.features or present == self._known:
            return poll(session)
        answer = poll(session, train_samples=train_samples, test_samples=test_samples)
        self._known = present
        return answer

    def _present(self, session: str) -> tuple[str, int, int]:
        return session, self._join.train_samples, self._join.test_samples
