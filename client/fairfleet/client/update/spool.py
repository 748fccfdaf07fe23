"""The encoded update on the client's own disk, between training and the server's receipt.

A stochastic codec would encode differently the next time, so a client that restarts during an
upload must send exactly the same bytes. What the next update needs to know about this one stays
pending until the receipt (`pending_vector`). The files are not fsynced: after a power cut the
digest reveals a damaged spool, and the client trains again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_128_digest

from fairfleet.client.update.error_feedback import ErrorFeedback, StoredResidual
from fairfleet.client.update.federation_folder import prepare_folder
from fairfleet.client.update.prediction_base import LastUpdate, Prediction
from fairfleet.common.atomic_files import Sync, write_atomically
from fairfleet.common.chunk_stream import (
    Digest,
    EncodedStream,
    encode,
    read_records,
    split,
    update_pieces,
    write_record,
)
from fairfleet.common.codecs import Codec, codec_named
from fairfleet.common.errors import BadRequest
from fairfleet.common.privacy import NO_TERMS, PrivacyTerms
from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model, Signature

TAG = bytes(8)  # the file holds one stream, so its records need no distinct tags


@dataclass(frozen=True)
class SpooledUpdate:
    """The description of an encoded update, as stored in the header file."""

    federation: str
    round: int
    model_digest: str  # hex
    codec: str
    digest: str  # hex
    size_bytes: int
    report: TrainReport
    terms: PrivacyTerms = NO_TERMS  # the privacy that was applied to it
    base: str = ""  # hex digest of the update that it is delta-coded against; empty: none


class _History(NamedTuple):
    """How an update relates to the client's earlier ones."""

    owner: str  # the federation, with a suffix if its updates have noise
    signature: Signature
    round_number: int
    error_feedback: bool
    prediction: bytes | None


