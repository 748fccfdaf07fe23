"""CIFAR-10 and CIFAR-100 from their official archives, extracted or not, or from npz files.

The python archives are pickles. They are read by an unpickler that can rebuild an array of bytes
and nothing else, so a file that was tampered with cannot run anything.
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
from fairfleet.lab.datasets.base import Array, BrokenDataset, Dataset, Parts, concatenate_parts
from fairfleet.lab.datasets.cache import load_cached
from fairfleet.lab.datasets.files import UNREADABLE, read_pair
from fairfleet.lab.datasets.places import Form, read_first_form

IMAGE = (3, 32, 32)
PIXELS = 3 * 32 * 32
WEBSITE = "https://www.cs.toronto.edu/~kriz/cifar.html"
CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)

Pair = tuple[Array, Array]  # images and labels


class _PickledDtype:
    """A stand-in for a pickled numpy dtype, of which only the code is used."""

    def __init__(self, code: Any = None, *_: Any) -> None:
        self.code = code.decode("latin1") if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        pass  # The state has the byte order and alignment, which mean nothing for bytes.


class _PickledBytes:
    """A stand-in for a pickled numpy array that accepts nothing but bytes.

    numpy's own code for pickles is not called.
    """

    values: Array

    def __init__(self, *_: Any) -> None:
        self.values = np.empty(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, by_column, content = state
        if dtype.code not in ("u1", "|u1"):
            raise BrokenDataset(f"a CIFAR batch has an array of {dtype.code}, expected bytes (u1)")
        if not isinstance(content, bytes | bytearray):
            raise BrokenDataset(
                f"a CIFAR batch has an array of type {type(content).__name__}, expected bytes (u1)"
            )
        self.values = np.frombuffer(content, np.uint8).reshape(
            shape, order="F" if by_column else "C"
        )


def _from_buffer(content: Any, dtype: Any, shape: Any, order: Any) -> _PickledBytes:
    """Rebuild an array as numpy writes it in protocol 5."""
    array = _PickledBytes()
    array.__setstate__((None, shape, dtype, order == "F", content))
    return array


def _latin1(text: str, codec: str) -> bytes:
    """Rebuild bytes as Python 3 writes them in old protocols; the codec's name is ignored."""
    return text.encode("latin1")


