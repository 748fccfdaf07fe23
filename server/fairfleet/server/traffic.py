"""What was moved and what became of it, counted since the server's start."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache

from fairfleet.common.errors import BadReport, Corrupted, NotFinite, Refused


@dataclass
class Traffic:
    """Bytes by codec, without the codec's parameters: whatever clients announce, there are few of them."""

    received: Counter[str] = field(default_factory=Counter)  # encoded updates, as they come in
    sent: Counter[str] = field(default_factory=Counter)  # encoded models
    encoded: Counter[str] = field(default_factory=Counter)  # updates that are whole
    decoded: Counter[str] = field(default_factory=Counter)  # the same as float32
    outcomes: Counter[str] = field(default_factory=Counter)  # of updates: late, repeated, refused
    refusals: Counter[str] = field(default_factory=Counter)  # of updates as they arrive: form, finite, report
    resumed: int = 0  # uploads that went on where they had broken off

    @property
    def received_bytes(self) -> int:
        return self.received.total()

    @property
    def sent_bytes(self) -> int:
        return self.sent.total()

    def took(self, codec: str, size_bytes: int) -> None:
        self.received[family(codec)] += size_bytes

    def gave(self, codec: str, size_bytes: int) -> None:
        self.sent[family(codec)] += size_bytes

    def completed(self, codec: str, encoded_bytes: int, decoded_bytes: int) -> None:
        self.encoded[family(codec)] += encoded_bytes
        self.decoded[family(codec)] += decoded_bytes

    def refused(self, error: Refused) -> None:
        """An update, as it was announced or came in."""
        self.outcomes["refused"] += 1
        if not isinstance(error, Corrupted):  # whose bytes were damaged on the way: nothing is known of the update
            kinds: dict[type[Refused], str] = {NotFinite: "finite", BadReport: "report"}
            self.refusals[kinds.get(type(error), "form")] += 1


@lru_cache(64)  # asked for every chunk
def family(codec: str) -> str:
    """
    >>> family("topk:0.01+zstd"), family("int8")
    ('topk+zstd', 'int8')
    """
    return re.sub(r":[^+]*", "", codec)
