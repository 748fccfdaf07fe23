"""The history in the state directory: one file per row, which counts while the database names it.

New rows are durable before the transaction that names them, and old ones are deleted after it. So
after a crash at any time, the history is that of the last committed round.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from urllib.parse import quote, unquote

from fairfleet.common.atomic_files import Sync
from fairfleet.server.aggregation.finite import is_finite
from fairfleet.server.aggregation.half_rows import ScaledRow
from fairfleet.server.aggregation.history import History, HistorySettings
from fairfleet.server.aggregation.rule_loss import LossOfRule, loss_for_rule
from fairfleet.server.gram.blocks import Row
from fairfleet.server.rules import PastRow
from fairfleet.server.storage.files.checksummed_arrays import (
    open_scaled_row,
    read_scaled_row,
    save_scaled_row,
)
from fairfleet.server.storage.files.durable_files import make_folder, sync_path, write_durably
from fairfleet.server.storage.operations.undone_rounds import rounds_left_out
from fairfleet.server.storage.store import Store, StoredUpdate

log = logging.getLogger(__name__)


class FileRows:
    """Rows in one memory-mapped file each: larger than memory, and still there after a restart."""

    def __init__(self, path: Path) -> None:
        """Create the folder `path` if it does not exist."""
        self.path = path
        make_folder(path)

    def put(self, past: PastRow, row: Row, exponent: int = 0) -> Row:
        """Write a row, times 2^exponent, and return it memory-mapped.

        Its content is on the disk then, and its name after a sync of the folder.
        """
        path = self._file(past)
        save = partial(save_scaled_row, row=row, exponent=exponent)
        write_durably(path, save, sync=Sync.FILE)
        return open_scaled_row(path)

    def drop(self, past: PastRow) -> None:
        """Delete a row's file."""
        self._file(past).unlink(missing_ok=True)

    def stored(self) -> Iterable[tuple[PastRow, ScaledRow]]:
        """Return all rows by round, so that the newest one of a client comes last."""
        files = [(_past_row(file), file) for file in self.path.glob("*.npy")]
        for past, file in sorted(files, key=lambda pair: pair[0].round):
            yield past, ScaledRow(*read_scaled_row(file))

    def _file(self, past: PastRow) -> Path:
        return self.path / file_name(past)


def file_name(past: PastRow) -> str:
    """Return the name of a row's file."""
    return f"{quote(past.client, safe='')}@{past.round}.npy"


def _past_row(file: Path) -> PastRow:
    client, _, round_number = file.stem.rpartition("@")
    return PastRow(unquote(client), int(round_number))


class CommittedRows(FileRows):
    """The rows that the database names. A dropped row stays on the disk until `settle`."""

    def __init__(self, path: Path, named: Iterable[PastRow]) -> None:
        """`named` are the rows in the database; files of other rows are deleted."""
        super().__init__(path)
        self._named = list(named)
        self.unneeded: list[PastRow] = []  # deleted once the database does not name them any more

    def stored(self) -> Iterable[tuple[PastRow, ScaledRow]]:
        """Return the named rows, and delete all other files."""
        named = {self._file(past): past for past in self._named}
        for file in self.path.iterdir():
            if file not in named:
                file.unlink()
        for file, past in named.items():
            row = ScaledRow(*read_scaled_row(file))
            if is_finite(row.values):
                yield past, row
            else:  # an older version of the server did not check its rows
                log.warning("history row %s is not finite and is ignored", file.name)

    def drop(self, past: PastRow) -> None:
        """Note that a row is not needed after the next transaction."""
        self.unneeded.append(past)

    def sync(self) -> None:
        """Make the names of new files durable; their content is already."""
        sync_path(self.path)

    def settle(self) -> None:
        """Delete the rows that the last transaction stopped naming."""
        for past in self.unneeded:
            super().drop(past)
        self.unneeded.clear()


class DurableHistory:
    """The federation's history, and the late rows that will join it after the round under way.

    A late row is written in the aggregator's thread. It joins the history in that thread or, after
    a commit, in the event loop's.
    """

    def __init__(
        self,
        store: Store,
        layers: Sequence[int],
        settings: HistorySettings,
        rule_loss: LossOfRule = "before",
    ) -> None:
        """`layers` are the sizes of the model's layers. Late rows have the loss `rule_loss`."""
        self._rule_loss: LossOfRule = rule_loss
        self._files = CommittedRows(store.folder / "history", store.history_rows())
        self._settings = settings
        self._revoked = set(store.revoked())
        self._left_out = rounds_left_out(store)
        self._lock = Lock()  # of the two lists below
        # Rows on the disk that are not in the history yet: first without a name in the database,
        # then with it.
        self._late: list[tuple[PastRow, ScaledRow]] = []
        self._named: list[tuple[PastRow, ScaledRow]] = []
        self.history = History(layers, self._files, settings.precision)

    def wants(self, client: str, round_number: int, version: int) -> bool:
        """Return whether a late update of this round may represent its client.

        `version` is the round under way. The update must be newer than the client's row.
        """
        with self._lock:
            rows = [past for past, _ in (*self._late, *self._named)]
            rows += self.history.rows().values()
        newest = max((past.round for past in rows if past.client == client), default=-1)
        limit = self._settings.keep_rounds
        is_recent = limit is None or version - round_number <= limit
        counts = client not in self._revoked and round_number not in self._left_out
        return newest < round_number < version and is_recent and counts

    def shut_out(self, client: str) -> None:
        """Accept no row of a revoked client any more; the next commit evicts its row."""
        self._revoked.add(client)

    def revoked(self) -> frozenset[str]:
        """Return the clients whose rows must not be used, although they may still exist."""
        return frozenset(self._revoked)

    def write_late(self, update: StoredUpdate, row: Row) -> None:
        """Write the row of a late update, which counts from the next round on.

        The round under way may use the client's older row.
        """
        loss = loss_for_rule(update.report, self._rule_loss)
        past = PastRow(update.client, update.round, loss, update.report.samples)
        stored_row = self.history.write(past, row)
        self._files.sync()
        with self._lock:
            self._late.append((past, stored_row))

    def late_is_named(self, update: StoredUpdate) -> None:
        """Note that a transaction has named the row of a late update."""
        with self._lock:
            for index, (past, _) in enumerate(self._late):
                if (past.client, past.round) == (update.client, update.round):
                    self._named.append(self._late.pop(index))
                    return

    def make_room(self, version: int) -> list[str]:
        """Evict rows that are too old, too many, or of revoked clients; return whose they are.

        All other rows are on the disk when this returns.
        """
        surplus = self.history.surplus(
            version, rounds=self._settings.keep_rounds, size_bytes=self._settings.keep_bytes
        )
        revoked = sorted(self._revoked & self.history.rows().keys() - set(surplus))
        evicted = [*surplus, *revoked]
        for client in evicted:
            self.history.discard(client)
        self._files.sync()
        return evicted

    def unneeded(self) -> list[PastRow]:
        """Return the rows that the next transaction must not name; `settle` deletes their files."""
        return list(self._files.unneeded)

    def settle(self) -> None:
        """Add the named late rows to the history, and delete files that nothing names."""
        with self._lock:
            for past, row in self._named:
                current = self.history.rows().get(past.client)
                if current is None or current.round < past.round:
                    self.history.install(past, row)
                elif current.round > past.round:  # of the same round: it is the same file
                    self._files.drop(past)
            self._named.clear()
            self._files.settle()
