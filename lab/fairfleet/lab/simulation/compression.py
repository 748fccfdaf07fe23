"""Pass simulated updates through a codec, with error feedback or prediction, and measure the loss.

The codec draws from its own generator, seeded by the client's plan: two runs that differ only in
their codec select the same clients and draw the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.codecs import (
    FeedbackSetting,
    codec_named,
    is_predicted,
    roundtrip,
    uses_error_feedback,
)
from fairfleet.common.tensors import Vector
from fairfleet.lab.simulation.trainer import Rows

Products = NDArray[np.float32]


class CompressionLoss(NamedTuple):
    """What a codec did to the updates of one round.

    The true updates are the trained ones, before error feedback and codec.
    """

    update_bytes: float  # mean over the clients
    gram_error: float  # of the inner products, relative to the true ones: Frobenius norms
    # Share of pairs that conflict (product below zero) only before, or only after; None: no pair.
    flipped: float | None


class UpdateCoder:
    """Codes the updates of all clients with the same codec, as the server's policy does."""

    def __init__(
        self, codec: str, error_feedback: FeedbackSetting, prediction: bool = True
    ) -> None:
        self.codec, self.error_feedback = codec, uses_error_feedback(error_feedback, codec)
        self.lossy, self.predicts = codec_named(codec).lossy, prediction and is_predicted(codec)
        # By client: its last decoded update with prediction, the residual with error feedback.
        self.memory: dict[str, Vector] = {}

    def send(
        self, clients: Sequence[str], rows: Rows, seeds: Sequence[int]
    ) -> CompressionLoss | None:
        """Replace the rows by what the server decodes; return None if the codec loses nothing."""
        if not self.lossy:
            return None
        trained = rows @ rows.T
        sizes = [
            self._send(client, row, seed)
            for client, row, seed in zip(clients, rows, seeds, strict=True)
        ]
        return CompressionLoss(float(np.mean(sizes)), *compare_products(trained, rows @ rows.T))

    def _send(self, client: str, row: Vector, seed: int) -> int:
        """Replace one row, and return its encoded size in bytes."""
        earlier = self.memory.get(client)
        if self.predicts:
            sent = roundtrip(self.codec, row, seed, earlier)
            self.memory[client] = sent.decoded
        else:
            if earlier is not None:
                row += earlier
            sent = roundtrip(self.codec, row, seed)
            if self.error_feedback:
                self.memory[client] = row - sent.decoded
        row[:] = sent.decoded
        return sent.encoded_bytes


def compare_products(trained: Products, decoded: Products) -> tuple[float, float | None]:
    """Return the relative error of the Gram matrix, and the share of flipped conflict signs."""
    length = float(np.linalg.norm(trained))
    error = float(np.linalg.norm(decoded - trained)) / length if length else 0.0
    pairs = np.triu_indices(len(trained), 1)
    flips = (trained[pairs] < 0) != (decoded[pairs] < 0)
    return error, float(flips.mean()) if len(flips) else None
