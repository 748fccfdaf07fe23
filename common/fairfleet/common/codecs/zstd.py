"""Compress the bytes of any other codec with zstd.

The size that a chunk unpacks to is checked before it is unpacked.
"""

from __future__ import annotations

import zstandard

from fairfleet.common.codecs.base import Buffer, Codec, Seed, fitting_elements
from fairfleet.common.errors import BadRequest, short
from fairfleet.common.tensors import Vector

# Higher levels save at most another hundredth of int8, int4 and bf16 updates, and take longer.
LEVEL = 1
# More than a frame adds to incompressible data: header, three bytes per 128 KiB, checksum.
FRAME_BYTES = 64


class ZstdCodec:
    """Another codec, with each chunk as one zstd frame."""

    def __init__(self, inner: Codec) -> None:
        self._inner = inner
        self.name = f"{inner.name}+zstd"
        self.lossy, self.is_unbiased = inner.lossy, inner.is_unbiased
        self.elements_per_chunk = fitting_elements(self.largest)

    def largest(self, elements: int) -> int:
        """Return the largest size of an encoding of `elements` values, in bytes."""
        return self._inner.largest(elements) + FRAME_BYTES

    def encode(self, values: Vector, seed: Seed = ()) -> Buffer:
        """Encode finite values, see `Codec.encode`."""
        return zstandard.ZstdCompressor(LEVEL).compress(self._inner.encode(values, seed))

    def decode(self, data: Buffer, out: Vector) -> None:
        """Decode into `out`, see `Codec.decode`."""
        self._inner.decode(unpacked(data, self._inner.largest(len(out))), out)


def unpacked(data: Buffer, limit_bytes: int) -> bytes:
    """Return the content of one complete frame of at most `limit_bytes`.

    The library allocates the size that a frame declares, so the size is checked first. Raises
    BadRequest if the frame is too large, declares no size, or is damaged.
    """
    try:
        frame = zstandard.get_frame_parameters(data)
        # A frame that declares no size has a content_size of 2^64 - 1.
        if frame.content_size > limit_bytes or frame.dict_id:
            raise BadRequest(
                f"a zstd frame declares {frame.content_size} bytes and dictionary {frame.dict_id}; "
                f"this chunk may unpack to {limit_bytes} bytes, without a dictionary"
            )
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadRequest(f"not a zstd frame: {short(error)}") from None
