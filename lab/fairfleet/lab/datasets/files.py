"""Reading the plain formats that datasets come in: npz without pickles, and IDX, gzipped or not."""

from __future__ import annotations

import csv
import gzip
import lzma
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast
from zipfile import BadZipFile

import numpy as np

from fairfleet.lab.datasets.base import Array, BrokenDataset

IDX_UINT8 = 0x08
# What reading a damaged file may raise; zipfile has a RuntimeError for what is encrypted, or is marked so by damage.
UNREADABLE = (
    OSError, EOFError, ValueError, KeyError, RuntimeError, OverflowError,
    BadZipFile, zlib.error, lzma.LZMAError, struct.error, csv.Error,
)  # fmt: skip


def read_npz(path: Path, names: Sequence[str] = ("x", "y")) -> list[Array]:
    """The arrays of these names; nothing is unpickled."""
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise BrokenDataset(
                f"{path} holds a single array (npy), expected an archive with {', '.join(names)}: "
                f"save it with np.savez(path, {', '.join(f'{name}=…' for name in names)})"
            )
        with file:
            if missing := [name for name in names if name not in file]:
                raise BrokenDataset(
                    f"{path} has the arrays {', '.join(file.files) or '(none)'}; expected {', '.join(missing)} as well"
                )
            return [np.asarray(file[name]) for name in names]
    except UNREADABLE as error:
        raise BrokenDataset(f"cannot read {path} as an npz archive without pickled objects: {error}") from error


def read_samples(path: Path, names: Sequence[str]) -> list[Array]:
    """Arrays of one npz file that each have an entry for each sample."""
    arrays = read_npz(path, names)
    for name, array in zip(names, arrays, strict=True):
        if not array.ndim:
            raise BrokenDataset(f"{path} has {name} of {array.shape}, expected an entry for each sample")
    if len({len(array) for array in arrays}) > 1:
        found = " and ".join(f"{len(array)} of {name}" for name, array in zip(names, arrays, strict=True))
        raise BrokenDataset(f"{path} has {found}: they must be as many, one for each sample")
    return arrays


def read_pair(path: Path) -> tuple[Array, Array]:
    """Samples and labels, x and y, of one npz file."""
    x, y = read_samples(path, ("x", "y"))
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise BrokenDataset(f"{path} has y of {y.dtype} {y.shape}, expected whole numbers, one for each sample")
    return x, y


def read_idx(path: Path) -> Array:
    """An array of bytes in the format of the MNIST files."""
    try:
        with open_plain(path) as file:
            return _idx(file.read(), path)
    except UNREADABLE as error:
        raise BrokenDataset(f"cannot read {path}: {error}") from error


def _idx(content: bytes, path: Path) -> Array:
    zeros, kind, axes = struct.unpack_from(">HBB", content)
    if zeros or kind != IDX_UINT8 or not axes:
        raise BrokenDataset(f"{path} does not begin like an IDX file of bytes (found {content[:4].hex()})")
    shape = struct.unpack_from(f">{axes}I", content, 4)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
    if len(values) != np.prod(shape, dtype=np.int64):
        raise BrokenDataset(f"{path} holds {len(values)} values, expected {' x '.join(map(str, shape))}: cut off?")
    return values.reshape(shape)


def open_plain(path: Path) -> IO[bytes]:
    """A file's content, unpacked if its name says that it is gzipped."""
    return cast("IO[bytes]", gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb"))
