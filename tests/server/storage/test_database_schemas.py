"""Several federations in one PostgreSQL database, each in a schema of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from fairfleet.common.errors import StateDirError
from fairfleet.common.tensors import Model
from fairfleet.server.settings import ServerSettings
from fairfleet.server.storage.schema import SCHEMA_VERSION
from fairfleet.server.storage.store import Store
from tests.support.postgresql import PostgreSQL

MODEL = Model.of({"w": np.zeros(8, np.float32)})


def created(folder: Path, url: str, schema: str | None) -> Store:
    """Return the store of a new federation, named like its folder."""
    store = Store(folder, url, schema=schema)
    store.create(folder.name, MODEL, bytes(32))
    return store


def execute(url: str, *statements: str) -> None:
    """Execute SQL as the owner of the database."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(sa.text(statement))
    engine.dispose()


def test_federations_share_a_database_at_the_same_time(
    tmp_path: Path, postgresql: PostgreSQL
) -> None:
    url, schemas = postgresql.new_database(), (None, "fleet_2", "fleet_3")
    stores = [created(tmp_path / f"f{k}", url, schema) for k, schema in enumerate(schemas)]
    for store in stores:
        store.revoke(f"only-in-{store.federation}", "test")
    ids = {store.federation_id for store in stores}
    for store in stores:
        store.close()
    assert len(ids) == 3
    for k, schema in enumerate(schemas):
        store = Store(tmp_path / f"f{k}", url, schema=schema)
        assert store.federation == f"f{k}"
        assert store.revoked() == {f"only-in-f{k}": "test"}
        store.close()


@pytest.mark.parametrize(
    ("first", "second"), [("fleet_2", "fleet_2"), (None, "public"), ("public", None)]
)
def test_servers_of_the_same_schema_exclude_each_other(
    tmp_path: Path, postgresql: PostgreSQL, first: str | None, second: str | None
) -> None:
    url = postgresql.new_database()
    store = created(tmp_path / "one", url, first)
    with pytest.raises(StateDirError, match=r"in use by another server.*database_schema=NAME"):
        Store(tmp_path / "two", url, schema=second)
    store.close()
    Store(tmp_path / "one", url, schema=second).close()


def test_a_second_federation_learns_which_setting_it_needs(
    tmp_path: Path, postgresql: PostgreSQL
) -> None:
    url = postgresql.new_database()
    created(tmp_path / "one", url, None).close()
    with pytest.raises(StateDirError, match=r"different federations.*database_schema=NAME"):
        Store(tmp_path / "two", url)
    created(tmp_path / "three", url, "three").close()
    with pytest.raises(StateDirError, match=r"schema three\) belong to different federations"):
        Store(tmp_path / "one", url, schema="three")


def test_only_the_tables_of_the_own_schema_are_migrated(
    tmp_path: Path, postgresql: PostgreSQL
) -> None:
    url = postgresql.new_database()
    created(tmp_path / "one", url, None).close()
    created(tmp_path / "two", url, "two").close()
    execute(
        url,
        "update two.meta set value = '7' where key = 'schema_version'",
        "drop table two.clients",
        "alter table two.measures drop column strictly_improved",
        "alter table two.rounds drop column undone_by",
    )
    store = Store(tmp_path / "two", url, schema="two")
    assert store.get_meta("schema_version") == str(SCHEMA_VERSION)
    store.close()
    execute(url, "select client from two.clients", "select undone_by from two.rounds")


def test_a_check_creates_no_schema(tmp_path: Path, postgresql: PostgreSQL) -> None:
    url = postgresql.new_database()
    created(tmp_path / "one", url, None).close()
    with pytest.raises(StateDirError, match="holds no federation"):
        Store(tmp_path / "one", url, schema="absent", migrate=False)
    with pytest.raises(sa.exc.ProgrammingError, match="absent"):
        execute(url, "create table absent.x (y int)")


def test_a_user_who_may_create_no_schema_is_told_so(tmp_path: Path, postgresql: PostgreSQL) -> None:
    url = postgresql.new_database()
    execute(url, "create role limited login")
    try:
        with pytest.raises(StateDirError, match="permission denied"):
            Store(tmp_path / "one", url.replace("tester@", "limited@"), schema="fleet_2")
        execute(url, "create schema fleet_2 authorization limited")
        created(tmp_path / "one", url.replace("tester@", "limited@"), "fleet_2").close()
    finally:
        execute(url, "drop owned by limited", "drop role limited")


@pytest.mark.parametrize(
    "name", ["Fleet", "pg_fleet", "information_schema", "1st", 'a"; drop table meta; --', "a" * 64]
)
def test_a_name_that_is_no_schema_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="for example fleet_2"):
        ServerSettings(database="postgresql+psycopg://x@y/z", database_schema=name)


def test_a_schema_needs_a_database() -> None:
    with pytest.raises(ValueError, match="set database as well"):
        ServerSettings(database_schema="fleet_2")


@pytest.mark.parametrize("other", [{}, {"schema": "fleet_3"}, {"database": None}])
def test_a_directory_whose_database_is_forgotten_keeps_its_models(
    tmp_path: Path, postgresql: PostgreSQL, other: dict[str, str | None]
) -> None:
    folder, url = tmp_path / "state", postgresql.new_database()
    created(folder, url, "fleet_2").close()
    for _ in range(2):  # the first try may leave an empty schema or file
        with pytest.raises(StateDirError, match="has the models of a federation"):
            Store(folder, **{"database": url, "schema": None} | other)  # type: ignore[arg-type]
    store = Store(folder, url, schema="fleet_2")
    assert store.federation == "state"
    assert (folder / "models" / "00000000.safetensors").exists()
    store.close()


def test_a_creation_that_was_interrupted_can_be_repeated(
    tmp_path: Path, postgresql: PostgreSQL
) -> None:
    folder, url = tmp_path / "state", postgresql.new_database()
    store = Store(folder, url, schema="fleet_2")
    store.files.write_model(0, MODEL)
    store.close()
    created(folder, url, "fleet_2").close()
