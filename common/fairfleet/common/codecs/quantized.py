"""Small integers with a scale per block, rounded up or down at random so that the mean is the value itself.

The dither has 16 bits: a value becomes a multiple of 1/65536 of a step, a random number below 65536 is added and the
fraction cut off. That is unbiased to within 2^-17 of a step, and twice as fast as random floats.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.codecs.base import BATCH_ELEMENTS, Buffer, Bytes, Seed, check_length, fitting_elements
from fairfleet.common.errors import BadRequest
from fairfleet.common.tensors import Vector

LARGEST_VALUE = 2.0**126  # what is beyond is cut, so that no product with a scale can overflow
LARGEST_SCALE = 2.0**124  # where the integers are at most 8; for larger ones it is less
SMALLEST_SCALE = 2.0**-100  # a block below that is zero: its reciprocal would overflow
HEADROOM = 1 + 2.0**-20  # so that the block's largest value stays below one step too many, however products round
FRACTION = 1 << 16


class QuantizedCodec:
    lossy = True

    def __init__(self, bits: int, block: int) -> None:
        self.name = f"int{bits}"
        self.block = block
        self.levels = (1 << bits - 1) - 1  # above zero, and as many below
        self._packed = bits == 4
        self.elements_per_chunk = fitting_elements(self.largest)

    def largest(self, elements: int) -> int:
        return self.scale_bytes(elements) + (-(-elements // 2) if self._packed else elements)

    def scale_bytes(self, elements: int) -> int:
        return 4 * -(-elements // self.block)

    def encode(self, values: Vector, seed: Seed = ()) -> Buffer:
        out = np.empty(self.largest(len(values)), np.uint8)
        scale_bytes = self.scale_bytes(len(values))
        scales, codes = out[:scale_bytes].view("<f4"), out[scale_bytes:]
        dither = np.random.SFC64(seed or (0,))
        scratch = np.empty((min(BATCH_ELEMENTS, len(values) + self.block) // self.block, self.block), np.float32)
        for span, blocks in self.batches(len(values)):
            padded = as_blocks(values[span], self.block)
            rounded, scales[blocks] = quantize(padded, self.levels, dither, scratch[: len(padded)])
            self._store(rounded.reshape(-1)[: span.stop - span.start], codes, span.start)
        return out.data

    def decode(self, data: Buffer, out: Vector) -> None:
        check_length(self.name, data, len(out), self.largest(len(out)))
        scale_bytes = self.scale_bytes(len(out))
        scales = np.frombuffer(data[:scale_bytes], "<f4")
        check_scales(self.name, scales, 2.0**127 / (self.levels + 1))
        codes = np.frombuffer(data[scale_bytes:], np.uint8)
        if self._packed:
            unpack_nibbles(codes, out)
            spread(out, scales, self.block, out)
        else:
            spread(codes.view(np.int8), scales, self.block, out)

    def _store(self, rounded: NDArray[np.int32], codes: Bytes, first: int) -> None:
        if self._packed:
            packed = pack_nibbles(rounded)
            codes[first // 2 : first // 2 + len(packed)] = packed
        else:
            codes.view(np.int8)[first : first + len(rounded)] = rounded

    def batches(self, elements: int) -> Iterator[tuple[slice, slice]]:
        for first in range(0, elements, BATCH_ELEMENTS):
            end = min(first + BATCH_ELEMENTS, elements)
            yield slice(first, end), slice(first // self.block, -(-end // self.block))


def quantize(
    blocks: NDArray[np.float32], levels: int, dither: np.random.SFC64, scratch: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Of each row the integers from -levels to levels, and the scale that they are multiples of.

    `scratch` has the shape of `blocks`: fresh memory would cost as much as the arithmetic.
    """
    peaks = np.abs(blocks, out=scratch).max(axis=1)
    if peaks.max() > LARGEST_VALUE:
        blocks = np.clip(blocks, -LARGEST_VALUE, LARGEST_VALUE)
        peaks = np.minimum(peaks, np.float32(LARGEST_VALUE))
    scales = peaks * np.float32(HEADROOM / levels)
    scales[scales < SMALLEST_SCALE] = 0
    factors = np.divide(np.float32(FRACTION), scales, out=np.zeros_like(scales), where=scales > 0)
    np.multiply(blocks, factors[:, None], out=scratch)
    rounded = np.rint(scratch, out=scratch).astype(np.int32)
    rounded += dither.random_raw(rounded.size // 4).view(np.uint16).reshape(rounded.shape)
    rounded >>= 16
    return rounded, scales


def spread(codes: NDArray[np.int8] | Vector, scales: Vector, block: int, out: Vector) -> None:
    """out = codes · scale, block by block: one rounded product each, the same on every machine."""
    whole = len(out) // block
    end = whole * block
    np.multiply(
        codes[:end].reshape(whole, block), scales[:whole, None], out=out[:end].reshape(whole, block), dtype=np.float32
    )
    if end < len(out):
        np.multiply(codes[end:], scales[whole], out=out[end:], dtype=np.float32)


def check_scales(name: str, scales: Vector, largest: float = LARGEST_SCALE) -> None:
    good = ~np.signbit(scales) & (scales <= largest)  # false for NaN, and for a zero that is written in another way
    if not good.all():
        at = int(np.argmin(good))
        raise BadRequest(f"the scale of {name} block {at} is {scales[at]}; expected one from 0 to {largest:g}")


def pack_nibbles(rounded: NDArray[np.int32]) -> Bytes:
    """Two to a byte, the lower half first, each with 8 added; an odd one at the end has a zero beside it."""
    codes = np.zeros(len(rounded) + len(rounded) % 2, np.uint8)
    np.add(rounded, 8, out=codes[: len(rounded)], casting="unsafe")
    packed: Bytes = np.bitwise_or(codes[0::2], codes[1::2] << 4)
    return packed


_PAIRS = np.stack([np.arange(256) % 16 - 8, np.arange(256) // 16 - 8], axis=1).astype(np.float32)
_PAIRS_AS_ONE = _PAIRS.view(np.uint64).reshape(-1)


def unpack_nibbles(codes: Bytes, out: Vector) -> None:
    pairs = len(out) // 2
    np.take(_PAIRS_AS_ONE, codes[:pairs], out=out[: 2 * pairs].view(np.uint64), mode="clip")  # no code is beyond
    if len(out) % 2:
        if codes[-1] > 15:
            raise BadRequest(f"the unused half of the last byte in int4 is {codes[-1] >> 4}; expected 0")
        out[-1] = _PAIRS[codes[-1], 0]


def as_blocks(values: Vector, block: int) -> NDArray[np.float32]:
    if len(values) % block == 0:
        return values.reshape(-1, block)
    padded = np.zeros((-(-len(values) // block), block), np.float32)
    padded.reshape(-1)[: len(values)] = values
    return padded
