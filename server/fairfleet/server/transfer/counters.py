"""Counters of transfers and their outcomes since the server's start."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

from fairfleet.common.errors import BadReport, Corrupted, NotFinite, Refused, WrongState


@dataclass
class TrafficCounters:
    """Bytes and outcomes. Codecs count without parameters, so clients cannot create many labels."""

    received: Counter[str] = field(default_factory=Counter)  # encoded updates, as they arrive
    sent: Counter[str] = field(default_factory=Counter)  # encoded models
    encoded: Counter[str] = field(default_factory=Counter)  # complete updates
    decoded: Counter[str] = field(default_factory=Counter)  # the same as float32
    outcomes: Counter[str] = field(default_factory=Counter)  # of updates: late, repeated, refused
    # Updates refused as they arrive: form, finite, report.
    refusals: Counter[str] = field(default_factory=Counter)
    resumed: int = 0  # uploads that continued after an interruption

    @property
    def received_bytes(self) -> int:
        """All bytes of encoded updates received."""
        return self.received.total()

    @property
    def sent_bytes(self) -> int:
        """All bytes of encoded models sent."""
        return self.sent.total()

    def count_received(self, codec: str, size_bytes: int) -> None:
        """Count bytes of an update as they arrive."""
        self.received[family(codec)] += size_bytes

    def count_sent(self, codec: str, size_bytes: int) -> None:
        """Count bytes of a model as they are sent."""
        self.sent[family(codec)] += size_bytes

    def completed(self, codec: str, encoded_bytes: int, decoded_bytes: int) -> None:
        """Count a complete update."""
        self.encoded[family(codec)] += encoded_bytes
        self.decoded[family(codec)] += decoded_bytes

    def refused(self, error: Refused) -> None:
        """Count an update that was refused when it was announced or received."""
        self.outcomes["refused"] += 1
        # Damaged bytes say nothing about the update, and the receipt of another update is not a
        # fault of this one.
        if not isinstance(error, (WrongState, Corrupted)):
            kinds: dict[type[Refused], str] = {NotFinite: "finite", BadReport: "report"}
            self.refusals[kinds.get(type(error), "form")] += 1


@lru_cache(64)  # called for every chunk
def family(codec: str) -> str:
    """Return a codec without its parameters.

    >>> family("topk:0.01+zstd"), family("int8")
    ('topk+zstd', 'int8')
    """
    return re.sub(r":[^+]*", "", codec)
