"""Arrays in files that carry a checksum of their content: a flipped bit is noticed, not trained on.

The checksum lies in the file itself, so that it costs no fact and cannot part from what it speaks of. Files of
earlier versions have none and are read as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from fairfleet.common.errors import StateDirError

T = TypeVar("T")
Row = NDArray[np.floating[Any]]
Arrays = Mapping[str, NDArray[Any]]

KEY = "xxh3_128"  # among the metadata of a safetensors file
SEAL_BYTES = 16  # behind the array of a .npy file


def checksum(arrays: Arrays) -> bytes:
    """Of names, types, shapes and bytes; xxh3-128, which costs less than a copy."""
    state = xxhash.xxh3_128()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        state.update(f"{name}|{array.dtype.str}|{array.shape};".encode())
        state.update(array.reshape(-1).view(np.uint8).data)
    return state.digest()


def save_vectors(path: Path, vectors: Arrays) -> None:
    save_file(dict(vectors), path, metadata={KEY: checksum(vectors).hex()})


def load_vectors(path: Path) -> dict[str, NDArray[Any]]:
    return _read(path, _vectors)


def save_row(file: IO[bytes], row: Row) -> None:
    np.save(file, row)
    file.write(checksum({"": row}))


def open_row(path: Path) -> np.memmap[Any, Any]:
    """Memory-mapped; not compared with its checksum, which would read all of it."""
    return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]


def read_row(path: Path) -> Row:
    """Memory-mapped, and known to be what was written."""
    return _read(path, _row)


def _vectors(path: Path) -> dict[str, NDArray[Any]]:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        vectors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    if metadata is not None and metadata.get(KEY) != checksum(vectors).hex():
        raise ValueError("its content does not match its checksum")
    return vectors


def _row(path: Path) -> Row:
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        row = open_row(path)
        file.seek(row.offset + row.nbytes)
        seal = file.read(SEAL_BYTES + 1)
    if seal and seal != checksum({"": row}):
        raise ValueError("its content does not match its checksum")
    return row


def _read(path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except Exception as error:  # the libraries raise what they like at a damaged file
        raise StateDirError(
            f"{path} is damaged or gone: {error}. Restore the state directory from a backup."
        ) from error
