"""The store migrates older state directories, refuses newer ones, and names history rows."""

from __future__ import annotations

import sqlite3
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from fairfleet.common.errors import StateDirError
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Model
from fairfleet.server.aggregation.history import History, HistorySettings
from fairfleet.server.app import explain_disk_errors
from fairfleet.server.rounds.selection import Candidate
from fairfleet.server.rounds.state_machine import Round, UpdateStored
from fairfleet.server.rules import PastRow
from fairfleet.server.storage.client_queries import (
    first_losses,
    initial_losses,
    past_candidates,
    update_counts,
)
from fairfleet.server.storage.evaluation_queries import (
    evaluation_write,
    evaluations_of,
    newest_evaluations,
    recorded_evaluations,
)
from fairfleet.server.storage.files.history_files import DurableHistory, FileRows
from fairfleet.server.storage.files.tensor_files import TensorFiles
from fairfleet.server.storage.schema import SCHEMA_VERSION
from fairfleet.server.storage.store import Store, StoredUpdate
from tests.support.postgresql import PostgreSQL

LAYERS = [3, 5]
REPORT = TrainReport(samples=7, loss_before=0.5, loss_after=0.1, steps=1, learning_rate=0.1)


def row(value: float) -> np.ndarray:
    return np.full(8, value, np.float32)


def update(client: str, number: int) -> StoredUpdate:
    return StoredUpdate(number, client, bytes([number] * 32), "raw32", 32, REPORT, None)


@pytest.fixture
def store(tmp_path: Path, database: str | None) -> Iterator[Store]:
    store = Store(tmp_path / "state", database)
    store.create("test", Model.of({"w": np.zeros(8, np.float32)}), bytes(32))
    yield store
    store.close()


def reopened(store: Store, **keeping: object) -> DurableHistory:
    return DurableHistory(store, LAYERS, HistorySettings.model_validate(keeping))


@pytest.mark.parametrize("value", [1e6, 3.4e38, 1e-30, 0.5])
def test_a_float16_row_of_any_magnitude_is_found_again_after_a_restart(
    store: Store, value: float
) -> None:
    past = reopened(store, precision="float16")
    past.history.put("ann", 1, row(value), loss=0.5, samples=7)
    past.write_late(update("bob", 1), row(-value))
    store.write(store.history_write([update("ann", 1), update("bob", 1)]))
    past.late_is_named(update("bob", 1))
    past.settle()
    for one in (past, reopened(store, precision="float16")):
        np.testing.assert_allclose(one.history.row("ann"), row(value), rtol=2.0**-11)
        np.testing.assert_allclose(one.history.row("bob"), row(-value), rtol=2.0**-11)
        assert np.isfinite(one.history.products(["ann", "bob"])).all()


def test_an_update_is_read_by_its_key_without_the_others_of_its_round(
    store: Store,
) -> None:
    for number in (2, 3):
        store.write(*(store.update_write(update(client, number)) for client in ("ann", "bob")))
    store.write(
        lambda connection: connection.exec_driver_sql(
            "update updates set report = '' where client = 'bob'"
        )
    )
    assert store.update_of("ann", 3) == update("ann", 3)
    assert store.update_of("ann", 4) is None
    assert store.update_of("cem", 3) is None


def test_a_row_that_is_written_twice_is_not_reported_as_a_full_disk(store: Store) -> None:
    store.write(store.update_write(update("ann", 3)))
    with pytest.raises(sa.exc.IntegrityError), explain_disk_errors(store.folder):
        store.write(store.update_write(update("ann", 3)))


def test_a_state_directory_of_version_1_is_migrated_and_its_history_kept(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    store = Store(folder)
    store.create("test", Model.of({"w": np.zeros(8, np.float32)}), bytes(32))
    store.record([], Round(1), store.update_write(update("ann", 0)))
    store.close()
    with sqlite3.connect(folder / "federation.db") as database:
        database.execute("DROP TABLE history")
        database.execute("UPDATE meta SET value = '1' WHERE key = 'schema_version'")
    FileRows(folder / "history").put(PastRow("ann", 0), row(1))
    FileRows(folder / "history").put(PastRow("bob", 0), row(2))  # Its round was not committed.
    store = Store(folder)
    try:
        assert store.history_rows() == [PastRow("ann", 0, 0.5, 7.0)]
        np.testing.assert_array_equal(reopened(store).history.row("ann"), row(1))
        assert [file.name for file in (folder / "history").iterdir()] == ["ann@0.npy"]
    finally:
        store.close()


def test_a_state_directory_of_version_2_gets_the_tables_of_measured_steps_as_they_are_today(
    tmp_path: Path,
) -> None:
    tables = ("trials", "measures", "cut_off")
    store = Store(tmp_path)
    store.create("test", Model.of({"w": np.zeros(8, np.float32)}), bytes(32))
    store.close()
    with sqlite3.connect(tmp_path / "federation.db") as database:
        today = {
            table: database.execute(f"PRAGMA table_info({table})").fetchall() for table in tables
        }
        for table in tables:
            database.execute(f"DROP TABLE {table}")
        database.execute("UPDATE meta SET value = '2' WHERE key = 'schema_version'")
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "federation.db") as database:
        migrated = {
            table: database.execute(f"PRAGMA table_info({table})").fetchall() for table in tables
        }
    assert migrated == today


