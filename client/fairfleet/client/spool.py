"""The encoded update on the client's own disk, between training and the server's receipt.

A stochastic codec would encode differently the next time, so a client that restarts in mid-upload
must send the very same bytes. What the next update is to know of this one belongs to it until its receipt (`carried`).
The files are not fsynced: after a power cut the digest tells a
damaged spool, and the client trains again.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from fairfleet.client import last_update, residual
from fairfleet.client.last_update import LastUpdate
from fairfleet.client.residual import Residual
from fairfleet.common.codecs import codec_named
from fairfleet.common.errors import BadRequest, StateDirError
from fairfleet.common.privacy import NO_TERMS, Terms
from fairfleet.common.private_files import tighten
from fairfleet.common.reports import TrainReport
from fairfleet.common.stream import Digest, encode, read_records, split, update_pieces, write_record
from fairfleet.common.tensors import Model, Signature

TAG = bytes(8)  # the file holds one stream, so its records need not be told apart


@dataclass(frozen=True)
class Spooled:
    federation: str
    round: int
    model_digest: str  # hex
    codec: str
    digest: str  # hex
    size_bytes: int
    report: TrainReport
    terms: Terms = NO_TERMS  # of privacy: what was done to it
    base: str = ""  # hex: the update that it is told by; empty: none


class Spool:
    """At most one update: the one that the server has not acknowledged yet."""

    def __init__(self, folder: Path) -> None:
        _make_usable(folder)
        self._residual, self._last = Residual(folder), LastUpdate(folder)
        self._chunks = folder / "update.chunks"
        self._header = folder / "update.json"

    def write(
        self,
        received: Model,
        trained: Model,
        report: TrainReport,
        *,
        federation: str,
        round: int,
        model_digest: str,
        codec: str,
        seed: int = 0,
        error_feedback: bool = False,
        prediction: bytes | None = None,
        terms: Terms = NO_TERMS,
    ) -> Spooled:
        """`prediction` is the digest of the update that the server holds for this one to be told by; see `_turn`."""
        self.clear()
        # What an update without noise lost must never go along with one that has some.
        owner = f"{federation}, with noise" if terms.noise_multiplier else federation
        used, whose, base = codec_named(codec), (owner, received.signature, round), ""
        with (
            open(os.open(self._chunks, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file,
            self._turn(whose, used.lossy, error_feedback, prediction) as feedback,
        ):
            pieces = update_pieces(received, trained, used, seed, feedback)
            encoded = encode(pieces, lambda head, data: write_record(file, TAG, head, data))
            file.truncate()
            if feedback is not None:
                feedback.writing.digest = encoded.digest
            if isinstance(feedback, last_update.Turn) and feedback.base is not None and prediction:
                base = prediction.hex()
        digest, size_bytes = encoded.digest.hex(), encoded.size_bytes
        spooled = Spooled(federation, round, model_digest, codec, digest, size_bytes, report, terms, base)
        beside = self._header.with_suffix(".new")
        told = {**vars(spooled), "report": report.model_dump(), "terms": terms.model_dump()}
        beside.write_text(json.dumps(told), encoding="utf-8")
        os.replace(beside, self._header)  # only now is there an update
        return spooled

    def _turn(
        self, whose: tuple[str, Signature, int], lossy: bool, error_feedback: bool, prediction: bytes | None
    ) -> AbstractContextManager[residual.Turn | last_update.Turn | None]:
        """How this update goes with the others: told by the last one, with what they lost, or by itself."""
        if prediction is not None:
            return self._last.turn(*whose, prediction)
        if error_feedback and (lossy or self._residual.of(*whose) is not None):
            return self._residual.turn(*whose)
        return nullcontext()

    def find(self, federation: str, round: int, model_digest: str) -> Spooled | None:
        """The update for this round, if an earlier run of this client left it."""
        spooled = self.left(federation)
        return spooled if spooled and (spooled.round, spooled.model_digest) == (round, model_digest) else None

    def left(self, federation: str) -> Spooled | None:
        """The update of any round that has no receipt yet, if it is whole."""
        spooled = self._read()
        if spooled is None or spooled.federation != federation:
            return None
        return spooled if self._digest() == spooled.digest else None

    def unsettled(self, federation: str) -> Spooled | None:
        """An update of any round that may or may not have counted, while what is carried on depends on it."""
        spooled = self._read()
        if spooled is None or spooled.federation != federation:
            return None
        return spooled if self._pends(spooled) else None

    def settle(self, spooled: Spooled, *, counted: bool, for_good: bool = True) -> None:
        """There is a receipt. One that is not for good may be asked for again, or the same update be wanted anew."""
        if counted and not for_good and self._pends(spooled):
            return
        if counted:
            self._residual.adopt(bytes.fromhex(spooled.digest))
            self._last.adopt(bytes.fromhex(spooled.digest))
        self.clear()

    def _pends(self, spooled: Spooled) -> bool:
        digest = bytes.fromhex(spooled.digest)
        return self._residual.pends(digest) or self._last.pends(digest)

    def _read(self) -> Spooled | None:
        try:
            fields = json.loads(self._header.read_text(encoding="utf-8"))
            made = {"report": TrainReport(**fields["report"]), "terms": Terms(**fields["terms"])}
            return Spooled(**{**fields, **made})
        except (OSError, ValueError, TypeError, KeyError):
            return None  # none, or not one that this version wrote: it will be made anew

    def _digest(self) -> str:
        """Of what is on the disk now; empty where it cannot be read."""
        digest = Digest()
        try:
            for message in self.messages_from(0):
                digest.add(split(message)[0])
        except (OSError, BadRequest):
            return ""
        return digest.value().hex()

    def messages_from(self, offset_bytes: int) -> Iterator[bytes]:
        """The serialized chunks from an offset on."""
        with open(self._chunks, "rb") as file:
            at = 0
            for message in read_records(file, TAG):
                if at >= offset_bytes:
                    yield message
                else:
                    at += len(split(message)[1])

    def clear(self) -> None:
        """Without its header a spooled update is none; the chunks' file stays, to be written over by the next."""
        self._header.unlink(missing_ok=True)


def _make_usable(folder: Path) -> None:
    """Found out now, not when an update is trained and cannot be kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        tighten(folder)
    except OSError as error:
        raise StateDirError(
            f"cannot keep unsent updates in {folder}: {error.strerror}. "
            "Give a directory that this user can write to as --state-dir."
        ) from error