class Spool:
    """At most one update: the one that the server has not acknowledged yet."""

    def __init__(self, folder: Path) -> None:
        self.move_to(folder)

    def move_to(self, folder: Path) -> None:
        """Use the update in another folder from now on; what is in the present one stays there."""
        prepare_folder(folder)
        self.folder = folder
        self._residual, self._last = StoredResidual(folder), LastUpdate(folder)
        self._chunks = folder / "update.chunks"
        self._header = folder / "update.json"

    def write(
        self,
        received: Model,
        trained: Model,
        report: TrainReport,
        *,
        federation: str,
        round_number: int,
        model_digest: str,
        codec: str,
        seed: int = 0,
        error_feedback: bool = False,
        prediction: bytes | None = None,
        terms: PrivacyTerms = NO_TERMS,
    ) -> SpooledUpdate:
        """Encode the update to disk, in place of an earlier one, and return its description.

        `prediction` is the digest of the update that the server has as a base for this one: empty
        if it has none, None if updates are not predicted. Error feedback then does not apply.
        """
        self.clear()
        # What an update without noise lost must never be sent with one that has noise.
        owner = f"{federation}, with noise" if terms.noise_multiplier else federation
        history = _History(owner, received.signature, round_number, error_feedback, prediction)
        encoded, base = self._encode(received, trained, codec_named(codec), seed, history)
        digest, size_bytes = encoded.digest.hex(), encoded.size_bytes
        spooled = SpooledUpdate(
            federation, round_number, model_digest, codec, digest, size_bytes, report, terms, base
        )
        self._write_header(spooled)
        return spooled

    def _encode(
        self, received: Model, trained: Model, codec: Codec, seed: int, history: _History
    ) -> tuple[EncodedStream, str]:
        """Write the chunks and return their digest and size, and the base they refer to (hex).

        They are not written atomically: without the header, which is written later, they do not
        count, and overwriting the same file again and again needs no new blocks on the disk.
        """
        with (
            open(os.open(self._chunks, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file,
            self._feedback(history, codec.lossy) as feedback,
        ):
            pieces = update_pieces(received, trained, codec, seed, feedback)
            encoded = encode(pieces, lambda head, data: write_record(file, TAG, head, data))
            file.truncate()
            if feedback is not None:
                feedback.writer.digest = encoded.digest
            has_base = isinstance(feedback, Prediction) and feedback.base is not None
            base = history.prediction.hex() if has_base and history.prediction else ""
        return encoded, base

    def _feedback(
        self, history: _History, lossy: bool
    ) -> AbstractContextManager[ErrorFeedback | Prediction | None]:
        """Return how this update uses earlier ones: prediction, error feedback, or not at all."""
        owner, signature, round_number, error_feedback, prediction = history
        key = (owner, signature, round_number)
        if prediction is not None:
            return self._last.prediction(*key, prediction)
        if error_feedback and (lossy or self._residual.of(*key) is not None):
            return self._residual.feedback(*key)
        if not error_feedback:
            # What is held back would be added much later, if error feedback is on again some day.
            self._residual.delete()
        return nullcontext()

    def _write_header(self, spooled: SpooledUpdate) -> None:
        """Write the header. Only with it does the update exist."""
        fields = {
            **vars(spooled),
            "report": spooled.report.model_dump(),
            "terms": spooled.terms.model_dump(),
        }
        write_atomically(self._header, json.dumps(fields).encode(), sync=Sync.NOTHING)

    def find(self, federation: str, round_number: int, model_digest: str) -> SpooledUpdate | None:
        """Return the update for this round if an earlier run of this client left one."""
        spooled = self.find_unsent(federation)
        if spooled and (spooled.round, spooled.model_digest) == (round_number, model_digest):
            return spooled
        return None

    def find_unsent(self, federation: str) -> SpooledUpdate | None:
        """Return the update of any round that has no receipt yet, if it is undamaged."""
        spooled = self._read_header()
        if spooled is None or spooled.federation != federation:
            return None
        return spooled if self._stored_digest() == spooled.digest else None

    def unsettled(self, federation: str) -> SpooledUpdate | None:
        """Return the update of any round that may or may not have counted.

        None if no pending values depend on the answer.
        """
        spooled = self._read_header()
        if spooled is None or spooled.federation != federation:
            return None
        return spooled if self._has_pending_values(spooled) else None

    def settle(self, spooled: SpooledUpdate, *, counted: bool, for_good: bool = True) -> None:
        """Act on the receipt of an update: adopt its pending values if it counted.

        After a receipt that is not for good the update stays: the receipt may have to be requested
        again, or the server may need the same update again.
        """
        if counted and not for_good and self._has_pending_values(spooled):
            return
        if counted:
            self._residual.adopt(bytes.fromhex(spooled.digest))
            self._last.adopt(bytes.fromhex(spooled.digest))
        self.clear()

    def _has_pending_values(self, spooled: SpooledUpdate) -> bool:
        digest = bytes.fromhex(spooled.digest)
        return self._residual.is_pending(digest) or self._last.is_pending(digest)

    def _read_header(self) -> SpooledUpdate | None:
        """Return the stored description, or None if this version did not write one."""
        try:
            fields = json.loads(self._header.read_text(encoding="utf-8"))
            models = {
                "report": TrainReport(**fields["report"]),
                "terms": PrivacyTerms(**fields["terms"]),
            }
            return SpooledUpdate(**{**fields, **models})
        except (OSError, ValueError, TypeError, KeyError):
            return None  # the update will be made again

    def _stored_digest(self) -> str:
        """Return the digest of the chunks on disk; empty if they cannot be read."""
        digest = Digest()
        try:
            for message in self.messages_from(0):
                chunk, data = split(message)
                if xxh3_128_digest(data) != chunk.checksum:
                    return ""
                digest.add(chunk)
        except (OSError, BadRequest):
            return ""
        return digest.value().hex()

    @property
    def has_chunks(self) -> bool:
        """Whether the file of the update is there."""
        return self._chunks.exists()

    def messages_from(self, offset_bytes: int) -> Iterator[bytes]:
        """Yield the serialized chunks from an offset on."""
        with open(self._chunks, "rb") as file:
            position = 0
            for message in read_records(file, TAG):
                if position >= offset_bytes:
                    yield message
                else:
                    position += len(split(message)[1])

    def clear(self) -> None:
        """Remove the header, without which there is no update.

        The file of chunks stays; the next update overwrites it.
        """
        self._header.unlink(missing_ok=True)
