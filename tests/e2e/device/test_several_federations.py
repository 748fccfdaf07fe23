"""One device in several federations, and what it keeps of each."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairfleet.client.device.folder_lock import holder
from tests.support.fleet import Fleet, until
from tests.support.flock_holder import flock_held

SIZE = 50_000
ALONE = {"round__minimum_clients": 1}


@pytest.fixture
def fleets(tmp_path: Path) -> Iterator[tuple[Fleet, Fleet]]:
    """Two federations of the same name, whose clients have one state directory."""
    pair = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        pair.append(Fleet(tmp_path / name))
    (tmp_path / "first" / "clients").mkdir()
    (tmp_path / "second" / "clients").symlink_to(tmp_path / "first" / "clients")
    try:
        yield pair[0], pair[1]
    finally:
        for fleet in pair:
            fleet.end()


def federation_id(fleet: Fleet) -> str:
    """Return the id in the server's database."""
    return str(fleet.query("select value from meta where key = 'federation_id'")[0][0])


def test_two_federations_use_one_device_and_one_client_name_at_the_same_time(
    fleets: tuple[Fleet, Fleet],
) -> None:
    for number, fleet in enumerate(fleets, start=1):
        fleet.init(SIZE)
        fleet.start_server(rounds=6, exit_when_finished=True)
        for name in ("a", "b"):
            fleet.start_client(name, shift=number, samples=10 * number)
    for fleet in fleets:
        assert fleet.wait_clients() == {"a": 0, "b": 0}
        fleet.prove(6)
        assert all(record["attempts"] == 1 for record in fleet.records())
        for log in ("a.log", "b.log", "server.log"):
            assert "WARNING" not in fleet.log(log), fleet.log(log)
    folders = {path.parent.name for path in (fleets[0].folder / "clients" / "a").glob("*/lock")}
    assert folders == {federation_id(fleet) for fleet in fleets}


def leave_an_unsent_update(fleet: Fleet, name: str) -> Path:
    """Let a client train while its server is down, end it, and return the folder of its update."""
    events = fleet.watch()
    fleet.start_client(name, steps=40, step_seconds=0.05)
    until(lambda: any(event.HasField("training_progress") for event in events), "the training")
    folder = fleet.client_folder(name)
    fleet.kill_server()
    until((folder / "update.json").exists, "the update on the client's disk")
    fleet.kill_client(name)
    return folder


def test_an_unsent_update_of_an_earlier_version_is_taken_over_and_sent(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=1, **ALONE)
    folder = leave_an_unsent_update(fleet, "device")
    for path in folder.iterdir():  # as versions without federation ids kept it
        if path.name in ("update.json", "update.chunks"):
            path.rename(folder.parent / path.name)
        else:
            path.unlink()
    folder.rmdir()
    fleet.start_server(rounds=1, **ALONE)
    fleet.start_client("device", trouble="hang")
    fleet.wait_for_version(1)
    assert fleet.client_folder("device") == folder
    assert not (folder.parent / "update.json").exists()


def test_a_process_waits_for_another_one_that_uses_its_folder(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=1, **ALONE)
    folder = fleet.folder / "clients" / "device" / fleet.status().federation_id
    folder.mkdir(parents=True)
    with flock_held(folder / "lock", writes_pid=True) as other:
        fleet.start_client("device")
        waiting = f"is in use by process {other.pid}; waiting"
        until(lambda: waiting in fleet.log("device.log"), "the second process to wait")
        assert fleet.status().connected == 1
    fleet.wait_for_version(1)


def test_a_replacement_gets_the_folder_when_the_former_process_has_ended(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=2, lease_seconds=2, **ALONE)
    former = fleet.start_client("device", steps=1200, step_seconds=0.05)
    until(lambda: fleet.status().asked == 1, "the former process to train")
    fleet.start_client("device")
    assert former.wait(30) == 5
    fleet.wait_for_version(2)
    assert fleet.wait_clients() == {"device": 0}
    fleet.prove(2)


