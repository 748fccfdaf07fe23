"""The values of largest magnitude as in topk, and of all others the sign, with their mean magnitude in each block.

For rules whose server optimizer weighs small values like large ones (Adam): topk alone never tells them. Biased, hence
for use with prediction or error feedback.
"""

from __future__ import annotations

import numpy as np

from fairfleet.common.codecs.base import Buffer, Seed, fitting_elements
from fairfleet.common.codecs.signs import BLOCK, SignCodec, block_lengths, encode_signs
from fairfleet.common.codecs.sparse import TopKCodec
from fairfleet.common.errors import BadRequest
from fairfleet.common.tensors import Vector


class TopSignCodec:
    lossy = True

    def __init__(self, fraction: str) -> None:
        self.name = f"topsign:{fraction}"
        self._top, self._signs = TopKCodec(fraction), SignCodec()
        self.elements_per_chunk = fitting_elements(self.largest)

    def largest(self, elements: int) -> int:
        return self._signs.largest(elements) + self._top.largest(elements)

    def encode(self, values: Vector, seed: Seed = ()) -> Buffer:
        positions = self._top.chosen(values)
        rest = values.copy()
        rest[positions] = 0
        lengths = block_lengths(len(values))
        counts = lengths - np.bincount(positions // BLOCK, minlength=len(lengths))
        return b"".join((encode_signs(rest, counts), self._top.write(values, positions)))

    def decode(self, data: Buffer, out: Vector) -> None:
        ahead = self._signs.largest(len(out))
        if len(data) < ahead:
            raise BadRequest(f"{len(out)} values in {self.name} begin with {ahead} bytes; the chunk has {len(data)}")
        self._signs.decode(data[:ahead], out)
        positions, kept = self._top.read(data[ahead:], len(out))
        if np.signbit(out[positions]).any():
            raise BadRequest(f"a value that {self.name} keeps has a second sign; the bits of kept values are 1")
        out[positions] = kept
