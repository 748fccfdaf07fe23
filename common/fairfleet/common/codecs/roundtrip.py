"""Pass a complete vector through a codec in memory, for simulations and tests.

The result is exactly what the receiver of a client's stream decodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fairfleet.common.codecs.base import Codec, Seed
from fairfleet.common.codecs.prediction import fitting_scales, predicted
from fairfleet.common.codecs.registry import codec_named
from fairfleet.common.tensors import Vector


class Roundtrip(NamedTuple):
    """The decoded vector, and the size of its encoding."""

    decoded: Vector
    encoded_bytes: int


def roundtrip(codec: str, vector: Vector, seed: int = 0, base: Vector | None = None) -> Roundtrip:
    """Encode and decode a vector, with the chunks and seeds of a client's stream.

    With error feedback, a client sends `vector + residual` and keeps what was lost:

        sent = roundtrip("int8", vector + residual, seed)
        residual = vector + residual - sent.decoded

    With prediction, it keeps what the server decoded, as the base of its next update:

        sent = roundtrip("topk:0.1", vector, seed, base)
        base = sent.decoded
    """
    encoder = codec_named(codec)
    decoded, size = np.empty(len(vector), np.float32), 0
    for first in range(0, len(vector), encoder.elements_per_chunk):
        span = slice(first, first + encoder.elements_per_chunk)
        values = np.ascontiguousarray(vector[span], np.float32)
        if base is None:
            size += _pass_chunk(encoder, values, (seed, first), decoded[span])
        else:
            scales = fitting_scales(values, base[span])
            prediction = predicted(scales, base[span])
            size += len(scales)
            size += _pass_chunk(encoder, values - prediction, (seed, first), decoded[span])
            decoded[span] += prediction
    return Roundtrip(decoded, size)


def _pass_chunk(codec: Codec, values: Vector, seed: Seed, out: Vector) -> int:
    """Encode values, decode them into `out`, and return the size of the encoding in bytes."""
    data = codec.encode(values, seed)
    codec.decode(data, out)
    return len(data)