def test_a_returning_late_client_is_looked_up_by_an_index(
    tmp_path: Path,
) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "federation.db") as database:  # Write it like version 3.
        database.execute("DROP INDEX cut_off_by_client")
        database.execute("UPDATE meta SET value = '3' WHERE key = 'schema_version'")
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "federation.db") as database:
        query = (
            "UPDATE cut_off SET loss_after = 1 "
            "WHERE client = 'ann' AND loss_after IS NULL AND round < 7"
        )
        plan = database.execute(f"EXPLAIN QUERY PLAN {query}").fetchall()
    assert [line[3] for line in plan] == [
        "SEARCH cut_off USING INDEX cut_off_by_client (client=? AND loss_after=?)"
    ]


def test_a_state_directory_of_version_4_gets_the_tables_of_tokens_as_they_are_today(
    tmp_path: Path,
) -> None:
    tables = ("tokens", "revoked_operators")
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "federation.db") as database:
        today = {
            table: database.execute(f"PRAGMA table_info({table})").fetchall() for table in tables
        }
        for table in tables:
            database.execute(f"DROP TABLE {table}")
        database.execute("UPDATE meta SET value = '4' WHERE key = 'schema_version'")
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "federation.db") as database:
        migrated = {
            table: database.execute(f"PRAGMA table_info({table})").fetchall() for table in tables
        }
    assert migrated == today
    assert all(today.values())


