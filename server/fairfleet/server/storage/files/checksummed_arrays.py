"""Array files with a checksum of their content, so that a flipped bit is noticed, not trained on.

The checksum is in the file itself: it needs no row in the database and stays with its content.
Files of earlier versions have no checksum and are read without a check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from fairfleet.common.errors import StateDirError

T = TypeVar("T")
Row = NDArray[np.floating[Any]]
Arrays = Mapping[str, NDArray[Any]]

KEY = "xxh3_128"  # of the checksum, in the metadata of a safetensors file
CHECKSUM_BYTES = 16  # after the array in a .npy file
# A float16 row with a scale is stored as an array of uint16 (the bits of its values), the exponent
# of the scale and the checksum. The type of the array distinguishes it from a row without a scale,
# also if the end of the file is missing.
SCALED, EXPONENT = np.dtype("<u2"), np.dtype("<i4")


def checksum(arrays: Arrays) -> bytes:
    """Return the xxh3-128 of names, types, shapes and bytes. It takes less time than a copy."""
    state = xxhash.xxh3_128()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        state.update(f"{name}|{array.dtype.str}|{array.shape};".encode())
        state.update(array.reshape(-1).view(np.uint8).data)
    return state.digest()


def save_vectors(path: Path, vectors: Arrays) -> None:
    """Write arrays by name to a safetensors file with a checksum."""
    save_file(dict(vectors), path, metadata={KEY: checksum(vectors).hex()})


def load_vectors(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file; raise StateDirError if it is damaged or missing."""
    return _read(path, _vectors)


def save_row(path: Path, row: Row) -> None:
    """Write a row to a .npy file with a checksum."""
    with path.open("wb") as file:
        np.save(file, row)
        file.write(checksum({"": row}))


def open_row(path: Path) -> np.memmap[Any, Any]:
    """Return a row, memory-mapped. Its checksum is not compared, which would read all of it."""
    return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]


def read_row(path: Path) -> Row:
    """Return a row, memory-mapped; raise StateDirError if it is not what was written."""
    return _read(path, _row)


def save_scaled_row(path: Path, row: Row, exponent: int) -> None:
    """Write a row that stands for row * 2^exponent. If the exponent is 0, do as `save_row` does.

    Raises ValueError for another exponent unless the row is float16.
    """
    if exponent == 0:
        save_row(path, row)
        return
    if row.dtype != np.float16:
        raise ValueError(
            f"a row of {row.dtype} has an exponent of {exponent}; only a float16 row can have one"
        )
    bits, scale = row.view(SCALED), np.array([exponent], EXPONENT)
    with path.open("wb") as file:
        np.save(file, bits)
        file.write(scale.tobytes())
        file.write(checksum({"": bits, "exponent": scale}))


def open_scaled_row(path: Path) -> Row:
    """Return the stored values, memory-mapped; their checksum is not compared."""
    return _values(open_row(path))


def read_scaled_row(path: Path) -> tuple[Row, int]:
    """Return the stored values, memory-mapped, and the exponent.

    Raises StateDirError if they are not what was written.
    """
    return _read(path, _scaled_row)


def _vectors(path: Path) -> dict[str, NDArray[Any]]:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        names = file.keys()
        vectors = {name: file.get_tensor(name) for name in names}
    if metadata is not None and metadata.get(KEY) != checksum(vectors).hex():
        raise ValueError("its content does not match its checksum")
    return vectors


def _row(path: Path) -> Row:
    row, stored_checksum = _row_and_rest(path, CHECKSUM_BYTES)
    if stored_checksum and stored_checksum != checksum({"": row}):
        raise ValueError("its content does not match its checksum")
    return row


def _scaled_row(path: Path) -> tuple[Row, int]:
    stored, rest = _row_and_rest(path, EXPONENT.itemsize + CHECKSUM_BYTES)
    if stored.dtype != SCALED:
        return _row(path), 0
    if len(rest) != EXPONENT.itemsize + CHECKSUM_BYTES:
        raise ValueError("its scale or its checksum is missing")
    scale = np.frombuffer(rest[: EXPONENT.itemsize], EXPONENT)
    if rest[EXPONENT.itemsize :] != checksum({"": stored, "exponent": scale}):
        raise ValueError("its content does not match its checksum")
    return _values(stored), int(scale[0])


def _row_and_rest(path: Path, size: int) -> tuple[np.memmap[Any, Any], bytes]:
    """Return the array of a .npy file, and up to `size` + 1 bytes after it.

    The one byte more shows that a file is too long.
    """
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        row = open_row(path)
        file.seek(row.offset + row.nbytes)
        return row, file.read(size + 1)


def _values(stored: NDArray[Any]) -> Row:
    return stored.view(np.float16) if stored.dtype == SCALED else stored


def _read(path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except Exception as error:  # the libraries raise many types for a damaged file
        raise StateDirError(
            f"{path} is damaged or missing: {error}. Restore the state directory from a backup."
        ) from error
