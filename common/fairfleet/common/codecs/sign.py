"""One bit per value, and the mean magnitude of each block.

This scale is the one that loses least. The codec is biased, so use it with error feedback.
"""

from __future__ import annotations

import numpy as np

from fairfleet.common.codecs.base import Buffer, Seed, check_length, fitting_elements
from fairfleet.common.codecs.quantized import LARGEST_VALUE, check_scales, spread
from fairfleet.common.errors import BadRequest
from fairfleet.common.tensors import Vector

BLOCK = 256
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_SIGNS = np.where(_BITS, np.float32(1), np.float32(-1))  # eight signs per byte


class SignCodec:
    """The sign of each value, and one float32 scale per block."""

    name = "sign"
    lossy = True
    is_unbiased = False

    def __init__(self) -> None:
        self.elements_per_chunk = fitting_elements(self.largest)

    def largest(self, elements: int) -> int:
        """Return the largest size of an encoding of `elements` values, in bytes."""
        return 4 * -(-elements // BLOCK) + -(-elements // 8)

    def encode(self, values: Vector, seed: Seed = ()) -> Buffer:
        """Encode finite values, see `Codec.encode`."""
        starts = np.arange(0, len(values), BLOCK)
        # The limit keeps the sum of a block from overflowing.
        magnitudes = np.minimum(np.abs(values), np.float32(LARGEST_VALUE / BLOCK))
        counts = np.minimum(len(values) - starts, BLOCK).astype(np.float32)
        scales = (np.add.reduceat(magnitudes, starts) / counts).astype("<f4")
        bits = np.packbits(values >= 0, bitorder="little")
        return np.concatenate([scales.view(np.uint8), bits]).data

    def decode(self, data: Buffer, out: Vector) -> None:
        """Decode into `out`, see `Codec.decode`."""
        check_length(self.name, data, len(out), self.largest(len(out)))
        scale_bytes = 4 * -(-len(out) // BLOCK)
        scales = np.frombuffer(data[:scale_bytes], "<f4")
        check_scales(self.name, scales)
        self._signs(np.frombuffer(data[scale_bytes:], np.uint8), out)
        spread(out, scales, BLOCK, out)

    def _signs(self, bits: np.ndarray[tuple[int], np.dtype[np.uint8]], out: Vector) -> None:
        eights, rest = divmod(len(out), 8)
        np.take(
            _SIGNS, bits[:eights], axis=0, out=out[: 8 * eights].reshape(eights, 8), mode="clip"
        )
        if rest:
            if bits[-1] >> rest:
                raise BadRequest(
                    f"the unused bits of the last byte in sign are {bits[-1] >> rest:b}; expected 0"
                )
            out[8 * eights :] = _SIGNS[bits[-1], :rest]
