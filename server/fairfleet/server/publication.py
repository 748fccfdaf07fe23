"""A committed model, or the change that led to it, as it is sent: serialized once, the same bytes to every client."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fairfleet.common.codecs import RAW32, Buffer, Codec, is_exact
from fairfleet.common.errors import NotKept, OutOfOrder
from fairfleet.common.stream import Pieces, encode, model_pieces
from fairfleet.common.tensors import Model


@dataclass(frozen=True)
class Publication:
    version: int
    digest: bytes
    size_bytes: int
    _messages: list[bytes]
    _offsets: list[int]  # of each message, and the end
    halvings: int = 0  # of a change: it is 2^-halvings times what the messages say
    codec: str = RAW32.name  # of a whole model
    compact: Publication | None = None  # of a whole model: the same in fewer bytes

    @classmethod
    def of(cls, version: int, model: Model, codec: Codec | None = None) -> Publication:
        """Also in this codec, if it loses nothing of the model."""
        whole = cls.of_pieces(version, model_pieces(model))
        if codec is None or not is_exact(codec, model.parameters):
            return whole
        compact = replace(cls.of_pieces(version, model_pieces(model, codec)), codec=codec.name)
        return replace(whole, compact=compact)

    @classmethod
    def of_pieces(cls, version: int, pieces: Pieces) -> Publication:
        messages: list[bytes] = []
        offsets = [0]

        def take(head: bytes, data: Buffer) -> None:
            offsets.append(offsets[-1] + len(data))
            messages.append(b"".join((head, data)))

        encoded = encode(pieces, take)
        return cls(version, encoded.digest, encoded.size_bytes, messages, offsets)

    def shortened(self, halvings: int) -> Publication:
        """Of a change: the same messages, taken for less."""
        return replace(self, halvings=halvings)

    def retire(self) -> None:
        """Nobody needs it any more: its memory is free for the next one. Streams under way end as they began."""
        self._messages.clear()
        if self.compact:
            self.compact.retire()

    @property
    def retired(self) -> bool:
        return not self._messages and self.size_bytes > 0

    def messages_from(self, offset_bytes: int) -> Iterator[bytes]:
        if self.retired:
            raise NotKept(f"version {self.version} is being replaced by the next; ask for the next task")
        at = bisect_left(self._offsets, offset_bytes)
        if at == len(self._offsets) or self._offsets[at] != offset_bytes:
            raise OutOfOrder(
                f"byte {offset_bytes} is not the beginning of a chunk of version {self.version}; begin at 0"
            )
        return iter(self._messages[at:])
