"""Codecs: how consecutive float32 values become bytes, chunk by chunk, and back.

A codec knows nothing of tensors or streams; proto/FORMAT.md describes the bytes of each. A name such as `int8`,
`topk:0.01` or `int8+zstd` says all that a reader needs.
"""

from fairfleet.common.codecs.base import CHUNK_BYTES, CHUNK_ELEMENTS, Buffer, Codec, Seed
from fairfleet.common.codecs.names import ABILITIES, EXAMPLES, RAW32, agree, codec_named, needs
from fairfleet.common.codecs.prediction import is_predicted
from fairfleet.common.codecs.roundtrip import roundtrip
from fairfleet.common.codecs.steady import STEADY, is_exact, round_to, steady_codec

__all__ = [
    "ABILITIES",
    "CHUNK_BYTES",
    "CHUNK_ELEMENTS",
    "EXAMPLES",
    "RAW32",
    "STEADY",
    "Buffer",
    "Codec",
    "Seed",
    "agree",
    "codec_named",
    "is_exact",
    "is_predicted",
    "needs",
    "round_to",
    "roundtrip",
    "steady_codec",
]
