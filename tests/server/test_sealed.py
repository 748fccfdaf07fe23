"""Arrays on the disk: what comes back is what was written, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fairfleet.common.errors import StateDirError
from fairfleet.server.sealed import load_vectors, read_row, save_row, save_vectors

ROW = np.arange(40, dtype=np.float32)


def write_row(path: Path) -> None:
    with path.open("wb") as file:
        save_row(file, ROW)


def write_vectors(path: Path) -> None:
    save_vectors(path, {"m": ROW, "v": ROW**2})


KINDS = [(write_row, read_row), (write_vectors, load_vectors)]


def outcome(read: Callable[[Path], object], path: Path) -> bytes | None:
    """What is read, as bytes; None where it is refused."""
    try:
        found = read(path)
    except StateDirError:
        return None
    arrays = found if isinstance(found, dict) else {"": np.asarray(found)}
    return b"".join(name.encode() + arrays[name].tobytes() for name in sorted(arrays))


@pytest.mark.parametrize(("write", "read"), KINDS)
def test_no_flipped_bit_and_no_cut_changes_what_is_read(
    tmp_path: Path, write: Callable[[Path], None], read: Callable[[Path], object]
) -> None:
    path = tmp_path / "file"
    write(path)
    whole, wanted = path.read_bytes(), outcome(read, path)
    assert wanted is not None
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        assert outcome(read, path) in (None, wanted), at  # a header has blanks that mean nothing
        path.write_bytes(whole[:at])
        assert outcome(read, path) in (None, wanted), at
    path.write_bytes(whole + b"x")
    assert outcome(read, path) is None


def test_a_flipped_bit_in_the_numbers_or_the_checksum_is_refused(tmp_path: Path) -> None:
    for write, read in KINDS:
        write(tmp_path / "file")
        whole = (tmp_path / "file").read_bytes()
        for back in range(1, ROW.nbytes):
            (tmp_path / "file").write_bytes(whole[:-back] + bytes([whole[-back] ^ 4]) + whole[len(whole) - back + 1 :])
            assert outcome(read, tmp_path / "file") is None, back


def test_files_of_earlier_versions_have_no_checksum_and_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "row.npy", ROW)
    save_file({"m": ROW}, tmp_path / "vectors")
    np.testing.assert_array_equal(read_row(tmp_path / "row.npy"), ROW)
    np.testing.assert_array_equal(load_vectors(tmp_path / "vectors")["m"], ROW)


def test_a_file_that_is_gone_is_said_so(tmp_path: Path) -> None:
    for _, read in KINDS:
        with pytest.raises(StateDirError, match="nowhere is damaged or gone"):
            read(tmp_path / "nowhere")
