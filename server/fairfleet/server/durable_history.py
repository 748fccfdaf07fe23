"""The history as the state directory keeps it: a file counts only while the database names it.

New rows are written and synced before the transaction that names them, old ones deleted after it. So whenever the
server dies, the rows that it finds again are those of the last committed round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock

from fairfleet.server.blocks import Row
from fairfleet.server.durable import sync_folder
from fairfleet.server.history import Folder, History
from fairfleet.server.rules import PastRow
from fairfleet.server.sealed import read_row
from fairfleet.server.settings import HistorySettings
from fairfleet.server.store import Store, StoredUpdate


class NamedRows(Folder):
    def __init__(self, path: Path, named: Iterable[PastRow]) -> None:
        super().__init__(path)
        self._named = list(named)
        self.unneeded: list[PastRow] = []  # to be deleted when no fact names them any more

    def stored(self) -> Iterable[tuple[PastRow, Row]]:
        wanted = {self._file(past): past for past in self._named}
        for file in self.path.iterdir():
            if file not in wanted:
                file.unlink()
        for file, past in wanted.items():
            yield past, read_row(file)

    def drop(self, past: PastRow) -> None:
        self.unneeded.append(past)

    def sync(self) -> None:
        """The new rows' names are on the disk when this returns; the rows themselves are already."""
        sync_folder(self.path)

    def settle(self) -> None:
        """A transaction has named the new rows: nothing speaks of the old ones any more."""
        for past in self.unneeded:
            super().drop(past)
        self.unneeded.clear()


class Past:
    """The federation's history, with what is to be kept of it, and the rows that came too late for their round.

    Late rows come in the aggregator's thread, and take their places there or, after a commit, in the event loop's.
    """

    def __init__(self, store: Store, layers: Sequence[int], keeping: HistorySettings) -> None:
        self._shelf = NamedRows(store.folder / "history", store.history_rows())
        self._keeping = keeping
        self._shut_out = set(store.revoked())
        self._turn = Lock()  # for late and named rows
        self._late: list[tuple[PastRow, Row]] = []  # on the disk, not yet in the history
        self._named: list[tuple[PastRow, Row]] = []  # of these, the database speaks
        self.history = History(layers, self._shelf, keeping.precision)

    def wants(self, client: str, round: int, version: int) -> bool:
        with self._turn:
            known = [past for past, _ in (*self._late, *self._named)] + list(self.history.rows().values())
        newest = max((past.round for past in known if past.client == client), default=-1)
        limit = self._keeping.keep_rounds
        young = limit is None or version - round <= limit
        return newest < round < version and young and client not in self._shut_out

    def shut_out(self, client: str) -> None:
        """It was revoked: its row goes with the next commit."""
        self._shut_out.add(client)

    def write_late(self, update: StoredUpdate, row: Row) -> None:
        """A round under way may have the client's older row in its inner products: the new one counts from the next."""
        past = PastRow(update.client, update.round, update.report.loss_before, update.report.samples)
        kept = self.history.write(past, row)
        self._shelf.sync()
        with self._turn:
            self._late.append((past, kept))

    def late_is_named(self, update: StoredUpdate) -> None:
        with self._turn:
            for at, (past, _) in enumerate(self._late):
                if (past.client, past.round) == (update.client, update.round):
                    self._named.append(self._late.pop(at))
                    return

    def make_room(self, version: int) -> list[str]:
        """Forgets what is not to be kept; says whose rows. What is left is on the disk."""
        keeping = self._keeping
        surplus = self.history.surplus(version, rounds=keeping.keep_rounds, size_bytes=keeping.keep_bytes)
        gone = [*surplus, *sorted(self._shut_out & self.history.rows().keys() - set(surplus))]
        for client in gone:
            self.history.discard(client)
        self._shelf.sync()
        return gone

    def unneeded(self) -> list[PastRow]:
        """Rows that the next transaction must no longer name: `settle` deletes their files."""
        return list(self._shelf.unneeded)

    def settle(self) -> None:
        """Late rows that are named take their places, and files that nothing names can go."""
        with self._turn:
            for past, row in self._named:
                known = self.history.rows().get(past.client)
                if known is None or known.round < past.round:
                    self.history.install(past, row)
                elif known.round > past.round:  # else it is here already: the same file
                    self._shelf.drop(past)
            self._named.clear()
            self._shelf.settle()
