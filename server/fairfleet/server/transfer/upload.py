"""Uploads of updates: checked, written and decoded chunk by chunk, resumable at every chunk.

The stream is made durable as it was received; the float32 row is decoded along the way and can be
rebuilt from it. The methods of `Upload` that take its lock run in worker threads.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fairfleet.common.chunk_stream import Decoder, read_records, record_bytes, write_record
from fairfleet.common.codecs import RAW32, codec_named, is_predicted
from fairfleet.common.errors import (
    BadReport,
    BadRequest,
    Corrupted,
    LimitReached,
    OutOfOrder,
    StateDirError,
    WrongState,
)
from fairfleet.common.names import round_name
from fairfleet.common.privacy import NO_TERMS, PrivacyTerms
from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model, Vector
from fairfleet.server.aggregation.buffers import check_buffers
from fairfleet.server.storage.files.durable_files import sync_open_file, sync_path
from fairfleet.server.storage.store import StoredUpdate
from fairfleet.server.transfer.prediction_bases import PredictionBases
from fairfleet.server.transfer.upload_lock import UploadLock


@dataclass(frozen=True)
class AnnouncedUpdate:
    """What a client declares about an update before it sends it."""

    client: str
    round: int
    codec: str
    size_bytes: int
    digest: bytes
    report: TrainReport
    terms: PrivacyTerms = NO_TERMS  # the privacy that was applied to the update
    base: bytes = b""  # digest of the update it is delta-coded against; empty: not delta-coded


class Upload:
    """One update that is being received."""

    def __init__(
        self,
        announced: AnnouncedUpdate,
        row: Model,
        path: Path | None,
        lock: UploadLock | None = None,
        base: Vector | None = None,
        *,
        begun: bool = True,
    ) -> None:
        """`path` is the file of the stream; None keeps the update in memory, as the decoded row.

        `begun` means that the file may hold a part, from before a restart of the server.
        """
        self.announced = announced
        self.row = row
        self.token = b""
        self._path = path
        self._begun = begun
        self._lock = lock or UploadLock()  # a replaced stream may still be inside `take`
        self._decoder = Decoder(row, codec_named(announced.codec), base)
        self._file: BinaryIO | None = None
        # Everything arrived, but is not what was announced: resuming cannot fix that.
        self.spoiled = False
        # Earlier updates of the client counted, so it may send what a lossy codec left of them.
        self.may_hold_residual = False
        self._finished = False
        self._given_up = False
        self._in_memory = path is None
        self._tag = tag_of(announced.round, announced.client, announced.digest)

    @property
    def path(self) -> Path | None:
        """The file of the stream, as long as the upload needs it."""
        return None if self._in_memory else self._path

    def hand_over(self) -> Path | None:
        """Give the file to the caller: from now on this upload does not touch it."""
        if self._in_memory:
            return None
        path, self._path = self._path, None
        return path

    @property
    def offset_bytes(self) -> int:
        """The number of encoded bytes received: where the client resumes."""
        return self._decoder.offset_bytes

    @property
    def opens_at_once(self) -> bool:
        """Whether `reopen` neither reads a file nor waits for a stream that was replaced."""
        return (self.path is None or not self._begun) and self._lock.is_free

    @property
    def takes_at_once(self) -> bool:
        """Whether chunks need only be checked and copied, which costs less than using a thread."""
        return self.path is None and self._lock.is_free and self._decoder.codec is RAW32

    def reopen(self) -> bytes:
        """Return a new token; the stream with the old one can no longer write."""
        with self._lock.taken():
            self._check_active()
            if self._begun:
                self._open_file()
            self.token = secrets.token_bytes(16)
            return self.token

    def _open_file(self) -> None:
        path = self.path
        if path is not None and self._file is None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            self._file = os.fdopen(descriptor, "r+b", buffering=0)  # closed by finish or discard
            if self._begun:
                self._recover(self._file)

    def take(self, token: bytes, messages: Iterable[bytes]) -> None:
        """Check, decode and store messages; raise WrongState if the token is no longer valid."""
        with self._lock.taken():
            self._take(token, messages)

    def _take(self, token: bytes, messages: Iterable[bytes]) -> None:
        self._check(token)
        self._open_file()
        for message in messages:
            self._check(token)
            self._decoder.take(message)
            if self.offset_bytes > self.announced.size_bytes:
                raise BadRequest(
                    f"{self.offset_bytes} bytes came for {round_name(self.announced.round)}; "
                    f"{self.announced.size_bytes} were announced"
                )
            if self._file is not None:
                write_record(self._file, self._tag, message)

    def finish(self, token: bytes, rest: Iterable[bytes] = ()) -> None:
        """Take the remaining messages and check the update; it is on the disk when this returns.

        Raises OutOfOrder if bytes are missing, and Corrupted if the digest differs.
        """
        with self._lock.taken():
            self._take(token, rest)
            self._check(token)
            if self._finished:
                return  # an earlier stream was interrupted just after it finished
            if self.offset_bytes != self.announced.size_bytes:
                raise OutOfOrder(
                    f"the stream ended after {self.offset_bytes} of {self.announced.size_bytes} "
                    "bytes; open the upload again to send the rest"
                )
            self._check_content()
            path = self.path
            if self._file is not None and path is not None:
                sync_open_file(self._file.fileno(), path)
                sync_path(path.parent)
                self._file.close()
            self._finished = True

    def _check_content(self) -> None:
        try:
            self._decoder.finish(self.announced.digest)
        except (Corrupted, OutOfOrder):
            self.spoiled = True
            raise
        check_buffers(self.row)
        check_steps(self.announced, self.row, self.may_hold_residual)

    def _check_active(self) -> None:
        if self._given_up:
            raise WrongState("this upload was given up by the server; request a new task")

    def _check(self, token: bytes) -> None:
        self._check_active()
        if token != self.token:
            raise WrongState("this upload was opened again elsewhere; open it again to continue")

    def close(self) -> None:
        """Void the token: to continue, a client must open the upload again."""
        self.token = b""

    def go_on_in_memory(self) -> None:
        """Continue without the file, because the round continues without this upload.

        What arrived stays decoded, and the stream may continue.
        """
        self._in_memory = True
        self._lock.clear_away(self._remove_file)

    def discard(self) -> None:
        """End the upload permanently: no stream can write any more.

        The file is removed only once, because its name may belong to another upload afterwards.
        """
        if not self._given_up:
            self.token, self._given_up = b"", True
            self._lock.clear_away(self._remove_file)

    def _remove_file(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._file = self._path = None

    def _recover(self, file: BinaryIO) -> None:
        """Load what an earlier run left of this stream; a torn record at its end is overwritten."""
        valid_bytes = 0
        for message in read_records(file, self._tag):
            try:
                self._decoder.take(message)
            except (BadRequest, Corrupted, OutOfOrder):
                break  # the file is damaged from here on: the client sends the rest again
            valid_bytes += record_bytes(message)
        file.seek(valid_bytes)


def rebuild(row: Model, path: Path, update: StoredUpdate, bases: PredictionBases) -> None:
    """Decode a stored update into `row`; raise StateDirError if it is damaged."""
    tag = tag_of(update.round, update.client, update.digest)
    try:
        base = bases.read(update.client, update.base) if update.base else None
        decoder = Decoder(row, codec_named(update.codec), base)
        with open(path, "rb") as file:
            for message in read_records(file, tag):
                decoder.take(message)
        decoder.finish(update.digest)
    except (OSError, BadRequest, Corrupted, OutOfOrder, WrongState) as error:
        raise StateDirError(
            f"the stored update {path} is damaged: {error}. "
            "Restore the state directory from a backup."
        ) from error


def tag_of(round_number: int, client: str, digest: bytes) -> bytes:
    """Return the mark of an upload's records: the file may still hold the end of another upload."""
    return hashlib.sha256(f"{round_number}/{client}/{digest.hex()}".encode()).digest()[:8]


