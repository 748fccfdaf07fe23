"""The updates of the current round: those on their way in, and those that are whole."""

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
from fairfleet.server.bases import Bases
from fairfleet.server.store import Store, StoredUpdate
from fairfleet.server.turns import Turn, Work
from fairfleet.server.uploads import Announced, Upload, rebuild


class Rows:
    """Memory for decoded updates, used again round after round: fresh memory costs a page fault per 4 KiB.

    The rows of a round's clients lie in one matrix, in the order of the clients' ids: so they are read fastest (see
    `gram_numpy`). Whoever finds its place taken, by a late update or one that was given up, gets a row for once.
    """

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self._places: dict[str, int] = {}  # by client
        self._rows: list[Model] = []  # by place
        self._free: set[int] = set()

    def expect(self, clients: Collection[str]) -> None:
        """These are going to send an update each."""
        self._places = {client: place for place, client in enumerate(sorted(clients))}
        if len(clients) > len(self._rows):
            matrix = np.zeros((len(clients), self._signature.size(Section.PARAMETERS)), np.float32)
            self._rows = [replace(Model.empty(self._signature), parameters=line) for line in matrix]
            self._free = set(range(len(clients)))

    def take(self, client: str) -> Model:
        place = self._places.get(client)
        if place not in self._free:
            return Model.empty(self._signature)
        self._free.remove(place)
        return self._rows[place]

    def give_back(self, rows: Iterable[Model]) -> None:
        ids = set(map(id, rows))
        self._free.update(place for place, row in enumerate(self._rows) if id(row) in ids)


class Intake:
    def __init__(
        self,
        store: Store,
        signature: Signature,
        durable: bool,
        limit_bytes: int | None,
        workers: Executor,
        keep_bases: int | None = None,
    ) -> None:
        """`keep_bases` is how many bytes of disk the bases of updates may take."""
        self.durable = durable  # an update is on the disk before its receipt is given
        self.limit_bytes = limit_bytes or raw_bytes(signature)
        self.whole: dict[str, tuple[StoredUpdate, Model]] = {}  # by client
        self.bases = Bases(store.folder / "bases", store.current_round().number, keep_bases)
        self._store = store
        self._rows = Rows(signature)
        self._under_way: dict[str, Upload] = {}  # by client
        self._open: dict[bytes, Upload] = {}  # by token
        self._workers = workers
        self._turns: WeakValueDictionary[str, Turn] = WeakValueDictionary()  # by client, while an upload needs it
        self._clearing: set[Future[None]] = set()

    def expect(self, clients: Collection[str]) -> None:
        """The round is these clients'."""
        self._rows.expect(clients)

    def upload_for(self, announced: Announced, base: Vector | None = None, in_memory: bool = False) -> Upload:
        """The upload of this very update, perhaps begun; another of the same client is dropped."""
        client, upload = announced.client, self._under_way.get(announced.client)
        if upload is None or _names(upload.announced) != _names(announced):
            self.drop_of(client)
            path, begun = (None, False) if in_memory else self._path(announced)
            row, turn = self._rows.take(client), self._turn_of(client)
            upload = self._under_way[client] = Upload(announced, row, path, turn, base, begun=begun)
        return upload

    def opened(self, upload: Upload) -> None:
        """The upload has a new token; the older ones are void."""
        self._open = {token: other for token, other in self._open.items() if other is not upload}
        self._open[upload.token] = upload

    def close(self, client: str) -> None:
        """Another process speaks for the client now: the streams of the older one can no longer write."""
        if upload := self._under_way.get(client):
            self._open.pop(upload.token, None)
            upload.close()

    def by_token(self, token: bytes) -> Upload:
        try:
            return self._open[token]
        except KeyError:
            raise WrongState("this upload is not open; open it again to learn where to go on") from None

    def keep(self, upload: Upload) -> StoredUpdate:
        """A finished upload becomes one of the round's updates."""
        update = self.release(upload)
        self.whole[update.client] = (update, upload.row)
        return update

    def release(self, upload: Upload) -> StoredUpdate:
        """A finished upload is no longer under way; its row is the caller's, who may give it back."""
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
        self._rows.give_back([upload.row])

    def holds(self, upload: Upload) -> bool:
        """Whether this is (still) the upload of its client."""
        return self._under_way.get(upload.announced.client) is upload

    def drop(self, upload: Upload) -> None:
        """Gives an upload up, unless that was done before: by now its file may be another's.

        Its row is not used again: a stream that was cut off may still be writing into it.
        """
        if self.holds(upload):
            self._forget(upload)
            upload.discard()

    def drop_of(self, client: str) -> None:
        """The client's upload, whatever its round is."""
        if upload := self._under_way.get(client):
            self.drop(upload)

    def drop_late(self, client: str, current: int) -> None:
        """The client is gone: what it sent for an older round is only in memory, and would lie there for ever."""
        upload = self._under_way.get(client)
        if upload and upload.announced.round < current:
            self.drop(upload)

    def restore(self, update: StoredUpdate) -> None:
        """Takes an update up again that an earlier run of the server gave a receipt for."""
        row = self._rows.take(update.client)
        rebuild(row, self._store.folder / (update.file or ""), update, self.bases)
        self.whole[update.client] = (update, row)

    def go_on_without(self, client: str, round: int, *, wanted: bool) -> None:
        """The client's upload of this round is late from now on: it goes on if it is still wanted."""
        upload = self._under_way.get(client)
        if upload and upload.announced.round == round:
            upload.go_on_in_memory() if wanted else self.drop(upload)

    def clear(self, version: int, wants_late: Callable[[str, int], bool]) -> None:
        """The round that led to this version is over. Uploads that were late already are none of its business."""
        self._rows.give_back(row for _, row in self.whole.values())
        self.whole.clear()
        for client in list(self._under_way):
            self.go_on_without(client, version - 1, wanted=wants_late(client, version - 1))

    async def cleared_away(self) -> None:
        """When the files of uploads that were given up are closed and gone: others may be written over them else."""
        await asyncio.gather(*map(asyncio.wrap_future, tuple(self._clearing)), return_exceptions=True)

    def _turn_of(self, client: str) -> Turn:
        turn = self._turns.get(client)
        if turn is None:
            turn = self._turns[client] = Turn(self._later)
        return turn

    def _later(self, work: Work) -> None:
        clearing = self._workers.submit(work)
        self._clearing.add(clearing)
        clearing.add_done_callback(self._clearing.discard)

    def _forget(self, upload: Upload) -> None:
        self._under_way.pop(upload.announced.client, None)
        self._open.pop(upload.token, None)

    def _path(self, announced: Announced) -> tuple[Path | None, bool]:
        if not self.durable:
            return None, False
        return self._store.files.upload_path(announced.round, announced.client, announced.digest)


def _names(announced: Announced) -> tuple[int, bytes, bytes]:
    return announced.round, announced.digest, announced.base


def raw_bytes(signature: Signature) -> int:
    """What an update takes uncompressed, and the frames of its chunks: more than that no codec needs."""
    floats = signature.size(Section.PARAMETERS) + signature.size(Section.BUFFERS)
    frames = 128 * (1 + floats // 2**16)
    return 4 * floats + 8 * signature.size(Section.COUNTERS) + frames
