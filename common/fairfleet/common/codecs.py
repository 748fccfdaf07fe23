"""Codecs: how consecutive float32 values become bytes, chunk by chunk, and back.

A codec knows nothing of tensors or streams. The bytes of each are described in proto/FORMAT.md.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from fairfleet.common.errors import BadRequest, WrongState, short
from fairfleet.common.tensors import Vector

CHUNK_BYTES = 1 << 20


Buffer = bytes | memoryview


class Codec(Protocol):
    name: str
    elements_per_chunk: int  # so many elements encode to at most CHUNK_BYTES

    def encode(self, values: Vector) -> Buffer: ...

    def decode(self, data: Buffer, out: Vector) -> None:
        """Fills `out`; raises BadRequest where `data` is not the encoding of len(out) values."""


class FloatCodec:
    """Each value as one little-endian IEEE float."""

    def __init__(self, name: str, dtype: str) -> None:
        self.name = name
        self._dtype = np.dtype(dtype)
        self._largest = float(np.finfo(self._dtype).max)
        self.elements_per_chunk = CHUNK_BYTES // self._dtype.itemsize

    def encode(self, values: Vector) -> Buffer:
        if self._dtype.itemsize < 4:  # what does not fit is cut to the largest that does, not sent as infinity
            values = np.clip(values, -self._largest, self._largest)
        return values.astype(self._dtype, copy=False).view(np.uint8).data

    def decode(self, data: Buffer, out: Vector) -> None:
        if len(data) != len(out) * self._dtype.itemsize:
            expected = len(out) * self._dtype.itemsize
            raise BadRequest(f"{len(out)} values in {self.name} take {expected} bytes; the chunk has {len(data)}")
        np.copyto(out, np.frombuffer(data, self._dtype))


CODECS: dict[str, Codec] = {codec.name: codec for codec in (FloatCodec("raw32", "<f4"), FloatCodec("fp16", "<f2"))}
RAW32 = CODECS["raw32"]


def codec_named(name: str) -> Codec:
    try:
        return CODECS[name]
    except KeyError:
        raise BadRequest(f"unknown codec {short(name)}; known here: {', '.join(CODECS)}") from None


def agree(wanted: str, offered: list[str]) -> str:
    """The codec to use with a peer that offers these: the wanted one, else the best it offers that we know."""
    for name in (wanted, *offered):
        if name in offered and name in CODECS:
            return name
    raise WrongState(
        f"no codec in common: the client offers {short(', '.join(offered) or 'none')}, "
        f"this server knows {', '.join(CODECS)}. Upgrade the older side."
    )
