"""What a client's updates have lost to their codec so far, to be added to the next one: error feedback."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fairfleet.client.carried import Carried, Writing
from fairfleet.common.tensors import Signature, Vector

log = logging.getLogger(__name__)


class Residual(Carried):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "residual")

    def of(self, federation: str, signature: Signature, round: int) -> Vector | None:
        """What to add to the update of this round. None of a federation that began anew."""
        kept = self.kept(federation, signature)
        if kept is None:
            return None
        if kept.round >= round:
            log.info("the residual is of round %d, this is round %d: begun anew", kept.round, round)
            return None
        return kept.values

    @contextmanager
    def turn(self, federation: str, signature: Signature, round: int) -> Iterator[Turn]:
        with self.writing(federation, signature, round) as writing:
            yield Turn(self.of(federation, signature, round), writing)


class Turn:
    """One update: takes the residual along, and writes down what is lost this time."""

    def __init__(self, residual: Vector | None, writing: Writing) -> None:
        self.writing = writing
        self._residual = residual

    def before(self, first: int, values: Vector) -> bytes:
        if self._residual is not None:
            values += self._residual[first : first + len(values)]
        return b""

    def after(self, values: Vector, decoded: Vector) -> None:
        self.writing.add(np.subtract(values, decoded, out=decoded))
