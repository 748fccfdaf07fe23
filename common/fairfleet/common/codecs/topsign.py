"""The values of largest magnitude as in topk; of all others the sign and one magnitude for each block, or zero.

For rules whose server optimizer weighs small values like large ones (Adam): topk alone never tells them. Biased, hence
for use with prediction or error feedback. Two bits say what becomes of a value, so kept ones need no positions.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.codecs.base import BATCH_ELEMENTS, Buffer, Bytes, Seed, fitting_elements
from fairfleet.common.codecs.floats import from_bf16, to_bf16
from fairfleet.common.codecs.quantized import LARGEST_VALUE, as_blocks, check_scales, spread
from fairfleet.common.codecs.sparse import largest_positions
from fairfleet.common.errors import BadRequest
from fairfleet.common.tensors import Vector

BLOCK = 256
KEPT = 3  # codes: 0 zero, 1 plus, 2 minus (plus, shifted by a bit), 3 a value of its own
THRESHOLD = 0.75  # of the mean magnitude: what is below is told as zero. Loses least of updates, which have long tails

_CODES = np.arange(256, dtype=np.uint8)[:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3  # four to a byte
_SIGNS = np.array([0, 1, -1, 0], np.float32)[_CODES]


class TopSignCodec:
    lossy = True

    def __init__(self, fraction: str) -> None:
        self.name = f"topsign:{fraction}"
        self._fraction = float(fraction)
        self.elements_per_chunk = fitting_elements(self.largest)

    def largest(self, elements: int) -> int:
        return self._size(elements, self._most_kept(elements))

    def _size(self, elements: int, kept: int) -> int:
        return 4 * -(-elements // BLOCK) + -(-elements // 4) + 2 * kept

    def _most_kept(self, elements: int) -> int:
        return math.ceil(self._fraction * elements)

    def encode(self, values: Vector, seed: Seed = ()) -> Buffer:
        positions = largest_positions(values, self._most_kept(len(values)))
        rest = values.copy()
        rest[positions] = 0
        scales, codes = signs_of(rest)
        codes[positions] = KEPT
        return b"".join((scales.data, packed(codes).data, to_bf16(values[positions]).data))

    def decode(self, data: Buffer, out: Vector) -> None:
        split, end = 4 * -(-len(out) // BLOCK), self._size(len(out), 0)
        if len(data) < end:
            raise BadRequest(f"{len(out)} values in {self.name} begin with {end} bytes; the chunk has {len(data)}")
        scales, coded = np.frombuffer(data[:split], "<f4"), np.frombuffer(data[split:end], np.uint8)
        check_scales(self.name, scales)
        if len(out) % 4 and coded[-1] >> 2 * (len(out) % 4):
            raise BadRequest(f"the unused bits of the last byte of codes in {self.name} are not 0")
        positions = np.flatnonzero(np.take(_CODES, coded, axis=0).reshape(-1)[: len(out)] == KEPT)
        if len(positions) > self._most_kept(len(out)) or len(data) != end + 2 * len(positions):
            raise BadRequest(
                f"{self.name} keeps at most {self._most_kept(len(out))} of {len(out)} values, with two bytes for each; "
                f"the chunk names {len(positions)} and has {len(data) - end} bytes for them"
            )
        out[:] = np.take(_SIGNS, coded, axis=0).reshape(-1)[: len(out)]
        spread(out, scales, BLOCK, out)
        kept = np.empty(len(positions), np.float32)
        from_bf16(data[end:], kept)
        out[positions] = kept


def signs_of(values: Vector) -> tuple[NDArray[np.float32], Bytes]:
    """A scale for each block, the mean of the magnitudes that are not told as zero, and the code of each value."""
    scales, codes = np.empty(-(-len(values) // BLOCK), "<f4"), np.empty(len(values), np.uint8)
    for first in range(0, len(values), BATCH_ELEMENTS):
        part = values[first : first + BATCH_ELEMENTS]
        magnitudes = as_blocks(np.minimum(np.abs(part), np.float32(LARGEST_VALUE / BLOCK)), BLOCK)  # for their sums
        means = magnitudes.sum(axis=1) / at_least_one(np.count_nonzero(magnitudes, axis=1))
        told = magnitudes > (np.float32(THRESHOLD) * means)[:, None]
        sums = np.einsum("ij,ij->i", magnitudes, told)
        scales[first // BLOCK :][: len(sums)] = sums / at_least_one(np.count_nonzero(told, axis=1))
        np.left_shift(told.reshape(-1)[: len(part)], part < 0, out=codes[first : first + len(part)], dtype=np.uint8)
    return scales, codes


def at_least_one(counts: NDArray[np.intp]) -> NDArray[np.float32]:
    return np.maximum(counts, 1).astype(np.float32)


def packed(codes: Bytes) -> Bytes:
    """Four to a byte, the lowest bits first; those behind the last are 0."""
    fours = np.zeros(-(-len(codes) // 4) * 4, np.uint8)
    fours[: len(codes)] = codes
    return np.asarray(fours[0::4] | fours[1::4] << 2 | fours[2::4] << 4 | fours[3::4] << 6)
