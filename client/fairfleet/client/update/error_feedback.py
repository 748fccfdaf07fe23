"""Error feedback: what a client's updates have lost to their codec is added to the next one.

The residual is on the client's disk. It changes only when an update counts (`PendingVector`), so
nothing is lost or sent twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fairfleet.client.update.pending_vector import PendingVector, VectorWriter
from fairfleet.common.tensors import Signature, Vector

log = logging.getLogger(__name__)


class StoredResidual(PendingVector):
    """The residual of all updates that counted so far, in a file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "residual")

    def of(self, federation: str, signature: Signature, round_number: int) -> Vector | None:
        """Return what to add to the update of this round, or None if there is nothing.

        A residual of this round or a later one is ignored: the federation has started again.
        """
        stored = self.load(federation, signature)
        if stored is None:
            return None
        if stored.round >= round_number:
            log.info(
                "the residual is of round %d and this is round %d: starting without a residual",
                stored.round,
                round_number,
            )
            return None
        return stored.values

    @contextmanager
    def feedback(
        self, federation: str, signature: Signature, round_number: int
    ) -> Iterator[ErrorFeedback]:
        """Provide the error feedback for the update of this round."""
        with self.write_pending(federation, signature, round_number) as writer:
            yield ErrorFeedback(self.of(federation, signature, round_number), writer)


class ErrorFeedback:
    """Error feedback for one update: adds the residual, and records what this update loses."""

    def __init__(self, residual: Vector | None, writer: VectorWriter) -> None:
        self.writer = writer
        self._residual = residual

    def before(self, first: int, values: Vector) -> bytes:
        """Add the residual to a part of the update, in place; `first` is its first element."""
        if self._residual is not None:
            values += self._residual[first : first + len(values)]
        return b""

    def after(self, values: Vector, decoded: Vector) -> None:
        """Record the difference between a part and its decoded form; overwrites `decoded`."""
        self.writer.add(np.subtract(values, decoded, out=decoded))
