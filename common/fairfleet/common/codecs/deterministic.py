"""Deterministic codecs for models: no randomness, and re-encoding decoded values is lossless.

A model that was rounded to such a codec once can be sent in it at any later time, from its values
alone. Every machine that rounds the same values gets the same bits. The codec of the same name
decodes the bytes; proto/FORMAT.md describes the rounding.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.codecs.base import Buffer, Codec, Seed
from fairfleet.common.codecs.floats import Bf16Codec, FloatCodec
from fairfleet.common.codecs.quantized import (
    LARGEST_VALUE,
    SMALLEST_SCALE,
    QuantizedCodec,
    as_blocks,
)
from fairfleet.common.errors import BadRequest, short
from fairfleet.common.tensors import Vector


class SteadyInt8(QuantizedCodec):
    """int8 with powers of two as scales, so that products are exact, and nearest integers.

    A block's largest value is 64 to 127 steps. Rounding keeps it in this range, so encoding again
    gives the same scale.
    """

    def __init__(self) -> None:
        super().__init__(8, block=256)

    def encode(self, values: Vector, seed: Seed = ()) -> Buffer:
        """Encode finite values. The seed has no effect."""
        out = np.empty(self.largest(len(values)), np.uint8)
        scale_bytes = self.scale_bytes(len(values))
        scales, codes = out[:scale_bytes].view("<f4"), out[scale_bytes:].view(np.int8)
        for span, blocks in self.batches(len(values)):
            rounded, scales[blocks] = nearest(as_blocks(values[span], self.block), self.levels)
            codes[span] = rounded.reshape(-1)[: span.stop - span.start]
        return out.data


def nearest(
    blocks: NDArray[np.float32], levels: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the integers from -levels to levels of each row, and the scale of each row.

    The scale is the smallest power of two for which the row fits.
    """
    peaks = np.maximum(blocks.max(axis=1), -blocks.min(axis=1))
    if peaks.max() > LARGEST_VALUE:
        blocks = np.clip(blocks, -LARGEST_VALUE, LARGEST_VALUE)
        peaks = np.minimum(peaks, np.float32(LARGEST_VALUE))
    mantissa, exponent = np.frexp(peaks)
    exponent -= levels.bit_length()
    exponent += mantissa > levels / (levels + 1)
    is_nonzero = peaks >= SMALLEST_SCALE
    exponent[~is_nonzero] = 0  # unused; any value works that does not overflow
    scales, factors = (
        np.where(is_nonzero, np.ldexp(np.float32(1), sign * exponent), np.float32(0))
        for sign in (1, -1)
    )
    return np.rint(blocks * factors[:, None]), scales


STEADY: dict[str, Codec] = {
    codec.name: codec for codec in (FloatCodec("fp16", "<f2"), Bf16Codec(), SteadyInt8())
}


def steady_codec(name: str) -> Codec:
    """Return the deterministic codec of a name. Raises BadRequest if there is none."""
    if name not in STEADY:
        raise BadRequest(
            f"no model can be rounded to {short(name)}; known here: {', '.join(STEADY)}"
        )
    return STEADY[name]


def round_to(codec: Codec, values: Vector) -> None:
    """Round values in place. With a deterministic codec, a second call changes nothing."""
    for first in range(0, len(values), codec.elements_per_chunk):
        part = values[first : first + codec.elements_per_chunk]
        codec.decode(codec.encode(part), part)


def is_exact(codec: Codec, values: Vector) -> bool:
    """Return whether the codec keeps every bit of these values."""
    decoded = np.empty(min(len(values), codec.elements_per_chunk), np.float32)
    for first in range(0, len(values), codec.elements_per_chunk):
        part = values[first : first + codec.elements_per_chunk]
        codec.decode(codec.encode(part), decoded[: len(part)])
        if not np.array_equal(part.view(np.uint32), decoded[: len(part)].view(np.uint32)):
            return False
    return True