# Everything that a batch needs, under the names of numpy 1 and numpy 2. Each is replaced by a
# harmless stand-in.
STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _PickledBytes,
    ("numpy._core.multiarray", "_reconstruct"): _PickledBytes,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("numpy", "ndarray"): _PickledBytes,
    ("numpy", "dtype"): _PickledDtype,
    ("_codecs", "encode"): _latin1,
}


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that knows the stand-ins and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of this name. Raises BrokenDataset if there is none."""
        if (module, name) not in STAND_INS:
            raise BrokenDataset(
                f"the file contains {short(module)}.{short(name)}, which no CIFAR archive needs: "
                "it may have been tampered with and was not opened. Download the archive again "
                f"from {WEBSITE} and compare its md5 sum."
            )
        return STAND_INS[module, name]


def unpickle(content: bytes) -> dict[str, Any]:
    """Return the arrays and lists of one batch of a python archive by name.

    Raises BrokenDataset if the batch is damaged or contains anything else.
    """
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    except BrokenDataset:
        raise
    except Exception as error:  # A damaged pickle can raise nearly any error.
        raise BrokenDataset(f"not a CIFAR batch: {type(error).__name__}: {error}") from error
    if not isinstance(batch, dict):
        raise BrokenDataset(
            f"not a CIFAR batch: found a {type(batch).__name__}, expected a dictionary"
        )
    return {_batch_key(key): _batch_value(value) for key, value in batch.items()}


def _batch_key(key: Any) -> str:
    return key.decode("latin1") if isinstance(key, bytes) else str(key)


def _batch_value(value: Any) -> Any:
    return value.values if isinstance(value, _PickledBytes) else value


def python_batch(content: bytes, labels: str) -> Pair:
    """Return the images of one batch of a python archive, and the labels stored as `labels`.

    Raises BrokenDataset if the batch is damaged or its arrays do not fit together.
    """
    batch = unpickle(content)
    if missing := {"data", labels} - batch.keys():
        raise BrokenDataset(
            f"a CIFAR batch has {sorted(batch)}, expected {sorted(missing)} as well"
        )
    x, y = batch["data"], batch[labels]
    if not isinstance(x, np.ndarray) or x.ndim != 2 or x.shape[1] != PIXELS:
        raise BrokenDataset(
            f"a CIFAR batch has data of {getattr(x, 'shape', type(x))}, expected n x {PIXELS}"
        )
    if (
        not isinstance(y, list)
        or len(y) != len(x)
        or not all(isinstance(label, int) and 0 <= label < 100 for label in y)
    ):
        raise BrokenDataset(
            f"a CIFAR batch has {len(x)} images, but no list {labels!r} of as many numbers from 0 "
            "to 99"
        )
    return x.reshape(-1, *IMAGE), np.array(y)


def binary_batch(content: bytes, label_bytes: int, column: int) -> Pair:
    """Return one batch of a binary archive, in which one or two labels precede each image.

    `label_bytes` is the number of labels, and `column` the label to use. Raises BrokenDataset if
    the content is not a whole number of records.
    """
    record = label_bytes + PIXELS
    if not content or len(content) % record:
        raise BrokenDataset(
            f"a binary CIFAR batch has {len(content)} bytes, expected a multiple of {record}: "
            "the file may be truncated"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    return rows[:, label_bytes:].reshape(-1, *IMAGE), rows[:, column]


def npz_batch(path: Path) -> Pair:
    """Return the images and labels of an npz file, with the channels first.

    The file may have its channels first or last, or flat images with all red values first, as in a
    python batch. Raises BrokenDataset for another shape.
    """
    x, y = read_pair(path)
    match x.shape[1:]:
        case (3, 32, 32):
            return x, y
        case (32, 32, 3):
            return np.ascontiguousarray(np.moveaxis(x, 3, 1)), y
        case (3072,):
            return x.reshape(-1, *IMAGE), y
    raise BrokenDataset(
        f"{path} has x of {x.shape}, expected n x 3 x 32 x 32, n x 32 x 32 x 3 or n x 3072"
    )


def _members(path: Path, names: Sequence[str]) -> list[bytes]:
    """Read the batches of these names from a tar archive, or the folder it was extracted to."""
    try:
        if path.is_dir():
            return [(path / name).read_bytes() for name in names]
        with tarfile.open(path) as archive:
            members = {
                PurePosixPath(member.name).name: member for member in archive if member.isfile()
            }
            batches = [_content(archive, members[name]) for name in names]
            _read_to_end(archive)
            return batches
    except (*UNREADABLE, tarfile.TarError) as error:
        raise BrokenDataset(
            f"cannot read the batches {', '.join(names)} from {path}: {error}"
        ) from error


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None  # Only regular files are read.
    return file.read()


def _read_to_end(archive: tarfile.TarFile) -> None:
    """Read the rest of the archive, so that the checksum at its end is compared."""
    assert archive.fileobj is not None  # The archive is open.
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
        """Return the forms that read this layout, directly in a data folder or in `subfolder`."""

        def _read(paths: Sequence[Path]) -> Parts:
            return load_cached(name, paths, lambda: self.read(paths[0]))

        return [Form((prefix + file,), _read) for file in self.files for prefix in ("", subfolder)]

    def read(self, path: Path) -> Parts:
        """Decode all batches of an archive or of the folder it was unpacked to."""
        batches = [self.decode(content) for content in _members(path, (*self.train, self.test))]
        return concatenate_parts(batches[:-1], batches[-1:])


CIFAR10_BATCHES = tuple(f"data_batch_{n}" for n in range(1, 6))
CIFAR10_LAYOUTS = (
    Layout(
        ("cifar-10-python.tar.gz", "cifar-10-batches-py"),
        CIFAR10_BATCHES,
        "test_batch",
        partial(python_batch, labels="labels"),
    ),
    Layout(
        ("cifar-10-binary.tar.gz", "cifar-10-batches-bin"),
        tuple(f"{name}.bin" for name in CIFAR10_BATCHES),
        "test_batch.bin",
        partial(binary_batch, label_bytes=1, column=0),
    ),
)


def cifar10(folders: Sequence[Path]) -> Dataset:
    """Return CIFAR-10: 60,000 images of 3 x 32 x 32 bytes, 10 classes."""
    name, npz_files = (
        "cifar10",
        (*(f"cifar10/train_{n}.npz" for n in range(1, 6)), "cifar10/test.npz"),
    )
    forms = [
        Form(npz_files, partial(_read_npz, name)),
        *(form for layout in CIFAR10_LAYOUTS for form in layout.forms(name, "cifar10/")),
    ]
    how_to_get = f"download cifar-10-python.tar.gz (163 MB) from {WEBSITE}; no need to unpack"
    parts = read_first_form(name, forms, folders, how_to_get)
    return Dataset(name, *parts, 10, class_names=CIFAR10_CLASSES)


def cifar100(folders: Sequence[Path], labels: str = "fine") -> Dataset:
    """Return CIFAR-100: 60,000 images of 3 x 32 x 32 bytes.

    `labels` is "fine" for the 100 classes, or "coarse" for the 20 groups of five classes. Raises
    UsageError for other labels.
    """
    if labels not in ("fine", "coarse"):
        raise UsageError(f"cifar100 has labels=fine and labels=coarse, not {labels!r}")
    name = f"cifar100-{labels}"
    forms = [
        form for layout in _cifar100_layouts(labels) for form in layout.forms(name, "cifar100/")
    ]
    if labels == "fine":  # The npz files have only one label for each image.
        npz_files = ("cifar100/train.npz", "cifar100/test.npz")
        forms.insert(0, Form(npz_files, partial(_read_npz, name)))
    how_to_get = f"download cifar-100-python.tar.gz (161 MB) from {WEBSITE}; no need to unpack"
    parts = read_first_form("cifar100", forms, folders, how_to_get)
    return Dataset(name, *parts, 100 if labels == "fine" else 20)


def _cifar100_layouts(labels: str) -> tuple[Layout, Layout]:
    return (
        Layout(
            ("cifar-100-python.tar.gz", "cifar-100-python"),
            ("train",),
            "test",
            partial(python_batch, labels=f"{labels}_labels"),
        ),
        Layout(
            ("cifar-100-binary.tar.gz", "cifar-100-binary"),
            ("train.bin",),
            "test.bin",
            partial(binary_batch, label_bytes=2, column=int(labels == "fine")),
        ),
    )


def _read_npz(name: str, paths: Sequence[Path]) -> Parts:
    """Read npz files, of which the last is the test part."""
    return load_cached(
        name,
        paths,
        lambda: concatenate_parts([npz_batch(path) for path in paths[:-1]], [npz_batch(paths[-1])]),
    )
