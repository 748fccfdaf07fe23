"""Readers of the plain formats that datasets use: npz without pickles, and IDX, gzipped or not.

Nothing is ever unpickled, and a damaged file is reported as BrokenDataset with its path.
"""

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
# Errors that reading a damaged file may raise. zipfile raises RuntimeError for an encrypted file,
# and for one that damage has marked as encrypted.
UNREADABLE = (
    OSError, EOFError, ValueError, KeyError, RuntimeError, OverflowError,
    BadZipFile, zlib.error, lzma.LZMAError, struct.error, csv.Error,
)  # fmt: skip


def read_npz(path: Path, names: Sequence[str] = ("x", "y")) -> list[Array]:
    """Return the arrays of these names without unpickling anything.

    Raises BrokenDataset if the file is unreadable or lacks one of the arrays.
    """
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise BrokenDataset(
                f"{path} holds a single array (npy), expected an archive with {', '.join(names)}: "
                f"save it with np.savez(path, {', '.join(f'{name}=…' for name in names)})"
            )
        with file:
            if missing := [name for name in names if name not in file]:
                present = ", ".join(file.files) or "(none)"
                raise BrokenDataset(
                    f"{path} has the arrays {present}; expected {', '.join(missing)} as well"
                )
            return [np.asarray(file[name]) for name in names]
    except UNREADABLE as error:
        raise BrokenDataset(
            f"cannot read {path} as an npz archive without pickled objects: {error}"
        ) from error


def read_samples(path: Path, names: Sequence[str]) -> list[Array]:
    """Return arrays of one npz file, each of which must have one entry for each sample."""
    arrays = read_npz(path, names)
    for name, array in zip(names, arrays, strict=True):
        if not array.ndim:
            raise BrokenDataset(
                f"{path} has {name} of {array.shape}, expected an entry for each sample"
            )
    if len({len(array) for array in arrays}) > 1:
        counts = " and ".join(
            f"{len(array)} of {name}" for name, array in zip(names, arrays, strict=True)
        )
        raise BrokenDataset(f"{path} has {counts}: expected one of each for each sample")
    return arrays


def read_pair(path: Path) -> tuple[Array, Array]:
    """Return the samples x and the labels y of one npz file."""
    x, y = read_samples(path, ("x", "y"))
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise BrokenDataset(
            f"{path} has y of {y.dtype} {y.shape}, expected whole numbers, one for each sample"
        )
    return x, y


def read_idx(path: Path) -> Array:
    """Return the array of bytes that an IDX file (the format of the MNIST files) contains."""
    try:
        with open_plain(path) as file:
            return _decode_idx(file.read(), path)
    except UNREADABLE as error:
        raise BrokenDataset(f"cannot read {path}: {error}") from error


def _decode_idx(content: bytes, path: Path) -> Array:
    zeros, kind, axes = struct.unpack_from(">HBB", content)
    if zeros or kind != IDX_UINT8 or not axes:
        raise BrokenDataset(
            f"{path} does not start like an IDX file of bytes (found {content[:4].hex()})"
        )
    shape = struct.unpack_from(f">{axes}I", content, 4)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
    if len(values) != np.prod(shape, dtype=np.int64):
        expected = " x ".join(map(str, shape))
        raise BrokenDataset(
            f"{path} has {len(values)} values, expected {expected}: the file may be truncated"
        )
    return values.reshape(shape)


def open_plain(path: Path) -> IO[bytes]:
    """Open a file for reading bytes, decompressed if its name ends with .gz."""
    return cast("IO[bytes]", gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb"))
