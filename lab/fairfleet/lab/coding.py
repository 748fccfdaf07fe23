"""Updates on their way through a codec, with error feedback or prediction, and what the server loses of them by it.

The codec draws from a generator of its own, seeded by the client's plan: two runs that differ in their codec alone
ask the same clients and draw the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.codecs import codec_named, is_predicted, roundtrip
from fairfleet.common.tensors import Vector
from fairfleet.lab.cohort import Rows

Products = NDArray[np.float32]


class Coded(NamedTuple):
    """What became of one round's updates. The truth is what was trained, before residual and codec."""

    update_bytes: float  # mean over the clients
    gram_error: float  # of the inner products, relative to the true ones: Frobenius norms
    flipped: float | None  # share of pairs that conflict (product below zero) only before, or only after; None: no pair


class Coding:
    """One codec for everybody, as the server's policy has it."""

    def __init__(self, codec: str, error_feedback: bool, prediction: bool = True) -> None:
        self.codec, self.error_feedback = codec, error_feedback
        self.lossy, self.predicts = codec_named(codec).lossy, prediction and is_predicted(codec)
        self.carried: dict[str, Vector] = {}  # by client: its last update, or else what its updates have lost so far

    def send(self, clients: Sequence[str], rows: Rows, seeds: Sequence[int]) -> Coded | None:
        """Overwrites the rows with what the server decodes; None where that is what they are."""
        if not self.lossy:
            return None
        trained = rows @ rows.T
        sizes = [self._send(*one) for one in zip(clients, rows, seeds, strict=True)]
        return Coded(float(np.mean(sizes)), *compared(trained, rows @ rows.T))

    def _send(self, client: str, row: Vector, seed: int) -> int:
        carried = self.carried.get(client)
        if self.predicts:
            sent = roundtrip(self.codec, row, seed, carried)
            self.carried[client] = sent.decoded
        else:
            if carried is not None:
                row += carried
            sent = roundtrip(self.codec, row, seed)
            if self.error_feedback:
                self.carried[client] = row - sent.decoded
        row[:] = sent.decoded
        return sent.encoded_bytes


def compared(trained: Products, decoded: Products) -> tuple[float, float | None]:
    """The relative error of the Gram matrix, and the share of flipped conflict signs."""
    length = float(np.linalg.norm(trained))
    error = float(np.linalg.norm(decoded - trained)) / length if length else 0.0
    pairs = np.triu_indices(len(trained), 1)
    flips = (trained[pairs] < 0) != (decoded[pairs] < 0)
    return error, float(flips.mean()) if len(flips) else None
