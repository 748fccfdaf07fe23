"""The folder of a federation: its lock, and the state of earlier versions that moves into it."""

from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from fairfleet.client.device.folder_lock import holder, try_lock
from fairfleet.client.update.error_feedback import StoredResidual
from fairfleet.client.update.federation_folder import (
    LOCK_SECONDS,
    PERSONAL,
    FederationIdentity,
    open_folder,
    take_over,
)
from fairfleet.client.update.spool import Spool, SpooledUpdate
from fairfleet.common.errors import BadRequest, StateDirError
from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model
from tests.support.flock_holder import flock_held

UPPER_CASE_UUID = "9CEA9170-673C-4512-8B66-39AF39717E95"
MODEL = Model.of({"w": np.zeros(50, np.float32)})
REPORT = TrainReport(samples=1, loss_before=1, loss_after=1, steps=1, learning_rate=1)


def federation(name: str = "ours") -> FederationIdentity:
    """Return a new federation of this name."""
    return FederationIdentity(name, str(uuid.uuid4()), MODEL.signature)


def never(seconds: float) -> None:
    """Fail: nothing is to be waited for."""
    raise AssertionError("the folder was locked")


def spooled_in(folder: Path, name: str = "ours", scale: float = 1.0) -> SpooledUpdate:
    """Leave an unsent update, and the residual of an earlier one, in a folder."""
    spool = Spool(folder)
    for number in range(2):
        trained = Model.of({"w": np.linspace(0, scale + number, 50, dtype=np.float32)})
        update = spool.write(
            MODEL,
            trained,
            REPORT,
            federation=name,
            round_number=number,
            model_digest="aa",
            codec="int8",
            error_feedback=True,
        )
        if number == 0:
            spool.settle(update, counted=True)
    return update


def make_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def files(folder: Path) -> set[str]:
    """Return the names of all files but locks."""
    return {path.name for path in folder.iterdir() if path.is_file() and "lock" not in path.name}


def test_each_federation_has_a_folder_of_its_own(tmp_path: Path) -> None:
    ours, theirs = federation(), federation()
    folders = [open_folder(tmp_path, each, never) for each in (ours, theirs)]
    assert [folder.path for folder in folders] == [tmp_path / ours.id, tmp_path / theirs.id]
    for folder in folders:
        folder.close()
    again = open_folder(tmp_path, ours, never)
    assert again.path == tmp_path / ours.id
    again.close()


def test_a_server_without_ids_has_the_folder_of_earlier_versions(tmp_path: Path) -> None:
    old = FederationIdentity("ours", "", MODEL.signature)
    folder = open_folder(tmp_path, old, never)
    assert folder.path == tmp_path
    folder.close()


@pytest.mark.parametrize("text", ["../elsewhere", "x", "/etc", UPPER_CASE_UUID])
def test_an_id_that_is_no_uuid_makes_no_folder(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadRequest, match="expected a UUID"):
        open_folder(tmp_path, FederationIdentity("ours", text, MODEL.signature), never)
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_is_told_who_uses_the_folder(tmp_path: Path) -> None:
    ours, times = federation(), iter([0.0, 1.0, LOCK_SECONDS / 2, LOCK_SECONDS + 1])
    folder, waits = open_folder(tmp_path, ours, never), list[float]()
    folder.close()
    with (
        flock_held(folder.path / "lock", writes_pid=True) as other,
        pytest.raises(StateDirError, match=f"another process \\({other.pid}\\).*--state-dir"),
    ):
        open_folder(tmp_path, ours, waits.append, lambda: next(times))
    assert len(waits) == 2  # as long as the time was not over


def test_the_end_of_the_other_process_frees_the_folder(tmp_path: Path) -> None:
    ours = federation()
    first = open_folder(tmp_path, ours, never)
    assert holder(first.path) == str(os.getpid())
    second = open_folder(tmp_path, ours, lambda seconds: first.close())
    assert try_lock(second.path) is None
    second.close()


def test_a_lock_is_free_although_a_forked_process_has_its_file_open(tmp_path: Path) -> None:
    """The workers of a DataLoader inherit it, and may live as long as the client."""
    ours = federation()
    first = open_folder(tmp_path, ours, never)
    worker = os.fork()
    if worker == 0:
        time.sleep(600)
    try:
        first.close()
        open_folder(tmp_path, ours, never).close()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_a_killed_process_frees_the_folder_although_its_workers_live_on(tmp_path: Path) -> None:
    ours, (ready, said) = federation(), os.pipe()
    client = os.fork()
    if client == 0:
        folder = open_folder(tmp_path, ours, never)
        worker = os.fork()
        if worker:
            os.write(said, str(worker).encode())
        time.sleep(600)
        folder.close()
    worker = int(os.read(ready, 32))
    try:
        os.kill(client, signal.SIGKILL)
        os.waitpid(client, 0)
        open_folder(tmp_path, ours, never).close()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(ready)
        os.close(said)


