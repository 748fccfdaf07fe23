"""The values of largest magnitude in each chunk, and where they are; all others are zero.

Biased, hence for use with error feedback. Positions can be written as gaps or as a bitmap, and neither way can name a
position twice.
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
SKIP = 255  # as a gap: none of the next 255 elements is kept, and the gap goes on

Positions = NDArray[np.intp]


class TopKCodec:
    lossy = True

    def __init__(self, fraction: str) -> None:
        self.name = f"topk:{fraction}"
        self._fraction = float(fraction)
        self.elements_per_chunk = fitting_elements(self.largest)

    def largest(self, elements: int) -> int:
        return _HEAD.size + 2 * self._kept(elements) + -(-elements // 8)

    def _kept(self, elements: int) -> int:
        return math.ceil(self._fraction * elements)

    def encode(self, values: Vector, seed: Seed = ()) -> Buffer:
        positions = largest_positions(values, self._kept(len(values)))
        form, coded = GAPS, gaps_of(positions)
        if len(coded) > -(-len(values) // 8):
            form, coded = BITMAP, bitmap_of(positions, len(values))
        kept = to_bf16(values[positions]).view(np.uint8)
        return b"".join((_HEAD.pack(form, len(positions)), kept.data, coded.data))

    def decode(self, data: Buffer, out: Vector) -> None:
        if not _HEAD.size <= len(data) <= self.largest(len(out)):
            raise BadRequest(
                f"{len(out)} values in {self.name} take {_HEAD.size} to {self.largest(len(out))} bytes; "
                f"the chunk has {len(data)}"
            )
        form, count = _HEAD.unpack_from(data)
        split = _HEAD.size + 2 * count
        if form not in (GAPS, BITMAP) or count > self._kept(len(out)) or split > len(data):
            raise BadRequest(
                f"a chunk of {len(data)} bytes declares {count} values and positions of form {form}; {self.name} "
                f"keeps at most {self._kept(len(out))} of {len(out)}, and knows forms {GAPS} and {BITMAP}"
            )
        coded = np.frombuffer(data[split:], np.uint8)
        positions = from_gaps(coded, len(out)) if form == GAPS else from_bitmap(coded, len(out))
        if len(positions) != count:
            raise BadRequest(f"a topk chunk declares {count} values; it names {len(positions)} positions")
        kept = np.empty(count, np.float32)
        from_bf16(data[_HEAD.size : split], kept)
        out[:] = 0
        out[positions] = kept


def largest_positions(values: Vector, count: int) -> Positions:
    """Of the `count` largest magnitudes, in order; zeros never, and of equals those that come first."""
    magnitudes = values.view(np.uint32) & np.uint32(0x7FFFFFFF)  # ordered like the magnitudes themselves
    if count >= len(values):
        return np.flatnonzero(magnitudes)
    threshold = np.partition(magnitudes, len(values) - count)[len(values) - count]
    if threshold == 0:
        return np.flatnonzero(magnitudes)
    above = np.flatnonzero(magnitudes > threshold)
    equal = np.flatnonzero(magnitudes == threshold)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def gaps_of(positions: Positions) -> Bytes:
    """How many elements to pass over before each kept one, a byte each, with SKIP as often as a gap needs it."""
    gaps = np.diff(positions, prepend=-1) - 1
    skips = gaps // SKIP
    coded = np.full(len(gaps) + int(skips.sum()), SKIP, np.uint8)
    coded[np.cumsum(skips + 1) - 1] = gaps % SKIP
    return coded


def from_gaps(coded: Bytes, elements: int) -> Positions:
    if len(coded) > -(-elements // 8):
        raise BadRequest(f"the gaps of a topk chunk take {len(coded)} bytes; a bitmap would take {-(-elements // 8)}")
    kept = coded != SKIP
    ends = np.cumsum(coded + kept, dtype=np.intp)
    if len(ends) and (ends[-1] > elements or not kept[-1]):
        raise BadRequest(f"the gaps of a topk chunk lead to element {ends[-1]}; it has {elements}, the last one kept")
    positions: Positions = ends[kept] - 1
    return positions


def bitmap_of(positions: Positions, elements: int) -> Bytes:
    bits = np.zeros(elements, np.bool_)
    bits[positions] = True
    return np.packbits(bits, bitorder="little")


def from_bitmap(coded: Bytes, elements: int) -> Positions:
    if len(coded) != -(-elements // 8) or (elements % 8 and coded[-1] >> elements % 8):
        raise BadRequest(f"the bitmap of a topk chunk has {len(coded)} bytes and does not end at element {elements}")
    return np.flatnonzero(np.unpackbits(coded, count=elements, bitorder="little").view(np.bool_))
