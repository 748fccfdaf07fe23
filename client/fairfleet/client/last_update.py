"""The client's last update that counted, as the server decoded it: the base that the next one is told by.

Which one the server holds it says with every task, by its digest; a client that has another one sends its update whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fairfleet.client.carried import Carried, Writing
from fairfleet.common.codecs.prediction import fitting_scales, predicted
from fairfleet.common.tensors import Signature, Vector


class LastUpdate(Carried):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "last")

    def of(self, federation: str, signature: Signature, digest: bytes) -> Vector | None:
        """Of this very update; None also where it was all zeros, which nothing can be told by."""
        kept = self.kept(federation, signature)
        return kept.values if kept and kept.digest == digest else None

    @contextmanager
    def turn(self, federation: str, signature: Signature, round: int, digest: bytes) -> Iterator[Turn]:
        """`digest` is that of the update that the server holds, empty where it holds none."""
        with self.writing(federation, signature, round) as writing:
            yield Turn(self.of(federation, signature, digest), writing)


class Turn:
    """One update: told by its base, if there is one, and kept as it arrives."""

    def __init__(self, base: Vector | None, writing: Writing) -> None:
        self.writing, self.base = writing, base
        self._predicted: Vector | None = None

    def before(self, first: int, values: Vector) -> bytes:
        if self.base is None:
            return b""
        part = self.base[first : first + len(values)]
        scales = fitting_scales(values, part)
        self._predicted = predicted(scales, part)
        values -= self._predicted
        return scales

    def after(self, values: Vector, decoded: Vector) -> None:
        if self._predicted is not None:
            decoded += self._predicted
        self.writing.add(decoded)
