"""Prediction bases: the last decoded update of each client that delta-codes its next one.

There is one file per client. Its name holds the client, the round and the update's digest. The
files of a round are on the disk before the transaction that commits the round; older ones are
deleted after it. So a base that an acknowledged update needs exists until that update's round is
committed, and the database need not mention it: after a crash, a file of a committed round counts
and one of a later round does not. Every task names the base that the server has; without one the
client sends its update without delta coding.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from fairfleet.common.atomic_files import Sync
from fairfleet.common.errors import WrongState
from fairfleet.common.tensors import Vector
from fairfleet.server.storage.files.checksummed_arrays import read_row, save_row
from fairfleet.server.storage.files.durable_files import make_folder, sync_path, write_durably


class PredictionBase(NamedTuple):
    """The base of one client: the update of a round, by its digest."""

    client: str
    round: int
    digest: bytes

    @property
    def file_name(self) -> str:
        """The name of the file that holds the base."""
        return f"{quote(self.client, safe='')}@{self.round}@{self.digest.hex()}.npy"

    @classmethod
    def of(cls, file: Path) -> PredictionBase:
        """Return the base that a file name stands for."""
        client, round_number, digest = file.stem.split("@")
        return cls(unquote(client), int(round_number), bytes.fromhex(digest))


class PredictionBases:
    """The prediction bases of all clients, in one folder."""

    def __init__(self, folder: Path, version: int, keep_bytes: int | None = None) -> None:
        """`version` is that of the newest committed model; `keep_bytes` limits the disk space."""
        self._folder, self._keep_bytes = folder, keep_bytes
        self._by_client: dict[str, PredictionBase] = {}
        self._written: list[PredictionBase] = []  # of the round that is being committed
        self._size_bytes = 0  # of one base
        bases = sorted(map(PredictionBase.of, folder.glob("*.npy")), key=lambda base: base.round)
        self._by_client.update((base.client, base) for base in bases if base.round < version)

    def clear_away(self, needed: Container[bytes] | None = None) -> None:
        """Delete leftovers of an earlier run; with `needed` digests, also all other bases."""
        if needed is not None:
            self._forget(
                [client for client, base in self._by_client.items() if base.digest not in needed]
            )
        files = set(map(self._path, self._by_client.values()))
        for file in self._folder.glob("*"):
            if file not in files:
                file.unlink()

    def digest_of(self, client: str) -> bytes:
        """Return the digest of a client's base; empty if there is none."""
        base = self._by_client.get(client)
        return base.digest if base else b""

    def read(self, client: str, digest: bytes) -> Vector:
        """Return a client's base; raise WrongState if the server has another one or none."""
        base = self._by_client.get(client)
        if base is None or base.digest != digest:
            available = f"{base.digest.hex()[:16]}…" if base else "none"
            raise WrongState(
                f"the update of {client} is delta-coded against {digest.hex()[:16]}…, which this "
                f"server does not have (it has {available}). Request a new task."
            )
        return read_row(self._path(base))

    def lose(self, client: str, digest: bytes) -> None:
        """Delete a base that cannot be read.

        The client's next update comes without delta coding, and is the next base.
        """
        if self.digest_of(client) == digest:
            self._forget([client])

    def write(self, round_number: int, updates: Mapping[str, tuple[bytes, Vector]]) -> None:
        """Write the bases of a round: digests and rows by client.

        They are on the disk when this returns, and count after `settle`.
        """
        self._written = [
            PredictionBase(client, round_number, digest) for client, (digest, _) in updates.items()
        ]
        if updates:
            make_folder(self._folder)
        for base in self._written:
            row = updates[base.client][1]
            # One fsync of the folder, below, covers the names of all bases.
            write_durably(self._path(base), partial(save_row, row=row), sync=Sync.FILE)
            self._size_bytes = self._path(base).stat().st_size
        if updates:
            sync_path(self._folder)

    def settle(self) -> None:
        """Record that the round was committed, and delete bases that no update needs any more."""
        fresh, self._written = self._written, []
        self._forget(base.client for base in fresh)
        self._by_client.update((base.client, base) for base in fresh)
        if self._keep_bytes is not None and self._size_bytes:
            surplus = len(self._by_client) - self._keep_bytes // self._size_bytes
            oldest = sorted(self._by_client.values(), key=lambda base: base.round)
            self._forget(base.client for base in oldest[: max(0, surplus)])

    def _forget(self, clients: Iterable[str]) -> None:
        for client in clients:
            if base := self._by_client.pop(client, None):
                self._path(base).unlink(missing_ok=True)

    def _path(self, base: PredictionBase) -> Path:
        return self._folder / base.file_name
