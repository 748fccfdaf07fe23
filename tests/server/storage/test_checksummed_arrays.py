"""Array files with a checksum are read exactly as they were written, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fairfleet.common.errors import StateDirError
from fairfleet.server.aggregation.half_rows import ScaledRow
from fairfleet.server.storage.files.checksummed_arrays import (
    load_vectors,
    read_row,
    read_scaled_row,
    save_row,
    save_scaled_row,
    save_vectors,
)

ROW = np.arange(40, dtype=np.float32)


def write_row(path: Path) -> None:
    save_row(path, ROW)


def write_vectors(path: Path) -> None:
    save_vectors(path, {"m": ROW, "v": ROW**2})


def write_scaled_row(path: Path) -> None:
    save_scaled_row(path, ROW.astype(np.float16), 40)


def read_decoded_row(path: Path) -> np.ndarray:
    return ScaledRow(*read_scaled_row(path)).decoded()


KINDS = [(write_row, read_row), (write_vectors, load_vectors)]


def outcome(read: Callable[[Path], object], path: Path) -> bytes | None:
    """Return the array of a file as bytes; None if the file is refused."""
    try:
        content = read(path)
    except StateDirError:
        return None
    arrays = content if isinstance(content, dict) else {"": np.asarray(content)}
    return b"".join(name.encode() + arrays[name].tobytes() for name in sorted(arrays))


@pytest.mark.parametrize(
    ("write", "read"), [*KINDS, (write_row, read_decoded_row), (write_scaled_row, read_decoded_row)]
)
def test_no_flipped_bit_and_no_cut_changes_what_is_read(
    tmp_path: Path, write: Callable[[Path], None], read: Callable[[Path], object]
) -> None:
    path = tmp_path / "file"
    write(path)
    data, expected = path.read_bytes(), outcome(read, path)
    assert expected is not None
    for index in range(len(data)):
        flipped = bytes([data[index] ^ 1 << index % 8])
        path.write_bytes(data[:index] + flipped + data[index + 1 :])
        # A changed blank in a header changes nothing.
        assert outcome(read, path) in (None, expected), index
        path.write_bytes(data[:index])
        assert outcome(read, path) in (None, expected), index
    path.write_bytes(data + b"x")
    assert outcome(read, path) is None


def test_a_flipped_bit_in_the_numbers_or_the_checksum_is_refused(tmp_path: Path) -> None:
    for write, read in KINDS:
        write(tmp_path / "file")
        data = (tmp_path / "file").read_bytes()
        for index in range(len(data) - ROW.nbytes + 1, len(data)):
            flipped = bytes([data[index] ^ 4])
            (tmp_path / "file").write_bytes(data[:index] + flipped + data[index + 1 :])
            assert outcome(read, tmp_path / "file") is None, index


def test_files_of_earlier_versions_have_no_checksum_and_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "row.npy", ROW)
    save_file({"m": ROW}, tmp_path / "vectors")
    np.testing.assert_array_equal(read_row(tmp_path / "row.npy"), ROW)
    np.testing.assert_array_equal(load_vectors(tmp_path / "vectors")["m"], ROW)


def test_the_error_names_a_missing_file(tmp_path: Path) -> None:
    for _, read in KINDS:
        with pytest.raises(StateDirError, match="nowhere is damaged or missing"):
            read(tmp_path / "nowhere")


def test_a_row_with_a_scale_is_read_with_it(tmp_path: Path) -> None:
    write_scaled_row(tmp_path / "row.npy")
    np.testing.assert_array_equal(read_decoded_row(tmp_path / "row.npy"), ROW * 2.0**40)
    with pytest.raises(ValueError, match="only a float16"):
        save_scaled_row(tmp_path / "row.npy", ROW, 1)


def test_a_row_without_a_scale_has_the_earlier_format_and_earlier_float16_rows_are_read(
    tmp_path: Path,
) -> None:
    half = ROW.astype(np.float16)
    save_scaled_row(tmp_path / "new", half, 0)
    save_row(tmp_path / "old", half)
    assert (tmp_path / "new").read_bytes() == (tmp_path / "old").read_bytes()
    np.save(tmp_path / "older.npy", half)
    for name in ("old", "older.npy"):
        values, exponent = read_scaled_row(tmp_path / name)
        assert exponent == 0
        np.testing.assert_array_equal(values, half)