def test_a_client_goes_on_in_the_federation_that_replaces_its_own(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=1000, **ALONE)
    fleet.start_client("device", steps=2, step_seconds=0.05)
    fleet.wait_for_version(2)
    first = fleet.client_folder("device")
    fleet.kill_server()
    fleet.state.rename(fleet.folder / "former-state")
    fleet.start_server(rounds=3, exit_when_finished=True, **ALONE)
    assert fleet.wait_clients() == {"device": 0}
    assert first.name in fleet.log("device.log")
    assert "this client goes on there" in fleet.log("device.log")
    fleet.prove(3)
    folders = {path.name for path in first.parent.iterdir() if path.is_dir()}
    assert folders == {first.name, federation_id(fleet)}


def test_an_update_waits_while_another_federation_refuses_its_client(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=1, **ALONE)
    folder = leave_an_unsent_update(fleet, "device")
    former = fleet.folder / "former-state"
    fleet.state.rename(former)
    model, size = fleet.folder / "model.safetensors", fleet.size
    model.unlink()
    fleet.init(2 * size)
    fleet.start_server(rounds=1, **ALONE)
    fleet.size = size
    refused = fleet.start_client("device")
    assert refused.wait(30) == 4
    assert "is not this federation's" in fleet.log("device.log")
    fleet.kill_server()
    fleet.state.rename(fleet.folder / "other-state")
    former.rename(fleet.state)
    assert (folder / "update.json").exists()
    fleet.start_server(rounds=1, **ALONE)
    fleet.start_client("device", trouble="hang")
    fleet.wait_for_version(1)


def test_an_operator_sees_the_id_of_the_federation(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server()
    assert federation_id(fleet) in fleet.run("status", "--server", fleet.address).stdout


def test_a_client_whose_folder_is_deleted_makes_it_again_and_goes_on(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=1000, round__quorum=0.5, **ALONE)
    fleet.start_client("device", steps=4, step_seconds=0.02)
    fleet.start_client("other", steps=4, step_seconds=0.02)
    fleet.wait_for_version(1)
    folder = fleet.client_folder("device")
    shutil.rmtree(folder.parent)
    again = f"{folder} was deleted while it is in use; it is made again"
    until(lambda: again in fleet.log("device.log"), "the new folder")
    fleet.wait_for_version(fleet.version() + 2)
    newest = fleet.records()[-1]["contributions"]
    assert "device" in {contribution["client"] for contribution in newest}
    assert holder(folder) == str(fleet.clients["device"].pid)


def test_an_update_that_was_deleted_before_it_was_sent_is_made_again(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=1, exit_when_finished=True, **ALONE)
    events = fleet.watch()
    fleet.start_client("device", steps=40, step_seconds=0.05)
    until(lambda: any(event.HasField("training_progress") for event in events), "the training")
    folder = fleet.client_folder("device")
    fleet.kill_server()
    until((folder / "update.json").exists, "the update on the client's disk")
    shutil.rmtree(folder)
    fleet.start_server(rounds=1, exit_when_finished=True, **ALONE)
    fleet.start_client("other")
    assert fleet.wait_clients() == {"device": 0, "other": 0}
    assert "its file on this disk was deleted" in fleet.log("device.log")


def test_a_client_that_cannot_write_its_update_names_the_folder_and_not_its_task(
    fleet: Fleet,
) -> None:
    fleet.init()
    fleet.start_server(rounds=1000, round__quorum=0.5, **ALONE)
    folder = fleet.folder / "clients" / "device" / fleet.status().federation_id
    (folder / "update.chunks").mkdir(parents=True)  # as unwritable as on a full disk
    fleet.start_client("other", steps=2, step_seconds=0.05)  # the rounds go on with it
    client = fleet.start_client("device")
    assert client.wait(60) == 3
    ended = " ".join(fleet.log("device.log").split())
    assert f"error: cannot keep unsent updates in {folder}: Is a directory. Give" in ended
    assert fleet.log("server.log").count("/device: StateDirError") == 3