# ---- the state of earlier versions -------------------------------------------------------------


def test_the_first_join_takes_over_everything_of_the_federation(tmp_path: Path) -> None:
    update, ours = spooled_in(tmp_path), federation()
    MODEL.save(tmp_path / PERSONAL)
    names = files(tmp_path)
    folder = open_folder(tmp_path, ours, never)
    assert files(folder.path) >= names
    assert files(tmp_path) == set()
    assert Spool(folder.path).find_unsent("ours") == update
    assert StoredResidual(folder.path).of("ours", MODEL.signature, 1) is not None
    folder.close()


def test_a_federation_takes_nothing_of_another_one(tmp_path: Path) -> None:
    update, ours, theirs = spooled_in(tmp_path), federation(), federation("theirs")
    MODEL.save(tmp_path / PERSONAL)
    before = files(tmp_path)
    folder = open_folder(tmp_path, theirs, never)
    assert files(tmp_path) == before
    assert take_over(tmp_path, open_folder(tmp_path, ours, never).path, ours) == []
    assert Spool(tmp_path / ours.id).find_unsent("ours") == update
    folder.close()


def test_a_second_federation_of_the_same_name_finds_nothing_left(tmp_path: Path) -> None:
    spooled_in(tmp_path)
    first, second = federation(), federation()
    open_folder(tmp_path, first, never).close()
    open_folder(tmp_path, second, never).close()
    assert (tmp_path / first.id / "update.json").exists()
    assert not (tmp_path / second.id / "update.json").exists()


def test_files_of_several_federations_in_one_folder_are_told_apart(tmp_path: Path) -> None:
    """Two federations on one device used to overwrite each other's update, but not all files."""
    spooled_in(tmp_path, "ours")
    (tmp_path / "residual.pending").unlink()
    header = (tmp_path / "update.json").read_text().replace('"ours"', '"theirs"')
    (tmp_path / "update.json").write_text(header)
    ours, theirs = federation(), federation("theirs")
    open_folder(tmp_path, ours, never).close()
    assert (tmp_path / ours.id / "residual").exists()
    assert not (tmp_path / ours.id / "update.json").exists()
    open_folder(tmp_path, theirs, never).close()
    assert Spool(tmp_path / theirs.id).find_unsent("theirs") is not None


def test_a_personal_model_alone_goes_to_the_first_federation(tmp_path: Path) -> None:
    MODEL.save(tmp_path / PERSONAL)
    ours = federation()
    open_folder(tmp_path, ours, never).close()
    assert (tmp_path / ours.id / PERSONAL).exists()


def test_newer_files_of_the_federation_are_not_replaced(tmp_path: Path) -> None:
    ours = federation()
    folder = open_folder(tmp_path, ours, never)
    update = spooled_in(folder.path)
    spooled_in(tmp_path)
    for name in files(tmp_path):
        os.utime(tmp_path / name, ns=(1, 1))
    assert take_over(tmp_path, folder.path, ours) == []
    assert Spool(folder.path).find_unsent("ours") == update
    folder.close()


@pytest.mark.parametrize("is_sent", [True, False])
def test_the_update_of_a_version_that_was_gone_back_to_is_taken_over(
    tmp_path: Path, is_sent: bool
) -> None:
    ours = federation()
    folder = open_folder(tmp_path, ours, never)
    earlier = spooled_in(folder.path)
    if is_sent:
        Spool(folder.path).settle(earlier, counted=True)
    for name in files(folder.path):
        os.utime(folder.path / name, ns=(1, 1))
    update = spooled_in(tmp_path, scale=3.0)
    take_over(tmp_path, folder.path, ours)
    spool = Spool(folder.path)
    assert spool.find_unsent("ours") == spool.unsettled("ours") == update
    folder.close()


def test_a_take_over_that_was_killed_is_completed(tmp_path: Path) -> None:
    update, ours = spooled_in(tmp_path), federation()
    MODEL.save(tmp_path / PERSONAL)
    order = take_over(tmp_path, make_folder(tmp_path / "trial"), ours)
    for count in range(len(order) + 1):
        home = make_folder(tmp_path / str(count))
        folder = make_folder(home / ours.id)
        for name in order:
            target = folder if name in order[:count] else home
            (target / name).write_bytes((tmp_path / "trial" / name).read_bytes())
        open_folder(home, ours, never).close()
        assert files(folder) >= set(order)
        assert Spool(folder).find_unsent("ours") == Spool(folder).unsettled("ours") == update


def test_nothing_moves_while_a_client_uses_the_old_folder(tmp_path: Path) -> None:
    spooled_in(tmp_path)
    old = open_folder(tmp_path, FederationIdentity("ours", "", MODEL.signature), never)
    ours = federation()
    open_folder(tmp_path, ours, never).close()
    assert (tmp_path / "update.json").exists()
    old.close()
    open_folder(tmp_path, ours, never).close()
    assert (tmp_path / ours.id / "update.json").exists()
