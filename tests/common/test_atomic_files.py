"""Atomic writes: a file has its earlier or its new content, and no temporary file remains."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fairfleet.common.atomic_files import Sync, fsync_path, write_atomically


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fail(temp_path: Path) -> None:
    temp_path.write_bytes(b"half")
    raise RuntimeError("the disk is full")


@pytest.mark.parametrize("sync", Sync)
def test_the_new_content_replaces_the_earlier_one(tmp_path: Path, sync: Sync) -> None:
    for content in (b"first", b"second"):
        write_atomically(tmp_path / "file", content, sync=sync)
        assert (tmp_path / "file").read_bytes() == content
    assert names(tmp_path) == {"file"}


def test_the_file_keeps_its_content_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"first")

    def write(temp_path: Path) -> None:
        temp_path.write_bytes(b"second")
        assert temp_path.parent == tmp_path
        assert path.read_bytes() == b"first"

    write_atomically(path, write)
    assert path.read_bytes() == b"second"


def test_a_failed_write_changes_nothing_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"first")
    with pytest.raises(RuntimeError, match="full"):
        write_atomically(tmp_path / "file", fail)
    assert (tmp_path / "file").read_bytes() == b"first"
    assert names(tmp_path) == {"file"}


@pytest.mark.parametrize(
    ("sync", "expected"),
    [
        (Sync.NOTHING, []),
        (Sync.FILE, ["file.new"]),
        (Sync.FILE_AND_FOLDER, ["file.new", "folder"]),
    ],
)
def test_the_file_is_synced_before_it_gets_its_name_and_the_folder_afterwards(
    tmp_path: Path, sync: Sync, expected: list[str]
) -> None:
    path, synced = tmp_path / "folder" / "file", list[str]()
    path.parent.mkdir()

    def fsync(synced_path: Path) -> None:
        assert path.exists() == (synced_path == path.parent)
        fsync_path(synced_path)
        synced.append(synced_path.name)

    write_atomically(path, b"content", sync=sync, fsync=fsync)
    assert synced == expected


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_a_private_file_is_never_open_to_others(tmp_path: Path, mode: int) -> None:
    leftover = tmp_path / "key.new"
    leftover.write_bytes(b"of a killed process")
    leftover.chmod(0o666)

    modes = []

    def fsync(path: Path) -> None:
        modes.append(path.stat().st_mode & 0o777)

    before = os.umask(0o077)
    try:
        write_atomically(tmp_path / "key", b"secret", mode=mode, sync=Sync.FILE, fsync=fsync)
    finally:
        os.umask(before)
    assert modes == [mode]
    assert (tmp_path / "key").stat().st_mode & 0o777 == mode
    assert names(tmp_path) == {"key"}


def test_a_private_file_is_not_written_through_a_link_at_its_temporary_name(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"untouched")
    (tmp_path / "key.new").symlink_to(tmp_path / "target")
    write_atomically(tmp_path / "key", b"secret", mode=0o600)
    assert (tmp_path / "target").read_bytes() == b"untouched"
    assert not (tmp_path / "key").is_symlink()


def test_an_unneeded_file_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "free").write_bytes(b"a longer, older content")
    number = (tmp_path / "free").stat().st_ino
    write_atomically(tmp_path / "file", b"new", reuse=tmp_path / "free")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert (tmp_path / "file").stat().st_ino == number
    write_atomically(tmp_path / "next", b"new", reuse=tmp_path / "free")
    assert names(tmp_path) == {"file", "next"}


def test_two_writers_with_different_suffixes_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    def write(temp_path: Path) -> None:
        temp_path.write_bytes(b"slow")
        write_atomically(tmp_path / "file", b"fast", temp_suffix=".2.new")

    write_atomically(tmp_path / "file", write, temp_suffix=".1.new")
    assert (tmp_path / "file").read_bytes() == b"slow"
    assert names(tmp_path) == {"file"}
