"""Each value as one floating-point number: all of it, or its upper half."""

from __future__ import annotations

import numpy as np

from fairfleet.common.codecs.base import Buffer, Seed, check_length, fitting_elements
from fairfleet.common.tensors import Vector

BF16_LARGEST = np.array([0x7F7F0000], np.uint32).view(np.float32)[0]


class FloatCodec:
    """Little-endian IEEE floats."""

    def __init__(self, name: str, dtype: str) -> None:
        self.name = name
        self._dtype = np.dtype(dtype)
        self._largest = float(np.finfo(self._dtype).max)
        self.lossy = self._dtype.itemsize < 4
        self.elements_per_chunk = fitting_elements(self.largest)

    def encode(self, values: Vector, seed: Seed = ()) -> Buffer:
        if self.lossy:  # what does not fit is cut to the largest that does, not sent as infinity
            values = np.clip(values, -self._largest, self._largest)
        return values.astype(self._dtype, copy=False).view(np.uint8).data

    def decode(self, data: Buffer, out: Vector) -> None:
        check_length(self.name, data, len(out), self.largest(len(out)))
        np.copyto(out, np.frombuffer(data, self._dtype))

    def largest(self, elements: int) -> int:
        return elements * self._dtype.itemsize


class Bf16Codec:
    """The upper 16 bits of a float32, rounded to nearest, ties to even: its range, 8 bits of precision."""

    name = "bf16"
    lossy = True

    def __init__(self) -> None:
        self.elements_per_chunk = fitting_elements(self.largest)

    def encode(self, values: Vector, seed: Seed = ()) -> Buffer:
        return to_bf16(values).view(np.uint8).data

    def decode(self, data: Buffer, out: Vector) -> None:
        check_length(self.name, data, len(out), self.largest(len(out)))
        from_bf16(data, out)

    def largest(self, elements: int) -> int:
        return 2 * elements


def to_bf16(values: Vector) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    bits = np.clip(values, -BF16_LARGEST, BF16_LARGEST).view(np.uint32)
    odd = bits >> 16
    odd &= 1
    bits += odd
    bits += 0x7FFF
    bits >>= 16
    return bits.astype("<u2")


def from_bf16(data: Buffer, out: Vector) -> None:
    np.left_shift(np.frombuffer(data, "<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)
