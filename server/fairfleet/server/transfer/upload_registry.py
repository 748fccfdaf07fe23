"""The updates of the current round: those being received, and those that are complete.

It runs on the event loop; files are removed in worker threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from fairfleet.common.errors import WrongState
from fairfleet.common.tensors import Model, Section, Signature, Vector
from fairfleet.server.storage.store import Store, StoredUpdate
from fairfleet.server.transfer.prediction_bases import PredictionBases
from fairfleet.server.transfer.upload import AnnouncedUpdate, Upload, rebuild
from fairfleet.server.transfer.upload_lock import UploadLock, Work


class Rows:
    """Memory for decoded updates, reused in every round: new memory costs a page fault per 4 KiB.

    The rows of a round's clients are in one matrix, in the order of the clients' names: so they are
    read fastest (see `gram.numpy_kernel`). A client whose row is still in use, by a late update or
    one that was given up, gets a temporary row.
    """

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self._indices: dict[str, int] = {}  # of rows, by client
        self._rows: list[Model] = []
        self._free: set[int] = set()

    def expect(self, clients: Collection[str]) -> None:
        """Assign rows to these clients, each of which is going to send an update."""
        self._indices = {client: index for index, client in enumerate(sorted(clients))}
        if len(clients) > len(self._rows):
            matrix = np.zeros((len(clients), self._signature.size(Section.PARAMETERS)), np.float32)
            self._rows = [replace(Model.empty(self._signature), parameters=row) for row in matrix]
            self._free = set(range(len(clients)))

    def take(self, client: str) -> Model:
        """Return the row of a client, or a temporary one."""
        index = self._indices.get(client)
        if index not in self._free:
            return Model.empty(self._signature)
        self._free.remove(index)
        return self._rows[index]

    def give_back(self, rows: Iterable[Model]) -> None:
        """Free rows for further updates; temporary rows are ignored."""
        ids = set(map(id, rows))
        self._free.update(index for index, row in enumerate(self._rows) if id(row) in ids)


class UploadRegistry:
    """All uploads and complete updates of the current round, by client."""

    def __init__(
        self,
        store: Store,
        signature: Signature,
        durable: bool,
        limit_bytes: int | None,
        workers: Executor,
        keep_bases: int | None = None,
    ) -> None:
        """`keep_bases` limits the disk space of prediction bases, in bytes."""
        self.durable = durable  # an update is on the disk before its receipt is sent
        self.limit_bytes = limit_bytes or raw_bytes(signature)
        self.complete_updates: dict[str, tuple[StoredUpdate, Model]] = {}  # by client
        self.bases = PredictionBases(
            store.folder / "bases", store.current_round().number, keep_bases
        )
        self._store = store
        self._rows = Rows(signature)
        self._under_way: dict[str, Upload] = {}  # by client
        self._open: dict[bytes, Upload] = {}  # by token
        self._workers = workers
        # By client, as long as an upload needs it.
        self._locks: WeakValueDictionary[str, UploadLock] = WeakValueDictionary()
        self._clearing: set[Future[None]] = set()
        # Rows that the aggregation may still use until its round is over.
        self._withdrawn: list[Model] = []

    def expect(self, clients: Collection[str]) -> None:
        """Prepare memory for the updates of these clients."""
        self._rows.expect(clients)

    def upload_for(
        self, announced: AnnouncedUpdate, base: Vector | None = None, in_memory: bool = False
    ) -> Upload:
        """Return the upload of exactly this update; drop another upload of the same client."""
        client, upload = announced.client, self._under_way.get(announced.client)
        if upload is None or _key(upload.announced) != _key(announced):
            self.drop_of(client)
            path, begun = (None, False) if in_memory else self._path(announced)
            row, lock = self._rows.take(client), self._lock_of(client)
            upload = self._under_way[client] = Upload(announced, row, path, lock, base, begun=begun)
        return upload

    def opened(self, upload: Upload) -> None:
        """Register the new token of an upload; its older tokens become void."""
        self._open = {token: opened for token, opened in self._open.items() if opened is not upload}
        self._open[upload.token] = upload

    def close(self, client: str) -> None:
        """Void the token of a client's upload, because another process now acts for the client."""
        if upload := self._under_way.get(client):
            self._open.pop(upload.token, None)
            upload.close()

    def by_token(self, token: bytes) -> Upload:
        """Return the open upload with this token; raise WrongState if there is none."""
        try:
            return self._open[token]
        except KeyError:
            raise WrongState(
                "this upload is not open; open it again to learn where to continue"
            ) from None

    def keep(self, upload: Upload) -> StoredUpdate:
        """Make a finished upload one of the round's updates."""
        update = self.release(upload)
        self.complete_updates[update.client] = (update, upload.row)
        return update

    def release(self, upload: Upload) -> StoredUpdate:
        """Remove a finished upload; the caller owns its row and may give it back."""
        self._forget(upload)
        announced, path = upload.announced, upload.hand_over()
        return StoredUpdate(
            announced.round,
            announced.client,
            announced.digest,
            announced.codec,
            announced.size_bytes,
            announced.report,
            str(path.relative_to(self._store.folder)) if path else None,
            announced.base or None,
        )

    def give_back(self, upload: Upload) -> None:
        """Free the row of an upload that was released."""
        self._rows.give_back([upload.row])

    def holds(self, upload: Upload) -> bool:
        """Return whether this is still the current upload of its client."""
        return self._under_way.get(upload.announced.client) is upload

    def drop(self, upload: Upload) -> None:
        """Give up an upload, unless that was done before: its file may be another upload's by now.

        Its row is not reused: a stream that was cut off may still be writing to it.
        """
        if self.holds(upload):
            self._forget(upload)
            upload.discard()

    def drop_of(self, client: str) -> None:
        """Give up the client's upload, whatever its round is."""
        if upload := self._under_way.get(client):
            self.drop(upload)

    def drop_late(self, client: str, current: int) -> None:
        """Give up a late upload of a client that is gone: it would stay in memory forever."""
        upload = self._under_way.get(client)
        if upload and upload.announced.round < current:
            self.drop(upload)

    def withdraw(self, client: str) -> StoredUpdate | None:
        """Remove the update of a revoked client from the round; free its row after the round."""
        if client not in self.complete_updates:
            return None
        update, row = self.complete_updates.pop(client)
        self._withdrawn.append(row)
        return update

    def restore(self, update: StoredUpdate) -> None:
        """Load an update for which an earlier run of the server sent a receipt."""
        row = self._rows.take(update.client)
        rebuild(row, self._store.folder / (update.file or ""), update, self.bases)
        self.complete_updates[update.client] = (update, row)

    def continue_without(self, client: str, round_number: int, *, wanted: bool) -> None:
        """Treat the client's upload of this round as late: continue it if it is still wanted."""
        upload = self._under_way.get(client)
        if upload and upload.announced.round == round_number:
            upload.go_on_in_memory() if wanted else self.drop(upload)

    def clear(self, version: int, wants_late: Callable[[str, int], bool]) -> None:
        """End the round that led to this version. Uploads of earlier rounds are not affected."""
        self._rows.give_back(
            [*(row for _, row in self.complete_updates.values()), *self._withdrawn]
        )
        self.complete_updates.clear()
        self._withdrawn.clear()
        for client in list(self._under_way):
            self.continue_without(client, version - 1, wanted=wants_late(client, version - 1))

    async def cleared_away(self) -> None:
        """Wait until the files of given-up uploads are removed, so that new ones can be written."""
        await asyncio.gather(
            *map(asyncio.wrap_future, tuple(self._clearing)), return_exceptions=True
        )

    def _lock_of(self, client: str) -> UploadLock:
        lock = self._locks.get(client)
        if lock is None:
            lock = self._locks[client] = UploadLock(self._later)
        return lock

    def _later(self, work: Work) -> None:
        clearing = self._workers.submit(work)
        self._clearing.add(clearing)
        clearing.add_done_callback(self._clearing.discard)

    def _forget(self, upload: Upload) -> None:
        self._under_way.pop(upload.announced.client, None)
        self._open.pop(upload.token, None)

    def _path(self, announced: AnnouncedUpdate) -> tuple[Path | None, bool]:
        if not self.durable:
            return None, False
        return self._store.files.upload_path(announced.round, announced.client, announced.digest)


def _key(announced: AnnouncedUpdate) -> tuple[int, bytes, bytes]:
    return announced.round, announced.digest, announced.base


def raw_bytes(signature: Signature) -> int:
    """Return the size of an uncompressed update with its chunk frames: no codec needs more."""
    floats = signature.size(Section.PARAMETERS) + signature.size(Section.BUFFERS)
    frames = 128 * (1 + floats // 2**16)
    return 4 * floats + 8 * signature.size(Section.COUNTERS) + frames
