"""The values of largest magnitude as in topk; the others as a sign and one magnitude per block.

Small values become zero. This is for rules whose server optimizer gives small values as much
weight as large ones (Adam), because topk alone never sends them. The codec is biased, so use it
with prediction or error feedback. Two bits per value say how it is coded, so the values sent
exactly need no positions.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.codecs.base import BATCH_ELEMENTS, Buffer, Bytes, Seed, fitting_elements
from fairfleet.common.codecs.floats import from_bf16, to_bf16
from fairfleet.common.codecs.quantized import LARGEST_VALUE, as_blocks, check_scales, spread
from fairfleet.common.codecs.topk import largest_positions
from fairfleet.common.errors import BadRequest
from fairfleet.common.tensors import Vector

BLOCK = 256
EXACT = 3  # codes: 0 zero, 1 plus, 2 minus (plus, shifted by a bit), 3 a value of its own
# Values below this fraction of the mean magnitude become zero. It loses least of updates, whose
# distributions have long tails.
THRESHOLD = 0.75

# The four codes in each possible byte.
_CODES = np.arange(256, dtype=np.uint8)[:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
_SIGNS = np.array([0, 1, -1, 0], np.float32)[_CODES]


class TopSignCodec:
    """A fraction of the values as bf16, and the signs of the others with a scale per block."""

    lossy = True
    is_unbiased = False

    def __init__(self, fraction: str) -> None:
        self.name = f"topsign:{fraction}"
        self._fraction = float(fraction)
        self.elements_per_chunk = fitting_elements(self.largest)

    def largest(self, elements: int) -> int:
        """Return the largest size of an encoding of `elements` values, in bytes."""
        return self._size(elements, self._max_exact(elements))

    def _size(self, elements: int, exact: int) -> int:
        return 4 * -(-elements // BLOCK) + -(-elements // 4) + 2 * exact

    def _max_exact(self, elements: int) -> int:
        return math.ceil(self._fraction * elements)

    def encode(self, values: Vector, seed: Seed = ()) -> Buffer:
        """Encode finite values, see `Codec.encode`."""
        positions = largest_positions(values, self._max_exact(len(values)))
        rest = values.copy()
        rest[positions] = 0
        scales, codes = signs_of(rest)
        codes[positions] = EXACT
        return b"".join((scales.data, packed(codes).data, to_bf16(values[positions]).data))

    def decode(self, data: Buffer, out: Vector) -> None:
        """Decode into `out`, see `Codec.decode`."""
        split, end = 4 * -(-len(out) // BLOCK), self._size(len(out), 0)
        if len(data) < end:
            raise BadRequest(
                f"{len(out)} values in {self.name} begin with {end} bytes; "
                f"the chunk has {len(data)}"
            )
        scales, coded = np.frombuffer(data[:split], "<f4"), np.frombuffer(data[split:end], np.uint8)
        check_scales(self.name, scales)
        positions = self._exact_positions(coded, len(out), len(data) - end)
        out[:] = np.take(_SIGNS, coded, axis=0).reshape(-1)[: len(out)]
        spread(out, scales, BLOCK, out)
        exact = np.empty(len(positions), np.float32)
        from_bf16(data[end:], exact)
        out[positions] = exact

    def _exact_positions(self, coded: Bytes, elements: int, value_bytes: int) -> NDArray[np.intp]:
        """Return the positions of the values sent exactly, which take `value_bytes`."""
        if elements % 4 and coded[-1] >> 2 * (elements % 4):
            raise BadRequest(f"the unused bits of the last byte of codes in {self.name} are not 0")
        positions = np.flatnonzero(np.take(_CODES, coded, axis=0).reshape(-1)[:elements] == EXACT)
        if len(positions) > self._max_exact(elements) or value_bytes != 2 * len(positions):
            raise BadRequest(
                f"{self.name} keeps at most {self._max_exact(elements)} of {elements} values, "
                f"with two bytes for each; the chunk names {len(positions)} and has "
                f"{value_bytes} bytes for them"
            )
        return positions


def signs_of(values: Vector) -> tuple[NDArray[np.float32], Bytes]:
    """Return a scale for each block, and the code of each value.

    The scale is the mean of the magnitudes that do not become zero.
    """
    scales, codes = np.empty(-(-len(values) // BLOCK), "<f4"), np.empty(len(values), np.uint8)
    # The limit keeps the sum of a block from overflowing.
    limit = np.float32(LARGEST_VALUE / BLOCK)
    for first in range(0, len(values), BATCH_ELEMENTS):
        part = values[first : first + BATCH_ELEMENTS]
        magnitudes = as_blocks(np.minimum(np.abs(part), limit), BLOCK)
        means = magnitudes.sum(axis=1) / at_least_one(np.count_nonzero(magnitudes, axis=1))
        is_sent = magnitudes > (np.float32(THRESHOLD) * means)[:, None]
        sums = np.einsum("ij,ij->i", magnitudes, is_sent)
        counts = at_least_one(np.count_nonzero(is_sent, axis=1))
        scales[first // BLOCK :][: len(sums)] = sums / counts
        np.left_shift(
            is_sent.reshape(-1)[: len(part)],
            part < 0,
            out=codes[first : first + len(part)],
            dtype=np.uint8,
        )
    return scales, codes


def at_least_one(counts: NDArray[np.intp]) -> NDArray[np.float32]:
    """Return the counts as floats to divide by, with 1 in place of 0."""
    return np.maximum(counts, 1).astype(np.float32)


def packed(codes: Bytes) -> Bytes:
    """Pack four codes into each byte, the lowest bits first. Unused bits are 0."""
    fours = np.zeros(-(-len(codes) // 4) * 4, np.uint8)
    fours[: len(codes)] = codes
    return np.asarray(fours[0::4] | fours[1::4] << 2 | fours[2::4] << 4 | fours[3::4] << 6)
