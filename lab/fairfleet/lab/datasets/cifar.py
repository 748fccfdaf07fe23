"""CIFAR-10 and CIFAR-100 from their official archives, extracted or not, or from npz files.

The python archives are pickles. They are read by an unpickler that can rebuild an array of bytes and nothing else, so a
file that was tampered with cannot run anything.
"""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from fairfleet.common.errors import UsageError, short
from fairfleet.lab.datasets.base import Array, BrokenDataset, Dataset, Parts, pooled
from fairfleet.lab.datasets.cache import cached
from fairfleet.lab.datasets.files import UNREADABLE, read_pair
from fairfleet.lab.datasets.places import Form, find

IMAGE = (3, 32, 32)
PIXELS = 3 * 32 * 32
HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

Pair = tuple[Array, Array]  # images and labels


class _Kind:
    """Stands for a pickled numpy dtype; only its code is looked at."""

    def __init__(self, code: Any = None, *_: Any) -> None:
        self.code = code.decode("latin1") if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and alignment, which mean nothing for bytes


class _Bytes:
    """Stands for a pickled numpy array, and takes nothing but bytes; numpy's own code for pickles is not called."""

    values: Array

    def __init__(self, *_: Any) -> None:
        self.values = np.empty(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _version, shape, kind, by_column, content = state
        if kind.code not in ("u1", "|u1"):
            raise BrokenDataset(f"a CIFAR batch holds an array of {kind.code}, expected bytes (u1)")
        if not isinstance(content, bytes | bytearray):
            raise BrokenDataset(f"a CIFAR batch holds an array made of {type(content).__name__}, expected bytes (u1)")
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_column else "C")


def _from_buffer(content: Any, kind: Any, shape: Any, order: Any) -> _Bytes:
    """How numpy writes an array in protocol 5."""
    array = _Bytes()
    array.__setstate__((None, shape, kind, order == "F", content))
    return array


def _latin1(text: str, codec: str) -> bytes:
    """How Python 3 writes bytes in old protocols; whatever the codec is said to be."""
    return text.encode("latin1")


# All that a batch needs, under the names of numpy 1 and numpy 2; each is replaced by something harmless of our own.
STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Bytes,
    ("numpy._core.multiarray", "_reconstruct"): _Bytes,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("numpy", "ndarray"): _Bytes,
    ("numpy", "dtype"): _Kind,
    ("_codecs", "encode"): _latin1,
}


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in STAND_INS:
            raise BrokenDataset(
                f"the file asks for {short(module)}.{short(name)}, which no CIFAR archive needs: it may have been "
                f"tampered with and was not opened. Get the archive anew from {HOME} and compare its md5 sum."
            )
        return STAND_INS[module, name]


def unpickle(content: bytes) -> dict[str, Any]:
    """One batch of a python archive: its arrays and lists by name."""
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    except BrokenDataset:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise BrokenDataset(f"not a CIFAR batch: {type(error).__name__}: {error}") from error
    if not isinstance(batch, dict):
        raise BrokenDataset(f"not a CIFAR batch: found a {type(batch).__name__}, expected a dictionary")
    return {
        key.decode("latin1") if isinstance(key, bytes) else str(key): value.values
        if isinstance(value, _Bytes)
        else value
        for key, value in batch.items()
    }


def python_batch(content: bytes, labels: str) -> Pair:
    batch = unpickle(content)
    if missing := {"data", labels} - batch.keys():
        raise BrokenDataset(f"a CIFAR batch has {sorted(batch)}, expected {sorted(missing)} as well")
    x, y = batch["data"], batch[labels]
    if not isinstance(x, np.ndarray) or x.ndim != 2 or x.shape[1] != PIXELS:
        raise BrokenDataset(f"a CIFAR batch has data of {getattr(x, 'shape', type(x))}, expected n x {PIXELS}")
    if (
        not isinstance(y, list)
        or len(y) != len(x)
        or not all(isinstance(label, int) and 0 <= label < 100 for label in y)
    ):
        raise BrokenDataset(f"a CIFAR batch of {len(x)} images has no list of as many numbers from 0 to 99 as {labels}")
    return x.reshape(-1, *IMAGE), np.array(y)


def binary_batch(content: bytes, label_bytes: int, column: int) -> Pair:
    """A batch of a binary archive: each image after its label, or after two of them."""
    record = label_bytes + PIXELS
    if not content or len(content) % record:
        raise BrokenDataset(f"a binary CIFAR batch of {len(content)} bytes is no multiple of {record}: cut off?")
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    return rows[:, label_bytes:].reshape(-1, *IMAGE), rows[:, column]