def check_steps(announced: AnnouncedUpdate, row: Model, may_hold_residual: bool) -> None:
    """Refuse a non-zero update of a training without steps.

    Noise may still be sent, and so may what a lossy codec left of the client's earlier updates.
    """
    residual = may_hold_residual and codec_named(announced.codec).lossy
    if announced.terms.noise_multiplier or residual:
        return
    if not announced.report.steps and row.parameters.any():
        raise BadReport(
            "steps is 0, but the update is not zero; report the number of steps that were taken"
        )


def check_codec(announced: AnnouncedUpdate, agreed: AbstractSet[str] | None) -> None:
    """Refuse an update in a codec that its task did not name; None: any codec is accepted."""
    if agreed is None or announced.codec in agreed:
        return
    raise BadRequest(
        f"the update of {announced.client} for {round_name(announced.round)} is in codec "
        f"{announced.codec}; its task named {' or '.join(sorted(agreed)) or 'none'}. Encode the "
        "update in the codec of TrainTask.codec, or request the task again."
    )


def check_announced(announced: AnnouncedUpdate, limit_bytes: int) -> None:
    """Refuse an announcement that is too large or malformed."""
    if announced.size_bytes > limit_bytes:
        raise LimitReached(
            f"client {announced.client} declared {announced.size_bytes} bytes for "
            f"{round_name(announced.round)}; this server accepts at most {limit_bytes}. Raise "
            "limits.upload_bytes on the server, or choose a smaller codec.",
            reason="upload_bytes",
        )
    if len(announced.digest) != 32:
        raise BadRequest(f"an update's digest has 32 bytes; found {len(announced.digest)}")
    codec_named(announced.codec)
    if announced.base and not is_predicted(announced.codec):
        raise BadRequest(
            f"an update in {announced.codec} cannot be delta-coded; only topk and topsign can"
        )
