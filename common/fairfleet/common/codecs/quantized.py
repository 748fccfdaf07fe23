"""Small integers with a scale per block, rounded at random so that the expected value is exact.

The dither has 16 bits: a value becomes a multiple of 1/65536 of a step, a random number below
65536 is added, and the fraction is cut off. That is unbiased to within 2^-17 of a step, and twice
as fast as random floats.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.codecs.base import (
    BATCH_ELEMENTS,
    Buffer,
    Bytes,
    Seed,
    check_length,
    fitting_elements,
)
from fairfleet.common.errors import BadRequest
from fairfleet.common.tensors import Vector

LARGEST_VALUE = 2.0**126  # larger values are clipped, so that no product with a scale overflows
LARGEST_SCALE = 2.0**124  # for integers up to 8; the limit is lower for larger integers
SMALLEST_SCALE = 2.0**-100  # a block below it becomes zero, because its reciprocal would overflow
# Makes a scale slightly larger, so that the largest value never rounds up to one level too many.
HEADROOM = 1 + 2.0**-20
FRACTION = 1 << 16


class QuantizedCodec:
    """Signed integers of 4 or 8 bits, with one float32 scale per block of values."""

    lossy = is_unbiased = True

    def __init__(self, bits: int, block: int) -> None:
        self.name = f"int{bits}"
        self.block = block
        self.levels = (1 << bits - 1) - 1  # above zero, and as many below
        self._packed = bits == 4
        self.elements_per_chunk = fitting_elements(self.largest)

    def largest(self, elements: int) -> int:
        """Return the largest size of an encoding of `elements` values, in bytes."""
        return self.scale_bytes(elements) + (-(-elements // 2) if self._packed else elements)

    def scale_bytes(self, elements: int) -> int:
        """Return the size of the scales, which precede the integers."""
        return 4 * -(-elements // self.block)

    def encode(self, values: Vector, seed: Seed = ()) -> Buffer:
        """Encode finite values, see `Codec.encode`."""
        out = np.empty(self.largest(len(values)), np.uint8)
        scale_bytes = self.scale_bytes(len(values))
        scales, codes = out[:scale_bytes].view("<f4"), out[scale_bytes:]
        dither = np.random.SFC64(seed or (0,))
        scratch = np.empty(
            (min(BATCH_ELEMENTS, len(values) + self.block) // self.block, self.block), np.float32
        )
        for span, blocks in self.batches(len(values)):
            padded = as_blocks(values[span], self.block)
            rounded, scales[blocks] = quantize(padded, self.levels, dither, scratch[: len(padded)])
            self._store(rounded.reshape(-1)[: span.stop - span.start], codes, span.start)
        return out.data

    def decode(self, data: Buffer, out: Vector) -> None:
        """Decode into `out`, see `Codec.decode`."""
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
        """Yield the elements and the blocks to process together."""
        for first in range(0, elements, BATCH_ELEMENTS):
            end = min(first + BATCH_ELEMENTS, elements)
            yield slice(first, end), slice(first // self.block, -(-end // self.block))


def quantize(
    blocks: NDArray[np.float32], levels: int, dither: np.random.SFC64, scratch: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the integers from -levels to levels of each row, and the scale of each row.

    `scratch` has the shape of `blocks`. Fresh memory would cost as much as the arithmetic.
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
    """Compute out = codes * scale, block by block.

    Each value is one rounded product, the same on every machine.
    """
    full_blocks = len(out) // block
    end = full_blocks * block
    np.multiply(
        codes[:end].reshape(full_blocks, block),
        scales[:full_blocks, None],
        out=out[:end].reshape(full_blocks, block),
        dtype=np.float32,
    )
    if end < len(out):
        np.multiply(codes[end:], scales[full_blocks], out=out[end:], dtype=np.float32)


def check_scales(name: str, scales: Vector, largest: float = LARGEST_SCALE) -> None:
    """Raise BadRequest if a scale is negative, too large or NaN."""
    # The sign bit also refuses a negative zero: a zero has only one valid encoding.
    is_valid = ~np.signbit(scales) & (scales <= largest)
    if not is_valid.all():
        block = int(np.argmin(is_valid))
        raise BadRequest(
            f"the scale of {name} block {block} is {scales[block]}; "
            f"expected one from 0 to {largest:g}"
        )


def pack_nibbles(rounded: NDArray[np.int32]) -> Bytes:
    """Pack two integers into each byte, the lower half first, each with 8 added.

    If the number of integers is odd, the upper half of the last byte is zero.
    """
    codes = np.zeros(len(rounded) + len(rounded) % 2, np.uint8)
    np.add(rounded, 8, out=codes[: len(rounded)], casting="unsafe")
    packed: Bytes = np.bitwise_or(codes[0::2], codes[1::2] << 4)
    return packed


_PAIRS = np.stack([np.arange(256) % 16 - 8, np.arange(256) // 16 - 8], axis=1).astype(np.float32)
_PAIRS_AS_UINT64 = _PAIRS.view(np.uint64).reshape(-1)


def unpack_nibbles(codes: Bytes, out: Vector) -> None:
    """Fill `out` with the integers that `pack_nibbles` packed.

    Raises BadRequest if the unused half of the last byte is not zero.
    """
    pairs = len(out) // 2
    # The table has an entry for every byte, so the fast mode "clip" never clips.
    np.take(_PAIRS_AS_UINT64, codes[:pairs], out=out[: 2 * pairs].view(np.uint64), mode="clip")
    if len(out) % 2:
        if codes[-1] > 15:
            raise BadRequest(
                f"the unused half of the last byte in int4 is {codes[-1] >> 4}; expected 0"
            )
        out[-1] = _PAIRS[codes[-1], 0]


def as_blocks(values: Vector, block: int) -> NDArray[np.float32]:
    """Return the values as rows of `block` values. The last row is padded with zeros."""
    if len(values) % block == 0:
        return values.reshape(-1, block)
    padded = np.zeros((-(-len(values) // block), block), np.float32)
    padded.reshape(-1)[: len(values)] = values
    return padded
