"""A committed model, or the change that led to it, as clients receive it.

It is serialized once, and every client gets the same bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fairfleet.common.chunk_stream import Pieces, encode, model_pieces
from fairfleet.common.codecs import RAW32, Buffer, Codec, is_exact
from fairfleet.common.errors import NotKept, OutOfOrder
from fairfleet.common.tensors import Model


@dataclass(frozen=True)
class PublishedModel:
    """The messages of a model or of a change."""

    version: int
    digest: bytes
    size_bytes: int
    _messages: list[bytes]
    _offsets: list[int]  # of each message, and the end
    halvings: int = 0  # a change counts 2^-halvings times what the messages contain
    codec: str = RAW32.name  # of a full model
    compact: PublishedModel | None = None  # a full model in fewer bytes

    @classmethod
    def of(cls, version: int, model: Model, codec: Codec | None = None) -> PublishedModel:
        """Serialize a full model, also in this codec if that is lossless for the model."""
        full = cls.of_pieces(version, model_pieces(model))
        if codec is None or not is_exact(codec, model.parameters):
            return full
        compact = replace(cls.of_pieces(version, model_pieces(model, codec)), codec=codec.name)
        return replace(full, compact=compact)

    @classmethod
    def of_pieces(cls, version: int, pieces: Pieces) -> PublishedModel:
        """Serialize pieces of a model or of a change."""
        messages: list[bytes] = []
        offsets = [0]

        def append(head: bytes, data: Buffer) -> None:
            offsets.append(offsets[-1] + len(data))
            messages.append(b"".join((head, data)))

        encoded = encode(pieces, append)
        return cls(version, encoded.digest, encoded.size_bytes, messages, offsets)

    def shortened(self, halvings: int) -> PublishedModel:
        """Return the same change, counted 2^-halvings times."""
        return replace(self, halvings=halvings)

    def retire(self) -> None:
        """Free the memory of a model that no client needs; running streams complete normally."""
        self._messages.clear()
        if self.compact:
            self.compact.retire()

    @property
    def retired(self) -> bool:
        """Whether the messages were freed."""
        return not self._messages and self.size_bytes > 0

    def messages_from(self, offset_bytes: int) -> Iterator[bytes]:
        """Return the messages from a chunk's offset on.

        Raises NotKept after `retire`, and OutOfOrder if no chunk begins at the offset.
        """
        if self.retired:
            raise NotKept(
                f"version {self.version} is being replaced by the next; request the next task"
            )
        index = bisect_left(self._offsets, offset_bytes)
        if index == len(self._offsets) or self._offsets[index] != offset_bytes:
            raise OutOfOrder(
                f"byte {offset_bytes} is not the beginning of a chunk of version {self.version}; "
                "begin at 0"
            )
        return iter(self._messages[index:])
