"""Two servers with one PostgreSQL database, and the same clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, until
from tests.support.postgresql import PostgreSQL


@pytest.fixture
def fleets(tmp_path: Path) -> Iterator[list[Fleet]]:
    """Two federations, each in its own folder."""
    pair = [Fleet(tmp_path / name) for name in ("first", "second")]
    try:
        yield pair
    finally:
        for fleet in pair:
            fleet.end()


def test_two_federations_train_in_one_database_and_survive_a_kill(
    fleets: list[Fleet], postgresql: PostgreSQL
) -> None:
    url = postgresql.new_database()
    options: list[dict[str, str]] = [{}, {"database_schema": "fleet_2"}]
    for fleet, option in zip(fleets, options, strict=True):
        fleet.folder.mkdir()
        fleet.init()
        fleet.start_server(rounds=10_000, database=url, **option)
        for name in ("a", "b"):
            fleet.start_client(name)
    for fleet in fleets:
        until(lambda fleet=fleet: fleet.status().version >= 2, "two rounds")
        fleet.kill_server()
    for fleet, option in zip(fleets, options, strict=True):
        fleet.start_server(rounds=10_000, database=url, **option)
        version = fleet.status().version
        assert version >= 2
        until(lambda fleet=fleet, seen=version: fleet.status().version > seen, "another round")
    assert fleets[0].status().federation_id != fleets[1].status().federation_id
    fleets[1].stop_server()
    words = ["server", "--check", "--state-dir", str(fleets[1].state), "--database", url]
    done = fleets[1].run(*words, "--set", "database_schema=fleet_2")
    assert done.returncode == 0, done.stderr


def test_a_second_server_on_a_used_database_names_the_setting(
    fleets: list[Fleet], postgresql: PostgreSQL
) -> None:
    url = postgresql.new_database()
    for fleet in fleets:
        fleet.folder.mkdir()
        fleet.init()
    fleets[0].start_server(database=url)
    words = ["server", "--listen", fleets[1].address, "--state-dir", str(fleets[1].state)]
    words += ["--model", str(fleets[1].folder / "model.safetensors"), "--set", "http.port=0"]
    done = fleets[1].run(*words, "--database", url)
    assert done.returncode != 0
    assert "in use by another server" in done.stderr
    assert "--set database_schema=NAME" in done.stderr


@pytest.mark.parametrize("forgotten", ["database_schema", "database"])
def test_a_server_that_is_started_without_its_schema_or_database_deletes_nothing(
    fleets: list[Fleet], postgresql: PostgreSQL, forgotten: str
) -> None:
    fleet, settings = fleets[0], {"database": postgresql.new_database()}
    settings["database_schema"] = "fleet_2"
    fleet.folder.mkdir()
    fleet.init()
    fleet.start_server(rounds=2, **settings)
    for name in ("a", "b"):
        fleet.start_client(name)
    fleet.wait_clients()
    fleet.stop_server()
    before = sorted(path.name for path in (fleet.state / "models").iterdir())
    words = ["server", "--listen", fleet.address, "--state-dir", str(fleet.state)]
    words += ["--model", str(fleet.folder / "model.safetensors"), "--set", "http.port=0"]
    if forgotten == "database_schema":
        words += ["--set", f"database={settings['database']}"]
    refused = fleet.run(*words)
    assert refused.returncode == 3
    assert "has the models of a federation" in refused.stderr
    assert sorted(path.name for path in (fleet.state / "models").iterdir()) == before
    fleet.start_server(rounds=2, **settings)
    assert fleet.status().version == 2