def test_a_state_directory_of_version_5_learns_of_bases_and_keeps_its_updates(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    store.write(store.update_write(update("ann", 3)))
    store.close()
    with sqlite3.connect(tmp_path / "federation.db") as database:
        today = database.execute("PRAGMA table_info(updates)").fetchall()
        database.execute("ALTER TABLE updates DROP COLUMN base")
        database.execute("UPDATE meta SET value = '5' WHERE key = 'schema_version'")
    store = Store(tmp_path)
    assert store.updates_of(3) == [update("ann", 3)]
    delta_coded = replace(update("bob", 3), base=bytes(range(32)))
    store.write(store.update_write(delta_coded))
    assert store.update_of("bob", 3) == delta_coded
    store.close()
    with sqlite3.connect(tmp_path / "federation.db") as database:
        assert database.execute("PRAGMA table_info(updates)").fetchall() == today


def test_an_incomplete_directory_is_created_again(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "federation.db") as database:
        database.execute("DELETE FROM meta")
    with pytest.raises(StateDirError, match="holds no federation"):
        Store(tmp_path, migrate=False)
    store = Store(tmp_path)
    assert not store.has_federation
    store.close()


@pytest.mark.parametrize("version", [0, SCHEMA_VERSION + 1])
def test_a_state_directory_of_another_version_is_refused_and_not_changed(
    tmp_path: Path, version: int
) -> None:
    Store(tmp_path).close()
    database = tmp_path / "federation.db"
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", [str(version)])
    with pytest.raises(
        StateDirError, match=f"schema version {version}; this server reads version {SCHEMA_VERSION}"
    ):
        Store(tmp_path)
    with sqlite3.connect(database) as connection:
        assert connection.execute(
            "SELECT value FROM meta WHERE key = 'schema_version'"
        ).fetchone() == (str(version),)


def test_a_row_counts_only_once_a_transaction_has_named_it(store: Store) -> None:
    past = reopened(store)
    past.history.put("ann", 1, row(1), loss=0.5, samples=7)
    store.write(store.history_write([update("ann", 1)]))
    past.settle()
    past.history.put("ann", 2, row(2), loss=0.4, samples=7)  # Then the server dies.
    again = reopened(store)
    assert again.history.rows() == {"ann": PastRow("ann", 1, 0.5, 7.0)}
    np.testing.assert_array_equal(again.history.row("ann"), row(1))


def test_an_older_row_never_replaces_a_newer_one(store: Store) -> None:
    store.write(store.history_write([update("ann", 5)]))
    store.write(store.history_write([update("ann", 4)]))
    assert [past.round for past in store.history_rows()] == [5]
    assert store.history_digest("ann", 5) == bytes([5] * 32)
    assert store.history_digest("ann", 4) is None


def test_a_late_update_waits_for_the_round_under_way_and_for_its_transaction(store: Store) -> None:
    past = reopened(store)
    past.history.put("ann", 1, row(1), loss=0.5, samples=7)
    assert past.wants("ann", 2, version=4)
    assert not past.wants("ann", 1, version=4)
    assert not past.wants("ann", 4, version=4)
    late = update("ann", 2)
    past.write_late(late, row(2))
    assert not past.wants("ann", 2, version=4)  # The row is stored already.
    past.settle()
    assert past.history.rows()["ann"].round == 1
    store.write(store.history_write([late]))
    past.late_is_named(late)
    past.settle()
    assert past.history.rows()["ann"] == PastRow("ann", 2, 0.5, 7.0)
    assert reopened(store).history.rows()["ann"].round == 2


def named_late(store: Store, past: DurableHistory, late: StoredUpdate) -> None:
    past.write_late(late, row(late.round))
    store.write(store.history_write([late]))
    past.late_is_named(late)


def test_a_late_update_that_came_twice_keeps_its_file(store: Store) -> None:
    past = reopened(store)
    for _ in range(2):
        named_late(store, past, update("ann", 2))
    past.settle()
    assert reopened(store).history.rows()["ann"].round == 2


def test_deleting_an_old_row_does_not_delete_the_late_row_that_replaces_it(
    store: Store,
) -> None:
    past = reopened(store, keep_rounds=3)
    past.history.put("ann", 1, row(1), loss=0.5, samples=7)
    store.write(store.history_write([update("ann", 1)]))
    named_late(store, past, update("ann", 4))  # A round is active.
    assert past.make_room(6) == ["ann"]
    store.write(store.history_write([], past.unneeded()))
    past.settle()
    assert past.history.rows()["ann"].round == 4
    assert [file.name for file in (store.folder / "history").iterdir()] == ["ann@4.npy"]
    assert reopened(store).history.rows() == past.history.rows()


def test_the_row_of_a_revoked_client_is_deleted_and_no_new_one_stored(store: Store) -> None:
    past = reopened(store)
    past.history.put("ann", 1, row(1), loss=0.5, samples=7)
    past.shut_out("ann")
    assert past.make_room(2) == ["ann"]
    assert not past.wants("ann", 2, version=3)
    store.revoke("bob", "stolen")
    assert not reopened(store).wants("bob", 2, version=3)


def test_the_history_can_be_read_while_rows_change() -> None:
    history, done = History([2]), threading.Event()

    def come_and_go() -> None:
        for k in range(3000):
            history.put(f"c{k % 50}", k, np.zeros(2, np.float32))
            history.discard(f"c{(k + 3) % 50}")
        done.set()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        other = threading.Thread(target=come_and_go)
        other.start()
        while not done.is_set():
            assert set(history.rows()) <= {f"c{k}" for k in range(50)}
        other.join()
    finally:
        sys.setswitchinterval(before)


def test_entries_that_are_too_old_or_too_many_are_dropped_oldest_first(store: Store) -> None:
    past = reopened(store, keep_rounds=10, keep_bytes=2 * 8 * 4)
    for client, number in (("ancient", 1), ("old", 12), ("newer", 13), ("newest", 14)):
        past.history.put(client, number, row(number), loss=0.5, samples=7)
    assert past.make_room(15) == ["ancient", "old"]
    assert set(past.history.rows()) == {"newer", "newest"}
    half = reopened(store, precision="float16", keep_bytes=2 * 8 * 4)
    for k in range(5):
        half.history.put(str(k), k, row(k), loss=0.5, samples=7)
    assert half.make_room(9) == ["0"]


def test_a_damaged_row_is_reported(store: Store) -> None:
    past = reopened(store)
    past.history.put("ann", 1, row(1), loss=0.5, samples=7)
    store.write(store.history_write([update("ann", 1)]))
    (store.folder / "history" / "ann@1.npy").write_bytes(b"nonsense")
    with pytest.raises(StateDirError, match=r"ann@1\.npy is damaged"):
        reopened(store)


def test_recorded_events_survive_a_restart(tmp_path: Path, database: str | None) -> None:
    store = Store(tmp_path / "state", database)
    store.create("test", Model.of({"w": np.zeros(8, np.float32)}), bytes(32))
    first = update("ann", 0)
    store.record([(Round(0), UpdateStored("ann"), Round(0))], Round(0), store.update_write(first))
    found = Evaluation(samples=5, loss=0.25, accuracy=0.5)
    store.record([], Round(0), evaluation_write(1, "ann", found, ""))
    store.revoke("bob", "why not")
    boot = store.next_boot()
    store.close()
    store = Store(tmp_path / "state", database)
    try:
        assert (store.federation, store.next_boot()) == ("test", boot + 1)
        assert store.updates_of(0) == [first]
        assert store.journal() == ['{"event": "UpdateStored", "client": "ann"}']
        assert evaluations_of(store, 1) == {"ann": found}
        assert newest_evaluations(store) == {"ann": (1, found)}
        [(version, client, evaluation)] = recorded_evaluations(store)
        assert (version, client, evaluation.accuracy) == (1, "ann", 0.5)
        assert update_counts(store, 1) == {"ann": (1, 0)}
        assert first_losses(store) == {"ann": 0.5}
        assert store.revoked() == {"bob": "why not"}
        assert past_candidates(store) == {"ann": Candidate("ann", last_round=0, loss=0.5)}
    finally:
        store.close()


def test_losses_on_the_initial_model_are_of_round_0_or_measured_later(
    tmp_path: Path, database: str | None
) -> None:
    store = Store(tmp_path / "state", database)
    store.create("test", Model.of({"w": np.zeros(8, np.float32)}), bytes(32))
    measured = {
        ("ann", 0): {},  # the loss of the received model, 0.5
        ("ann", 3): {"initial_loss": 9.0},
        ("bob", 2): {"initial_loss": 3.0},
        ("bob", 4): {"initial_loss": 7.0},
        ("cat", 5): {},
        ("dan", 0): {"loss_measurement": "batches"},
    }
    for (client, number), fields in measured.items():
        sent = update(client, number)
        report = sent.report.model_copy(update=fields)
        store.write(store.update_write(replace(sent, report=report)))
    try:
        assert initial_losses(store) == {"ann": 0.5, "bob": 3.0, "cat": 0.5}
    finally:
        store.close()


def test_a_second_server_is_refused_by_directory_and_by_database(
    tmp_path: Path, database: str | None
) -> None:
    store = Store(tmp_path / "state", database)
    try:
        with pytest.raises(StateDirError, match="in use by another server"):
            Store(tmp_path / "state", database)
        if database is not None:
            with pytest.raises(StateDirError, match="in use by another server"):
                Store(tmp_path / "elsewhere", database)
    finally:
        store.close()
    Store(tmp_path / "state", database).close()


def test_files_and_database_of_different_federations_are_not_mixed(
    tmp_path: Path, postgresql: PostgreSQL
) -> None:
    one, other = postgresql.new_database(), postgresql.new_database()
    Store(tmp_path / "one", one).close()
    Store(tmp_path / "other", other).close()
    with pytest.raises(StateDirError, match="belong to different federations"):
        Store(tmp_path / "one", other)
    Store(tmp_path / "one", one).close()


@pytest.mark.parametrize(
    "url", ["mysql://x/y", "nonsense", "postgresql+psycopg://nobody@127.0.0.1:1/none"]
)
def test_an_unusable_database_is_reported(tmp_path: Path, url: str) -> None:
    with pytest.raises(StateDirError, match="database"):
        Store(tmp_path / "state", url)


def test_an_update_is_quarantined_on_a_file_system_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise PermissionError("hard links are not supported")

    files = TensorFiles(tmp_path)
    (tmp_path / "update").write_bytes(b"chunks")
    monkeypatch.setattr("os.link", no_links)
    quarantined = files.quarantine("update")
    assert quarantined is not None
    assert (tmp_path / quarantined).read_bytes() == b"chunks"
    assert files.quarantine("update") == quarantined


def test_a_directory_whose_database_is_empty_keeps_its_models(tmp_path: Path) -> None:
    """As after an incomplete restore. After a crash in its creation there is only version 0."""
    model = Model.of({"w": np.zeros(8, np.float32)})
    store = Store(tmp_path / "state")
    store.files.write_model(0, model)
    store.close()
    store = Store(tmp_path / "state")
    store.create("birds", model, bytes(32))
    store.files.write_model(1, model)
    store.close()
    (tmp_path / "state" / "federation.db").write_bytes(b"")
    with pytest.raises(StateDirError, match="has no federation"):
        Store(tmp_path / "state")
    assert (tmp_path / "state" / "models" / "00000001.safetensors").exists()