def npz_batch(path: Path) -> Pair:
    """Images of an npz file: with their channels first or last, or flat as in a python batch, all red values first."""
    x, y = read_pair(path)
    match x.shape[1:]:
        case (3, 32, 32):
            return x, y
        case (32, 32, 3):
            return np.ascontiguousarray(np.moveaxis(x, 3, 1)), y
        case (3072,):
            return x.reshape(-1, *IMAGE), y
    raise BrokenDataset(f"{path} has x of {x.shape}, expected n x 3 x 32 x 32, n x 32 x 32 x 3 or n x 3072")


def _members(path: Path, names: Sequence[str]) -> list[bytes]:
    """The batches of these names, from a tar archive or from the folder it was extracted to."""
    try:
        if path.is_dir():
            return [(path / name).read_bytes() for name in names]
        with tarfile.open(path) as archive:
            found = {PurePosixPath(member.name).name: member for member in archive if member.isfile()}
            batches = [_content(archive, found[name]) for name in names]
            _read_to_end(archive)
            return batches
    except (*UNREADABLE, tarfile.TarError) as error:
        raise BrokenDataset(f"cannot read the batches {', '.join(names)} from {path}: {error}") from error


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None  # only regular files are asked for
    return file.read()


def _read_to_end(archive: tarfile.TarFile) -> None:
    """A checksum stands at the end of a packed archive; who does not read so far does not learn of damage."""
    assert archive.fileobj is not None  # it is open
    while archive.fileobj.read(1 << 20):
        pass


@dataclass(frozen=True)
class Layout:
    """One published form: the archive, the folder it unpacks to, and the batches in either."""

    files: tuple[str, str]
    train: tuple[str, ...]
    test: str
    decode: Callable[[bytes], Pair]

    def forms(self, name: str, subfolder: str) -> list[Form[Parts]]:
        def read(paths: Sequence[Path]) -> Parts:
            return cached(name, paths, lambda: self.read(paths[0]))

        return [Form((prefix + file,), read) for file in self.files for prefix in ("", subfolder)]

    def read(self, path: Path) -> Parts:
        batches = [self.decode(content) for content in _members(path, (*self.train, self.test))]
        return pooled(batches[:-1], batches[-1:])


def cifar10(folders: Sequence[Path]) -> Dataset:
    def npz(paths: Sequence[Path]) -> Parts:
        return cached(
            "cifar10", paths, lambda: pooled([npz_batch(path) for path in paths[:-1]], [npz_batch(paths[-1])])
        )

    batches = tuple(f"data_batch_{n}" for n in range(1, 6))
    python = Layout(
        ("cifar-10-python.tar.gz", "cifar-10-batches-py"), batches, "test_batch", partial(python_batch, labels="labels")
    )
    binary = Layout(
        ("cifar-10-binary.tar.gz", "cifar-10-batches-bin"),
        tuple(f"{name}.bin" for name in batches),
        "test_batch.bin",
        partial(binary_batch, label_bytes=1, column=0),
    )
    forms = [
        Form((*(f"cifar10/train_{n}.npz" for n in range(1, 6)), "cifar10/test.npz"), npz),
        *python.forms("cifar10", "cifar10/"),
        *binary.forms("cifar10", "cifar10/"),
    ]
    parts = find("cifar10", forms, folders, f"download cifar-10-python.tar.gz (163 MB) from {HOME}; no need to unpack")
    return Dataset("cifar10", *parts, 10, class_names=CIFAR10_CLASSES)


def cifar100(folders: Sequence[Path], labels: str = "fine") -> Dataset:
    """`labels`: "fine" for the 100 classes, "coarse" for the 20 groups of five."""
    if labels not in ("fine", "coarse"):
        raise UsageError(f"cifar100 has labels=fine and labels=coarse, not {labels!r}")
    name = f"cifar100-{labels}"

    def npz(paths: Sequence[Path]) -> Parts:
        return cached(name, paths, lambda: pooled([npz_batch(paths[0])], [npz_batch(paths[1])]))

    python = Layout(
        ("cifar-100-python.tar.gz", "cifar-100-python"),
        ("train",),
        "test",
        partial(python_batch, labels=f"{labels}_labels"),
    )
    binary = Layout(
        ("cifar-100-binary.tar.gz", "cifar-100-binary"),
        ("train.bin",),
        "test.bin",
        partial(binary_batch, label_bytes=2, column=int(labels == "fine")),
    )
    forms = [*python.forms(name, "cifar100/"), *binary.forms(name, "cifar100/")]
    if labels == "fine":  # the npz form has one label for each image
        forms.insert(0, Form(("cifar100/train.npz", "cifar100/test.npz"), npz))
    parts = find(
        "cifar100", forms, folders, f"download cifar-100-python.tar.gz (161 MB) from {HOME}; no need to unpack"
    )
    return Dataset(name, *parts, 100 if labels == "fine" else 20)
