"""Any codec's bytes once more compressed by zstd. What a chunk may unpack to is known before it is unpacked."""

from __future__ import annotations

import zstandard

from fairfleet.common.codecs.base import Buffer, Codec, Seed, fitting_elements
from fairfleet.common.errors import BadRequest, short
from fairfleet.common.tensors import Vector

LEVEL = 1  # higher levels saved at most another hundredth of int8, int4 and bf16 updates, and took longer
FRAME_BYTES = 64  # more than a frame adds to what it cannot compress: header, three bytes per 128 KiB, checksum


class ZstdCodec:
    def __init__(self, inner: Codec) -> None:
        self._inner = inner
        self.name = f"{inner.name}+zstd"
        self.lossy = inner.lossy
        self.elements_per_chunk = fitting_elements(self.largest)

    def largest(self, elements: int) -> int:
        return self._inner.largest(elements) + FRAME_BYTES

    def encode(self, values: Vector, seed: Seed = ()) -> Buffer:
        return zstandard.ZstdCompressor(LEVEL).compress(self._inner.encode(values, seed))

    def decode(self, data: Buffer, out: Vector) -> None:
        self._inner.decode(unpacked(data, self._inner.largest(len(out))), out)


def unpacked(data: Buffer, limit_bytes: int) -> bytes:
    """The content of one whole frame that declares its size: the library takes memory for what is declared."""
    try:
        frame = zstandard.get_frame_parameters(data)
        # (2^64 - 1 stands for a size that is not declared)
        if frame.content_size > limit_bytes or frame.dict_id:
            raise BadRequest(
                f"a zstd frame declares {frame.content_size} bytes and dictionary {frame.dict_id}; "
                f"this chunk may unpack to {limit_bytes} bytes, without a dictionary"
            )
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadRequest(f"not a zstd frame: {short(error)}") from None
