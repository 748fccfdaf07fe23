"""Codecs that write each value as one floating-point number: raw32, fp16 and bf16.

Values beyond the range of the type are clipped to its largest number, so that no infinity is sent.
"""

from __future__ import annotations

import numpy as np

from fairfleet.common.codecs.base import Buffer, Seed, check_length, fitting_elements
from fairfleet.common.tensors import Vector

BF16_LARGEST = np.array([0x7F7F0000], np.uint32).view(np.float32)[0]


class FloatCodec:
    """Little-endian IEEE floats of any width."""

    def __init__(self, name: str, dtype: str) -> None:
        self.name = name
        self._dtype = np.dtype(dtype)
        self._largest = float(np.finfo(self._dtype).max)
        self.lossy = self._dtype.itemsize < 4
        self.is_unbiased = not self.lossy  # it rounds to nearest, the same way every time
        self.elements_per_chunk = fitting_elements(self.largest)

    def encode(self, values: Vector, seed: Seed = ()) -> Buffer:
        """Encode finite values, see `Codec.encode`."""
        if self.lossy:
            values = np.clip(values, -self._largest, self._largest)
        return values.astype(self._dtype, copy=False).view(np.uint8).data

    def decode(self, data: Buffer, out: Vector) -> None:
        """Decode into `out`, see `Codec.decode`."""
        check_length(self.name, data, len(out), self.largest(len(out)))
        np.copyto(out, np.frombuffer(data, self._dtype))

    def largest(self, elements: int) -> int:
        """Return the largest size of an encoding of `elements` values, in bytes."""
        return elements * self._dtype.itemsize


class Bf16Codec:
    """The upper 16 bits of a float32, rounded to nearest, ties to even.

    It has the range of float32 and 8 bits of precision.
    """

    name = "bf16"
    lossy = True
    is_unbiased = False

    def __init__(self) -> None:
        self.elements_per_chunk = fitting_elements(self.largest)

    def encode(self, values: Vector, seed: Seed = ()) -> Buffer:
        """Encode finite values, see `Codec.encode`."""
        return to_bf16(values).view(np.uint8).data

    def decode(self, data: Buffer, out: Vector) -> None:
        """Decode into `out`, see `Codec.decode`."""
        check_length(self.name, data, len(out), self.largest(len(out)))
        from_bf16(data, out)

    def largest(self, elements: int) -> int:
        """Return the largest size of an encoding of `elements` values, in bytes."""
        return 2 * elements


def to_bf16(values: Vector) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """Return the values as bfloat16, rounded to nearest, ties to even."""
    bits = np.clip(values, -BF16_LARGEST, BF16_LARGEST).view(np.uint32)
    odd = bits >> 16
    odd &= 1
    bits += odd
    bits += 0x7FFF
    bits >>= 16
    return bits.astype("<u2")


def from_bf16(data: Buffer, out: Vector) -> None:
    """Fill `out` with the values of little-endian bfloat16 numbers."""
    np.left_shift(np.frombuffer(data, "<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)
