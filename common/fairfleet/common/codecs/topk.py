"""The values of largest magnitude in each chunk, and their positions; all others become zero.

The codec is biased, so use it with error feedback. Positions are written as gaps or as a bitmap,
and neither form can name a position twice.
"""

from __future__ import annotations

import math
import struct

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.codecs.base import Buffer, Bytes, Seed, fitting_elements
from fairfleet.common.codecs.floats import from_bf16, to_bf16
from fairfleet.common.errors import BadRequest
from fairfleet.common.tensors import Vector

_HEAD = struct.Struct("<BI")  # form of the positions, number of values kept
GAPS, BITMAP = 0, 1
SKIP = 255  # in a gap: none of the next 255 elements is sent, and the gap continues

Positions = NDArray[np.intp]


class TopKCodec:
    """A fraction of the values, those of largest magnitude, as bf16."""

    lossy = True
    is_unbiased = False

    def __init__(self, fraction: str) -> None:
        self.name = f"topk:{fraction}"
        self._fraction = float(fraction)
        self.elements_per_chunk = fitting_elements(self.largest)

    def largest(self, elements: int) -> int:
        """Return the largest size of an encoding of `elements` values, in bytes."""
        return _HEAD.size + 2 * self._count(elements) + -(-elements // 8)

    def _count(self, elements: int) -> int:
        return math.ceil(self._fraction * elements)

    def encode(self, values: Vector, seed: Seed = ()) -> Buffer:
        """Encode finite values, see `Codec.encode`."""
        positions = largest_positions(values, self._count(len(values)))
        form, coded = GAPS, gaps_of(positions)
        if len(coded) > -(-len(values) // 8):
            form, coded = BITMAP, bitmap_of(positions, len(values))
        sent = to_bf16(values[positions]).view(np.uint8)
        return b"".join((_HEAD.pack(form, len(positions)), sent.data, coded.data))

    def decode(self, data: Buffer, out: Vector) -> None:
        """Decode into `out`, see `Codec.decode`."""
        if not _HEAD.size <= len(data) <= self.largest(len(out)):
            raise BadRequest(
                f"{len(out)} values in {self.name} take {_HEAD.size} to "
                f"{self.largest(len(out))} bytes; the chunk has {len(data)}"
            )
        form, count = _HEAD.unpack_from(data)
        split = _HEAD.size + 2 * count
        if form not in (GAPS, BITMAP) or count > self._count(len(out)) or split > len(data):
            raise BadRequest(
                f"a chunk of {len(data)} bytes declares {count} values and positions of form "
                f"{form}; {self.name} keeps at most {self._count(len(out))} of {len(out)}, "
                f"and knows forms {GAPS} and {BITMAP}"
            )
        coded = np.frombuffer(data[split:], np.uint8)
        positions = from_gaps(coded, len(out)) if form == GAPS else from_bitmap(coded, len(out))
        if len(positions) != count:
            raise BadRequest(
                f"a topk chunk declares {count} values; it names {len(positions)} positions"
            )
        sent = np.empty(count, np.float32)
        from_bf16(data[_HEAD.size : split], sent)
        out[:] = 0
        out[positions] = sent


def largest_positions(values: Vector, count: int) -> Positions:
    """Return the positions of the `count` largest magnitudes, in ascending order.

    Zeros are never included. Among equal magnitudes, the first ones are included.
    """
    # Without the sign bit, the bits of a float32 have the order of the magnitudes.
    magnitudes = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    if count >= len(values):
        return np.flatnonzero(magnitudes)
    threshold = np.partition(magnitudes, len(values) - count)[len(values) - count]
    if threshold == 0:
        return np.flatnonzero(magnitudes)
    above = np.flatnonzero(magnitudes > threshold)
    equal = np.flatnonzero(magnitudes == threshold)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def gaps_of(positions: Positions) -> Bytes:
    """Return the number of elements to skip before each position, one byte each.

    A gap that does not fit a byte starts with as many SKIP bytes as it needs.
    """
    gaps = np.diff(positions, prepend=-1) - 1
    skips = gaps // SKIP
    coded = np.full(len(gaps) + int(skips.sum()), SKIP, np.uint8)
    coded[np.cumsum(skips + 1) - 1] = gaps % SKIP
    return coded


def from_gaps(coded: Bytes, elements: int) -> Positions:
    """Return the positions of gaps. Raises BadRequest if they do not fit the elements."""
    if len(coded) > -(-elements // 8):
        raise BadRequest(
            f"the gaps of a topk chunk take {len(coded)} bytes; "
            f"a bitmap would take {-(-elements // 8)}"
        )
    ends_gap = coded != SKIP
    ends = np.cumsum(coded + ends_gap, dtype=np.intp)
    if len(ends) and (ends[-1] > elements or not ends_gap[-1]):
        raise BadRequest(
            f"the gaps of a topk chunk lead to element {ends[-1]}; it has {elements} elements, "
            "and its gaps must end with a position"
        )
    positions: Positions = ends[ends_gap] - 1
    return positions


def bitmap_of(positions: Positions, elements: int) -> Bytes:
    """Return one bit per element, the lowest bit first: 1 at each position."""
    bits = np.zeros(elements, np.bool_)
    bits[positions] = True
    return np.packbits(bits, bitorder="little")


def from_bitmap(coded: Bytes, elements: int) -> Positions:
    """Return the positions of a bitmap. Raises BadRequest if it has another length."""
    if len(coded) != -(-elements // 8) or (elements % 8 and coded[-1] >> elements % 8):
        raise BadRequest(
            f"the bitmap of a topk chunk has {len(coded)} bytes and does not end at element "
            f"{elements}"
        )
    return np.flatnonzero(np.unpackbits(coded, count=elements, bitorder="little").view(np.bool_))
