"""The last update of each client that tells the next one by it, as it was decoded: one file per client.

A file's name says whose it is, of which round and which update. Those of a round are written, and on the disk, before
the transaction that commits the round; the older ones go after it. So a base that an acknowledged update needs is there
until that update's round is committed, and no fact need speak of it: after a crash, a file of a committed round counts
and one of a later round does not. What the server holds it says with every task; where it holds nothing (any more), the
client sends its update whole.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from fairfleet.common.errors import WrongState
from fairfleet.common.tensors import Vector
from fairfleet.server.durable import make_folder, sync, sync_folder
from fairfleet.server.sealed import read_row, save_row


class Base(NamedTuple):
    client: str
    round: int
    digest: bytes

    @property
    def file_name(self) -> str:
        return f"{quote(self.client, safe='')}@{self.round}@{self.digest.hex()}.npy"

    @classmethod
    def of(cls, file: Path) -> Base:
        client, round, digest = file.stem.split("@")
        return cls(unquote(client), int(round), bytes.fromhex(digest))


class Bases:
    def __init__(self, folder: Path, version: int, keep_bytes: int | None = None) -> None:
        """`version` is that of the newest committed model. More than `keep_bytes` are not kept for long."""
        self._folder, self._keep_bytes = folder, keep_bytes
        self._held: dict[str, Base] = {}  # by client
        self._written: list[Base] = []  # of the round that is being committed
        self._size_bytes = 0  # of one
        found = sorted(map(Base.of, folder.glob("*.npy")), key=lambda base: base.round)
        self._held.update((base.client, base) for base in found if base.round < version)

    def clear_away(self, needed: Container[bytes] | None = None) -> None:
        """What an earlier run of the server left behind, and nothing needs; with digests, all but those bases."""
        if needed is not None:
            self._forget([client for client, base in self._held.items() if base.digest not in needed])
        held = set(map(self._path, self._held.values()))
        for file in self._folder.glob("*"):
            if file not in held:
                file.unlink()

    def digest_of(self, client: str) -> bytes:
        """Of what is held of this client; empty where that is nothing."""
        held = self._held.get(client)
        return held.digest if held else b""

    def read(self, client: str, digest: bytes) -> Vector:
        held = self._held.get(client)
        if held is None or held.digest != digest:
            raise WrongState(
                f"the update of {client} is told by {digest.hex()[:16]}…, which is not held here "
                f"({held.digest.hex()[:16] + '… is' if held else 'nothing of it is'}). Ask for a new task."
            )
        return read_row(self._path(held))

    def lose(self, client: str, digest: bytes) -> None:
        """It cannot be read. The client's next update comes whole, and is the next base."""
        if self.digest_of(client) == digest:
            self._forget([client])

    def write(self, round: int, updates: Mapping[str, tuple[bytes, Vector]]) -> None:
        """Digests and rows, by client. They are on the disk when this returns, and held when `settle` was called."""
        self._written = [Base(client, round, digest) for client, (digest, _) in updates.items()]
        if updates:
            make_folder(self._folder)
        for base in self._written:
            beside = self._path(base).with_suffix(".part")
            with beside.open("wb") as file:
                save_row(file, updates[base.client][1])
                file.flush()
                sync(file.fileno(), beside)
            self._size_bytes = beside.stat().st_size
            beside.replace(self._path(base))
        if updates:
            sync_folder(self._folder)

    def settle(self) -> None:
        """The round was committed. No update of a round under way needs an older base any more."""
        fresh, self._written = self._written, []
        self._forget(base.client for base in fresh)
        self._held.update((base.client, base) for base in fresh)
        if self._keep_bytes is not None and self._size_bytes:
            surplus = len(self._held) - self._keep_bytes // self._size_bytes
            oldest = sorted(self._held.values(), key=lambda base: base.round)
            self._forget(base.client for base in oldest[: max(0, surplus)])

    def _forget(self, clients: Iterable[str]) -> None:
        for client in clients:
            if base := self._held.pop(client, None):
                self._path(base).unlink(missing_ok=True)

    def _path(self, base: Base) -> Path:
        return self._folder / base.file_name
