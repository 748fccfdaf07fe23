"""The client's last update that counted, as the server decoded it: the base of the next one.

The next update is delta-coded against this base. With every task, the server names the base that
it has by its digest. A client that has another one sends its update without a base.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fairfleet.client.update.pending_vector import PendingVector, VectorWriter
from fairfleet.common.codecs.prediction import fitting_scales, predicted
from fairfleet.common.tensors import Signature, Vector


class LastUpdate(PendingVector):
    """The last update that counted, in a file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "last")

    def of(self, federation: str, signature: Signature, digest: bytes) -> Vector | None:
        """Return the values of the update with this digest.

        Return None if another update is stored, or if it was all zeros: zeros predict nothing.
        """
        stored = self.load(federation, signature)
        return stored.values if stored and stored.digest == digest else None

    @contextmanager
    def prediction(
        self, federation: str, signature: Signature, round_number: int, digest: bytes
    ) -> Iterator[Prediction]:
        """Provide the prediction for the update of this round.

        `digest` is that of the update that the server has as base; empty if it has none.
        """
        with self.write_pending(federation, signature, round_number) as writer:
            yield Prediction(self.of(federation, signature, digest), writer)


class Prediction:
    """Prediction for one update: subtracts the base, and records the update as it arrives."""

    def __init__(self, base: Vector | None, writer: VectorWriter) -> None:
        self.writer, self.base = writer, base
        self._predicted: Vector | None = None

    def before(self, first: int, values: Vector) -> bytes:
        """Subtract the prediction from a part, in place, and return the encoded scales."""
        if self.base is None:
            return b""
        part = self.base[first : first + len(values)]
        scales = fitting_scales(values, part)
        self._predicted = predicted(scales, part)
        values -= self._predicted
        return scales

    def after(self, values: Vector, decoded: Vector) -> None:
        """Record a part as the server decodes it; overwrites `decoded`."""
        if self._predicted is not None:
            decoded += self._predicted
        self.writer.add(decoded)
