"""A whole vector through a codec in memory: what a receiver of its stream would hold. For simulations and tests."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fairfleet.common.codecs.names import codec_named
from fairfleet.common.codecs.prediction import fitting_scales, predicted
from fairfleet.common.tensors import Vector


class Roundtrip(NamedTuple):
    decoded: Vector
    encoded_bytes: int


def roundtrip(codec: str, vector: Vector, seed: int = 0, base: Vector | None = None) -> Roundtrip:
    """Chunked and seeded exactly as a client's stream.

    With error feedback a client sends `vector + residual` and keeps what was lost:

        sent = roundtrip("int8", vector + residual, seed)
        residual = vector + residual - sent.decoded

    With prediction it keeps what arrived, as the base of its next update:

        sent = roundtrip("topk:0.1", vector, seed, base)
        base = sent.decoded
    """
    used = codec_named(codec)
    decoded, size = np.empty(len(vector), np.float32), 0
    for first in range(0, len(vector), used.elements_per_chunk):
        span = slice(first, first + used.elements_per_chunk)
        values = np.ascontiguousarray(vector[span], np.float32)
        scales = b"" if base is None else fitting_scales(values, base[span])
        prediction = None if base is None else predicted(scales, base[span])
        data = used.encode(values if prediction is None else values - prediction, (seed, first))
        used.decode(data, decoded[span])
        if prediction is not None:
            decoded[span] += prediction
        size += len(scales) + len(data)
    return Roundtrip(decoded, size)
