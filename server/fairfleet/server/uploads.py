"""Updates on their way in: checked, written and decoded chunk by chunk, resumable at every chunk.

What is made durable is the stream as it was received; the float32 row is decoded along the way and
can be rebuilt from it. The methods of `Upload` that take turns run in worker threads.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fairfleet.common.codecs import RAW32, codec_named, is_predicted
from fairfleet.common.errors import BadRequest, Corrupted, LimitReached, OutOfOrder, StateDirError, WrongState
from fairfleet.common.privacy import NO_TERMS, Terms
from fairfleet.common.reports import TrainReport
from fairfleet.common.stream import Decoder, read_records, record_bytes, write_record
from fairfleet.common.tensors import Model, Vector
from fairfleet.server.bases import Bases
from fairfleet.server.durable import sync, sync_folder
from fairfleet.server.store import StoredUpdate
from fairfleet.server.turns import Turn


@dataclass(frozen=True)
class Announced:
    """What a client says of an update before it sends it."""

    client: str
    round: int
    codec: str
    size_bytes: int
    digest: bytes
    report: TrainReport
    terms: Terms = NO_TERMS  # of privacy: what was done to it
    base: bytes = b""  # digest of the update that it is told by; empty: by itself


class Upload:
    def __init__(
        self,
        announced: Announced,
        row: Model,
        path: Path | None,
        turn: Turn | None = None,
        base: Vector | None = None,
        *,
        begun: bool = True,
    ) -> None:
        """`path` is where the stream is kept; None keeps it in memory only, as the decoded row.

        `begun`: a part of it may be there, from before the server was restarted.
        """
        self.announced = announced
        self.row = row
        self.token = b""
        self._path = path
        self._begun = begun
        self._turn = turn or Turn()  # a stream that was replaced may still be inside `take`
        self._decoder = Decoder(row, codec_named(announced.codec), base)
        self._file: BinaryIO | None = None
        self.spoiled = False  # everything came, and is not what was announced: no resumption mends that
        self._finished = False
        self._given_up = False
        self._in_memory = path is None
        self._tag = tag_of(announced.round, announced.client, announced.digest)

    @property
    def path(self) -> Path | None:
        """Where the stream is kept, while it is."""
        return None if self._in_memory else self._path

    def hand_over(self) -> Path | None:
        """Its file is somebody else's from now on, whatever becomes of this upload."""
        if self._in_memory:
            return None
        path, self._path = self._path, None
        return path

    @property
    def offset_bytes(self) -> int:
        return self._decoder.offset_bytes

    @property
    def opens_at_once(self) -> bool:
        """With nothing to be read, and unless a stream that was replaced is still at it, there is no need to wait."""
        return (self.path is None or not self._begun) and self._turn.is_free

    @property
    def takes_at_once(self) -> bool:
        """Nor with chunks that need only be checked and copied: the way to a thread and back costs more."""
        return self.path is None and self._turn.is_free and self._decoder.codec is RAW32

    def reopen(self) -> bytes:
        """A new token: the stream that held the old one can no longer write."""
        with self._turn.taken():
            self._check_wanted()
            if self._begun:
                self._open_file()
            self.token = secrets.token_bytes(16)
            return self.token

    def _open_file(self) -> None:
        path = self.path
        if path is not None and self._file is None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            self._file = open(descriptor, "r+b", buffering=0)  # noqa: SIM115  # closed by finish or discard
            if self._begun:
                self._recover(self._file)

    def take(self, token: bytes, messages: Iterable[bytes]) -> None:
        with self._turn.taken():
            self._take(token, messages)

    def _take(self, token: bytes, messages: Iterable[bytes]) -> None:
        self._check(token)
        self._open_file()
        for message in messages:
            self._check(token)
            self._decoder.take(message)
            if self.offset_bytes > self.announced.size_bytes:
                raise BadRequest(
                    f"{self.offset_bytes} bytes came for round {self.announced.round}; "
                    f"{self.announced.size_bytes} were announced"
                )
            if self._file is not None:
                write_record(self._file, self._tag, message)

    def finish(self, token: bytes, rest: Iterable[bytes] = ()) -> None:
        """With the rest everything came and is what was announced; it is on the disk when this returns."""
        with self._turn.taken():
            self._take(token, rest)
            self._check(token)
            if self._finished:
                return  # the stream that came before was cut off just then
            if self.offset_bytes != self.announced.size_bytes:
                raise OutOfOrder(
                    f"the stream ended after {self.offset_bytes} of {self.announced.size_bytes} bytes; "
                    "open the upload again to send the rest"
                )
            try:
                self._decoder.finish(self.announced.digest)
            except (Corrupted, OutOfOrder):
                self.spoiled = True
                raise
            path = self.path
            if self._file is not None and path is not None:
                sync(self._file.fileno(), path)
                sync_folder(path.parent)
                self._file.close()
            self._finished = True

    def _check_wanted(self) -> None:
        if self._given_up:
            raise WrongState("this upload was given up by the server; ask for a new task")

    def _check(self, token: bytes) -> None:
        self._check_wanted()
        if token != self.token:
            raise WrongState("this upload was opened again elsewhere; open it again to go on")

    def close(self) -> None:
        """To the stream that holds its token: whoever goes on must open it again."""
        self.token = b""

    def go_on_in_memory(self) -> None:
        """Its round goes on without it: what came stays decoded, its stream may go on, but nothing needs the file."""
        self._in_memory = True
        self._turn.clear_away(self._remove_file)

    def discard(self) -> None:
        """Ends it for good: no stream can write any more. Once only: its file's name may be another's afterwards."""
        if not self._given_up:
            self.token, self._given_up = b"", True
            self._turn.clear_away(self._remove_file)

    def _remove_file(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._file = self._path = None

    def _recover(self, file: BinaryIO) -> None:
        """Takes up what an earlier server left of this stream; a torn record at its end is written over."""
        whole = 0
        for message in read_records(file, self._tag):
            try:
                self._decoder.take(message)
            except (BadRequest, Corrupted, OutOfOrder):
                break  # what the disk kept is not what was written: the client sends it again from here
            whole += record_bytes(message)
        file.seek(whole)


def rebuild(row: Model, path: Path, update: StoredUpdate, bases: Bases) -> None:
    """Decodes a stored update into `row`."""
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
            f"the stored update {path} is damaged: {error}. Restore the state directory from a backup."
        ) from error


def tag_of(round: int, client: str, digest: bytes) -> bytes:
    """Marks the records of an upload: the file may have held another one before, and still hold its end."""
    return hashlib.sha256(f"{round}/{client}/{digest.hex()}".encode()).digest()[:8]


def check_announced(announced: Announced, limit_bytes: int) -> None:
    if announced.size_bytes > limit_bytes:
        raise LimitReached(
            f"client {announced.client} declared {announced.size_bytes} bytes for round {announced.round}; this "
            f"server takes at most {limit_bytes}. Set limits.upload_bytes higher here, or send with a smaller codec.",
            reason="upload_bytes",
        )
    if len(announced.digest) != 32:
        raise BadRequest(f"an update's digest has 32 bytes; found {len(announced.digest)}")
    codec_named(announced.codec)
    if announced.base and not is_predicted(announced.codec):
        raise BadRequest(
            f"an update in {announced.codec} is not told by an earlier one; only those in topk and topsign are"
        )
