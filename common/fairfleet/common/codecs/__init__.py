"""Codecs encode consecutive float32 values as bytes, chunk by chunk, and decode them.

A codec knows nothing of tensors or streams; proto/FORMAT.md describes the bytes of each. A name
such as `int8`, `topk:0.01` or `int8+zstd` contains all that a reader needs.
"""

from fairfleet.common.codecs.base import CHUNK_BYTES, CHUNK_ELEMENTS, Buffer, Codec, Seed
from fairfleet.common.codecs.deterministic import STEADY, is_exact, round_to, steady_codec
from fairfleet.common.codecs.feedback import FeedbackSetting, uses_error_feedback
from fairfleet.common.codecs.prediction import is_predicted
from fairfleet.common.codecs.registry import ABILITIES, EXAMPLES, RAW32, agree, codec_named, needs
from fairfleet.common.codecs.roundtrip import roundtrip

__all__ = [
    "ABILITIES",
    "CHUNK_BYTES",
    "CHUNK_ELEMENTS",
    "EXAMPLES",
    "RAW32",
    "STEADY",
    "Buffer",
    "Codec",
    "FeedbackSetting",
    "Seed",
    "agree",
    "codec_named",
    "is_exact",
    "is_predicted",
    "needs",
    "round_to",
    "roundtrip",
    "steady_codec",
    "uses_error_feedback",
]
