"""Whether updates in a codec get error feedback.

A biased codec leaves out the same part of every update, so that part must be sent later. The error
of an unbiased codec is zero on average: sending it later gains nothing that runs show
(docs/explanation/compression.md), and costs each client a write of the model's size in every round.
"""

from __future__ import annotations

from typing import Literal

from fairfleet.common.codecs.registry import codec_named

FeedbackSetting = bool | Literal["auto"]


def uses_error_feedback(setting: FeedbackSetting, codec: str) -> bool:
    """Return whether updates in a codec get error feedback; "auto" means where it is of use.

    A codec without loss has it too: it sends what updates in an earlier codec have lost.

    >>> [uses_error_feedback("auto", name) for name in ("topk:0.1", "int8", "int4+zstd", "raw32")]
    [True, False, False, True]
    """
    if setting != "auto":
        return setting
    known = codec_named(codec)
    return not (known.lossy and known.is_unbiased)
