"""A whole vector through a codec in memory: what a receiver of its stream would hold. For simulations and tests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fairfleet.common.codecs.names import codec_named
from fairfleet.common.tensors import Vector


class Roundtrip(NamedTuple):
    decoded: Vector
    encoded_bytes: int


def roundtrip(codec: str, vector: Vector, seed: int = 0) -> Roundtrip:
    """Chunked and seeded exactly as a client's stream.

    With error feedback a client sends `vector + residual` and keeps what was lost:

        sent = roundtrip("int8", vector + residual, seed)
        residual = vector + residual - sent.decoded
    """
    used = codec_named(codec)
    decoded, size = np.empty(len(vector), np.float32), 0
    for first in range(0, len(vector), used.elements_per_chunk):
        span = slice(first, first + used.elements_per_chunk)
        data = used.encode(np.ascontiguousarray(vector[span], np.float32), (seed, first))
        used.decode(data, decoded[span])
        size += len(data)
    return Roundtrip(decoded, size)
