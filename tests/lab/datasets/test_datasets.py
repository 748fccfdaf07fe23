"""Datasets are read as published, from cached or damaged files, and never run foreign code."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any
from zipfile import ZIP_LZMA, ZipFile

import numpy as np
import pytest

from fairfleet.common.errors import UsageError
from fairfleet.lab import digits as embedded
from fairfleet.lab.datasets import BrokenDataset, Dataset, MissingDataset, adult, cache, cifar, load
from fairfleet.lab.datasets.preprocessing import preprocessing

REAL = os.environ.get("FAIRFLEET_DATA", "")
real_data = pytest.mark.skipif(
    not REAL, reason="FAIRFLEET_DATA names no folder with the published datasets"
)


pytestmark = pytest.mark.usefixtures("no_data")


def images(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Return random bytes of this shape."""
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), np.uint8)


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write bytes in the IDX format, gzipped if the name ends with .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = (
        struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()
    )
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_npz(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    """Write samples and labels to an npz file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, x=x, y=y)


IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


@pytest.mark.parametrize("ending", [".gz", ""])
@pytest.mark.parametrize("folder", ["fashion-mnist", "FashionMNIST/raw"])
def test_idx_files_are_read_as_published(tmp_path: Path, ending: str, folder: str) -> None:
    parts = (
        images(7, 28, 28),
        np.arange(7, dtype=np.uint8),
        images(3, 28, 28, seed=1),
        np.zeros(3, np.uint8),
    )
    for name, values in zip(IDX, parts, strict=True):
        write_idx(tmp_path / folder / f"{name}{ending}", values)
    data = load("fashion-mnist", tmp_path)
    assert np.array_equal(data.x, np.concatenate([parts[0], parts[2]]))
    assert data.y.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 0, 0]
    assert (data.train_size, data.classes, data.y.dtype, data.x.dtype) == (
        7,
        10,
        np.int64,
        np.uint8,
    )


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:3], lambda b: b"\x00\x00\x0d\x03" + b[4:]]
)
def test_a_damaged_idx_file_is_named(tmp_path: Path, damage: Any) -> None:
    for name, values in zip(
        IDX, (images(2, 28, 28), images(2), images(2, 28, 28), images(2)), strict=True
    ):
        write_idx(tmp_path / "mnist" / name, values)
    path = tmp_path / "mnist" / IDX[2]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BrokenDataset, match=IDX[2]):
        load("mnist", tmp_path)


def python_archive(folder: Path, batches: dict[str, Any], pack: bool) -> None:
    """Write the published form: pickles of Python 2's protocol in a folder, packed or not."""
    folder.mkdir(parents=True)
    for name, batch in batches.items():
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    if pack:
        with tarfile.open(folder.parent / {"cifar-10-batches-py": "cifar-10-python.tar.gz"}.get(
                folder.name, f"{folder.name}.tar.gz"), "w:gz") as archive:  # fmt: skip
            archive.add(folder, folder.name)
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


BATCHES = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]


@pytest.mark.parametrize("pack", [True, False])
def test_cifar10_python_archives_are_read_packed_or_not(tmp_path: Path, pack: bool) -> None:
    batches = {
        name: {
            b"batch_label": b"x",
            b"labels": [n, 9],
            b"data": images(2, 3072, seed=n),
            b"filenames": [b"a", b"b"],
        }
        for n, name in enumerate(BATCHES)
    }
    python_archive(tmp_path / "cifar-10-batches-py", batches, pack)
    data = load("cifar10", tmp_path)
    assert data.x.shape == (12, 3, 32, 32)
    assert np.array_equal(data.x[10:].reshape(2, -1), batches["test_batch"][b"data"])
    assert data.y.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9, 5, 9]
    assert data.train_size == 10


def test_a_packed_archive_that_was_damaged_in_transit_is_refused(tmp_path: Path) -> None:
    """The last bytes are a checksum of the pixels; a flipped bit there is like one in a pixel."""
    batches = {
        name: {b"labels": [n], b"data": images(1, 3072, seed=n)} for n, name in enumerate(BATCHES)
    }
    python_archive(tmp_path / "cifar-10-batches-py", batches, pack=True)
    archive = tmp_path / "cifar-10-python.tar.gz"
    content = bytearray(archive.read_bytes())
    content[-8] ^= 1
    archive.write_bytes(content)
    with pytest.raises(BrokenDataset, match="CRC"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("label", [10**30, -1, 100, 0.5])
def test_a_batch_with_impossible_labels_is_refused(label: Any) -> None:
    batch = pickle.dumps({b"labels": [label], b"data": images(1, 3072)}, protocol=2)
    with pytest.raises(BrokenDataset, match="numbers from 0 to 99"):
        cifar.python_batch(batch, "labels")


def test_a_batch_that_python_2_wrote_is_read() -> None:
    """The official files: strings are bytes, and the array's module has the name of numpy 1."""

    def _string(content: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(content)) + content

    pixels = images(2, 3072)
    array = b"".join([
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85",
        _string(b"b"), b"\x87R(K\x01", b"K\x02M\x00\x0c\x86", b"cnumpy\ndtype\n",
        _string(b"u1"), b"K\x00K\x01\x87R(K\x03", _string(b"|"),
        b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89", _string(pixels.tobytes()), b"tb",
    ])  # fmt: skip
    content = b"\x80\x02}(" + _string(b"data") + array + _string(b"labels") + b"](K\x06K\x09eu."
    x, y = cifar.python_batch(content, "labels")
    assert np.array_equal(x.reshape(2, -1), pixels)
    assert y.tolist() == [6, 9]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_batch_is_read_from_a_pickle_of_any_protocol(protocol: int, order: Any) -> None:
    pixels = images(2, 3072)
    batch = {"data": np.asarray(pixels, order=order), "labels": [6, 9]}
    x, y = cifar.python_batch(pickle.dumps(batch, protocol=protocol), "labels")
    assert np.array_equal(x.reshape(2, -1), pixels)
    assert y.tolist() == [6, 9]


def test_a_batch_of_protocol_5_that_numpy_1_wrote_is_read() -> None:
    pixels = images(2, 3072)
    content = pickle.dumps({"data": pixels, "labels": [6, 9]}, protocol=5)
    unframed = content[:2] + content[11:]  # The length of the frame would no longer be right.
    # The byte before the name is its length.
    older = unframed.replace(b"\x13numpy._core.numeric", b"\x12numpy.core.numeric")
    assert np.array_equal(cifar.python_batch(older, "labels")[0].reshape(2, -1), pixels)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize(
    ("labels", "classes", "expected"), [("fine", 100, [7, 99]), ("coarse", 20, [3, 19])]
)
def test_cifar100_has_fine_and_coarse_labels(
    tmp_path: Path, pack: bool, labels: str, classes: int, expected: list[int]
) -> None:
    batch = {b"fine_labels": [7, 99], b"coarse_labels": [3, 19], b"data": images(2, 3072)}
    python_archive(tmp_path / "cifar-100-python", {"train": batch, "test": batch}, pack)
    data = load(f"cifar100,labels={labels}", tmp_path)
    assert (data.classes, data.train_size, data.y.tolist()) == (classes, 2, expected * 2)


def test_cifar_binary_archives_are_read(tmp_path: Path) -> None:
    pixels = images(2, 3072)
    for folder, names, labels in [
        ("cifar-10-batches-bin", [f"{name}.bin" for name in BATCHES], [[4], [5]]),
        ("cifar-100-binary", ["train.bin", "test.bin"], [[1, 42], [2, 43]]),
    ]:
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_bytes(
                np.hstack([np.array(labels, np.uint8), pixels]).tobytes()
            )
    assert load("cifar10", tmp_path).y[:2].tolist() == [4, 5]
    assert np.array_equal(load("cifar10", tmp_path).x[:2].reshape(2, -1), pixels)
    assert load("cifar100", tmp_path).y[:2].tolist() == [42, 43]
    assert load("cifar100", tmp_path, labels="coarse").y[:2].tolist() == [1, 2]


class Malicious:
    """An object whose pickle calls a function."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call = call, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_tampered_archive_runs_nothing(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "was-run"
    attacks = [
        Malicious(os.system, f"touch {mark}"),
        Malicious(eval, f"open({str(mark)!r}, 'w')"),
        Malicious(getattr, "", "join"),
        Malicious(np.memmap, str(mark), "uint8", "w+", 0, 1),
        Malicious(np.save, str(mark), 1),
    ]
    for attack in attacks:
        with pytest.raises(BrokenDataset, match=r"tampered with"):
            cifar.unpickle(pickle.dumps({b"data": attack, b"labels": [1]}, protocol=protocol))
    assert not mark.exists()
    assert not mark.with_suffix(".npy").exists()


def test_a_tampered_archive_cannot_hide_objects_in_an_array() -> None:
    """An array of objects may contain anything; only bytes are accepted in a CIFAR batch."""
    batch = pickle.dumps({b"data": np.array([[None] * 3072], object), b"labels": [1]}, protocol=2)
    with pytest.raises(BrokenDataset, match=r"array of O8, expected bytes"):
        cifar.python_batch(batch, "labels")


class OfBuffer:
    """An object that is pickled like an array in protocol 5, with any value as its buffer."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return images(1).__reduce_ex__(5)[0], self.arguments


@pytest.mark.parametrize(
    ("buffer", "kind"),
    [(10**12, "u1"), ("text", "u1"), ([1], "u1"), (bytes(3072 * 8), "f8"), (bytes(3072 * 8), "O")],
)
def test_a_tampered_buffer_of_protocol_5_is_refused(buffer: Any, kind: str) -> None:
    """Above all a number is refused: bytes(10**12) would allocate that much memory."""
    array = OfBuffer(buffer, np.dtype(kind), (1, 3072), "C")
    with pytest.raises(BrokenDataset, match=r"expected bytes \(u1\)"):
        cifar.python_batch(pickle.dumps({b"data": array, b"labels": [1]}, protocol=5), "labels")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        pickle.dumps([1]),
        pickle.dumps({b"data": 3, b"labels": [1]}),
        pickle.dumps({b"labels": [1]}),
        pickle.dumps({b"data": images(2, 3072), b"labels": [1]}),
        pickle.dumps({b"data": images(1, 3072), b"labels": [{}]}),
    ],
)
def test_a_damaged_batch_is_explained(content: bytes) -> None:
    with pytest.raises(BrokenDataset, match="CIFAR batch"):
        cifar.python_batch(content, "labels")


def cifar10_npz(folder: Path, x: np.ndarray) -> Path:
    """Write CIFAR-10 as npz files, all with the same images."""
    for name in (*(f"train_{n}" for n in range(1, 6)), "test"):
        write_npz(folder / "cifar10" / f"{name}.npz", x, np.arange(len(x)))
    return folder


def test_cifar_npz_is_read_with_channels_first_however_it_was_saved(tmp_path: Path) -> None:
    pixels = images(2, 3, 32, 32)
    forms = {"first": pixels, "last": np.moveaxis(pixels, 1, 3), "flat": pixels.reshape(2, 3072)}
    for name, saved in forms.items():
        data = load("cifar10", cifar10_npz(tmp_path / name, saved))
        assert np.array_equal(data.x, np.concatenate([pixels] * 6))
        assert data.x.flags.c_contiguous
        for part in ("train", "test"):
            write_npz(tmp_path / name / "cifar100" / f"{part}.npz", saved, np.arange(2))
        assert np.array_equal(load("cifar100", tmp_path / name).x, np.concatenate([pixels] * 2))


@pytest.mark.parametrize("shape", [(32, 32), (32, 3, 32), (1, 32, 32), (28, 28, 3), (1024,), ()])
def test_cifar_npz_of_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(BrokenDataset, match=r"train_1\.npz has x of .*expected n x 3 x 32 x 32"):
        load("cifar10", cifar10_npz(tmp_path, images(2, *shape)))


def test_npz_with_pickled_objects_is_refused(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / "mnist").mkdir(exist_ok=True)
        np.savez(
            tmp_path / "mnist" / f"{name}.npz", allow_pickle=True, x=np.array([{}]), y=np.array([0])
        )
    with pytest.raises(BrokenDataset, match="without pickled objects"):
        load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [
        (np.uint8(1), np.arange(2), r"x of \(\), expected an entry for each sample"),
        (images(2, 28, 28), np.int64(1), r"y of \(\), expected an entry for each sample"),
        (images(2, 28, 28), np.arange(3), "2 of x and 3 of y"),
        (images(2, 28, 28), np.zeros((2, 1), int), r"y of int64 \(2, 1\), expected whole numbers"),
        (images(2, 28, 28), np.array([0.5, 1.5]), r"y of float64 \(2,\), expected whole numbers"),
    ],
)
def test_npz_without_one_label_for_each_sample_is_named(
    tmp_path: Path, x: Any, y: Any, says: str
) -> None:
    mnist_folder(tmp_path)
    write_npz(tmp_path / "mnist/test.npz", x, y)
    with pytest.raises(BrokenDataset, match=rf"mnist/test\.npz has {says}"):
        load("mnist", tmp_path)


def lzma_npz(path: Path, **arrays: np.ndarray) -> None:
    """Write an npz file as numpy does, but compressed with LZMA."""
    with ZipFile(path, "w", ZIP_LZMA) as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.save(content, array)
            archive.writestr(f"{name}.npy", content.getvalue())


def test_an_npz_packed_with_lzma_is_read_and_a_damaged_one_named(tmp_path: Path) -> None:
    mnist_folder(tmp_path)
    path = tmp_path / "mnist/test.npz"
    lzma_npz(path, x=images(2, 28, 28), y=np.arange(2))
    assert np.array_equal(load("mnist", tmp_path).x[6:], images(2, 28, 28))
    content = path.read_bytes()
    path.write_bytes(
        content[:300] + bytes(byte ^ 0xFF for byte in content[300:600]) + content[600:]
    )
    with pytest.raises(BrokenDataset, match=r"cannot read .*mnist/test\.npz"):
        load("mnist", tmp_path)


def test_an_npz_with_a_password_is_named(tmp_path: Path) -> None:
    mnist_folder(tmp_path)
    path = tmp_path / "mnist/test.npz"
    content = path.read_bytes()
    # The position of the flags in the archive's directory; the first flag means "encrypted".
    entry = content.index(b"PK\x01\x02") + 8
    path.write_bytes(content[:entry] + b"\x01" + content[entry + 1 :])
    with pytest.raises(BrokenDataset, match=r"cannot read .*mnist/test\.npz"):
        load("mnist", tmp_path)


def test_an_npy_file_that_is_called_npz_is_explained(tmp_path: Path) -> None:
    mnist_folder(tmp_path)
    with (tmp_path / "mnist/test.npz").open("wb") as file:
        np.save(file, images(2, 28, 28))
    with pytest.raises(
        BrokenDataset, match=r"mnist/test\.npz holds a single array \(npy\).*np\.savez"
    ):
        load("mnist", tmp_path)


def mnist_folder(folder: Path, value: int = 1) -> Path:
    """Write MNIST as npz files with 6 and 2 images of one grey value."""
    for name, count in (("train", 6), ("test", 2)):
        write_npz(
            folder / "mnist" / f"{name}.npz",
            np.full((count, 28, 28), value, np.uint8),
            np.arange(count),
        )
    return folder


def test_decoded_arrays_come_from_the_cache_the_second_time(tmp_path: Path) -> None:
    folder = mnist_folder(tmp_path)
    first, second = load("mnist", folder), load("mnist", folder)
    [entry] = cache.cache_folder().iterdir()
    np.save(entry / "x.npy", np.full((8, 28, 28), 77, np.uint8))
    assert np.array_equal(first.x, second.x)
    assert load("mnist", folder).x[0, 0, 0] == 77


def test_the_cache_notices_that_a_file_has_changed(tmp_path: Path) -> None:
    load("mnist", mnist_folder(tmp_path))
    changed = mnist_folder(tmp_path, value=9)
    # The clock may be too coarse to distinguish two writes.
    os.utime(changed / "mnist/train.npz", ns=(0, 1))
    assert load("mnist", changed).x.max() == 9
    assert len(list(cache.cache_folder().iterdir())) == 1  # The older state was removed.


@pytest.mark.parametrize("content", [b"", b"rubbish", pickle.dumps(np.zeros(3))])
def test_a_damaged_cache_is_rebuilt_and_never_unpickled(tmp_path: Path, content: bytes) -> None:
    folder = mnist_folder(tmp_path)
    good = load("mnist", folder)
    [entry] = cache.cache_folder().iterdir()
    for name in ("x.npy", "y.npy"):
        expected = np.array(good.x)
        (entry / name).unlink()
        (entry / name).write_bytes(content)
        assert np.array_equal(load("mnist", folder).x, expected)
        assert len(list(cache.cache_folder().iterdir())) == 1


def test_processes_that_decode_at_the_same_time_all_get_the_data(tmp_path: Path) -> None:
    folder = mnist_folder(tmp_path)
    code = "from pathlib import Path; from fairfleet.lab.datasets import load; import sys; "
    code += "data = load('mnist', Path(sys.argv[1])); print(len(data), data.x.sum())"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    assert {process.communicate()[0].strip() for process in running} == {f"8 {8 * 28 * 28}"}
    assert [entry.name.partition("-")[0] for entry in cache.cache_folder().iterdir()] == ["mnist"]


def test_data_are_loaded_even_if_the_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(load("mnist", mnist_folder(tmp_path))) == 8


def test_the_data_dir_comes_before_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    explicit = mnist_folder(tmp_path / "explicit", 1)
    from_variable = mnist_folder(tmp_path / "variable", 2)
    monkeypatch.setenv("FAIRFLEET_DATA", f"{tmp_path / 'nowhere'}{os.pathsep}{from_variable}")
    assert load("mnist").x.max() == 2
    assert load("mnist", explicit).x.max() == 1


@pytest.mark.parametrize("name", ["adult", "cifar10", "cifar100", "fashion-mnist", "mnist"])
def test_a_missing_dataset_says_where_it_may_be_put_and_how_to_get_it(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(MissingDataset, match="https://") as caught:
        load(name, tmp_path)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    for word in (name, str(tmp_path), "--data-dir", "FAIRFLEET_DATA", "How to get it"):
        assert word in message


def test_a_dataset_that_lacks_one_file_says_which(tmp_path: Path) -> None:
    (mnist_folder(tmp_path) / "mnist" / "test.npz").unlink()
    with pytest.raises(
        MissingDataset, match=r"only a part of it was found: mnist/test.npz is missing"
    ):
        load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("imagenet", "there are adult"),
        ("synthetic,gamma=1", "no option gamma"),
        ("synthetic,alpha", "name=value"),
        ("synthetic,alpha=x", "expected float"),
        ("mnist,folders=x", "no option folders"),
        ("cifar100,labels=medium", "labels=coarse"),
        ("synthetic,users=0", "users from 1"),
    ],
)
def test_an_unknown_name_or_option_is_explained(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load(name)


ROW = (
    "39, State-gov, 77516, Doctorate, 13, Never-married, ?, Not-in-family, White, Male, 2174, 0, "
    "40, Cuba, >50K"
)
OTHER = ROW.replace("Doctorate", "HS-grad").replace(">50K", "<=50K").replace("39,", "41,")


def test_adult_is_read_as_published(tmp_path: Path) -> None:
    (tmp_path / "adult").mkdir()
    (tmp_path / "adult" / "adult.data").write_text(f"{ROW}\n{OTHER}\n\n")
    (tmp_path / "adult" / "adult.test").write_text(f"|1x3 Cross validator\n{ROW}.\n{OTHER}.\n")
    data = load("adult", tmp_path)
    assert data.x.shape == (4, 99)
    assert data.y.tolist() == [1, 0, 1, 0]
    assert data.user is not None
    assert [data.user_names[user] for user in data.user] == ["doctorate", "others"] * 2
    assert data.x[:, 21].tolist() == [1, 0, 1, 0]  # The papers' column of a doctorate.
    assert data.x.sum(1).tolist() == [7] * 4  # Of eight values one is missing.
    assert data.train_size == 2
    all_features = load("adult,features=all", tmp_path)
    assert all_features.x.shape == (4, 105)
    assert all_features.x[:, 99].tolist() == [-1, 1, -1, 1]


def test_adult_that_a_spreadsheet_saved_is_read(tmp_path: Path) -> None:
    (tmp_path / "adult").mkdir()
    for name in ("train.csv", "test.csv"):
        (tmp_path / "adult" / name).write_text(f"{','.join(adult.COLUMNS)}\n{ROW}\n", "utf-8-sig")
    assert load("adult", tmp_path).y.tolist() == [1, 1]


def test_the_shift_of_adult_changes_the_training_part_alone_as_in_the_authors_code(
    tmp_path: Path,
) -> None:
    (tmp_path / "adult").mkdir()
    (tmp_path / "adult" / "adult.data").write_text(f"{OTHER}\n{ROW}\n{OTHER}\n")
    (tmp_path / "adult" / "adult.test").write_text(f"{OTHER}.\n{ROW}.\n")
    # The rows of the doctors; the last two rows are the test part.
    doctors = {"adult": [1, 4], "adult,shift=1": [2, 4]}
    for name, expected in doctors.items():
        data = load(name, tmp_path)
        assert data.user is not None
        assert np.flatnonzero(data.user == 0).tolist() == expected
        assert data.y.tolist() == [0, 1, 0, 0, 1]


def test_adult_has_99_values_in_eight_columns() -> None:
    assert len(adult.BINARY) == 99
    assert adult.BINARY[21] == ("education", "Doctorate")


@pytest.mark.parametrize(
    "row", [ROW.replace("Cuba", "Utopia"), ROW.replace(">50K", "much"), "1, 2, 3"]
)
def test_adult_with_unknown_values_is_refused(tmp_path: Path, row: str) -> None:
    (tmp_path / "adult").mkdir()
    for name in ("adult.data", "adult.test"):
        (tmp_path / "adult" / name).write_text(f"{row}\n")
    with pytest.raises(BrokenDataset, match=r"Utopia|much|3 columns"):
        load("adult", tmp_path)


def test_synthetic_is_drawn_from_its_seed_alone() -> None:
    first, again, another_seed = load("synthetic"), load("synthetic"), load("synthetic", seed=1)
    assert np.array_equal(first.x, again.x)
    assert np.array_equal(first.y, again.y)
    assert first.x.shape != another_seed.x.shape


@pytest.mark.parametrize(
    "option", ["alpha=nan", "alpha=inf", "beta=-1", "beta=nan", "users=0", "seed=-1"]
)
def test_synthetic_with_impossible_options_is_refused(option: str) -> None:
    with pytest.raises(UsageError, match="synthetic needs"):
        load(f"synthetic,{option}")
    with pytest.raises(UsageError, match="seed from 0"):
        load("digits-rotated,seed=-1")


def test_a_class_that_is_selected_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="each class only once"):
        load("digits").only_classes([0, 0])


def test_leafs_synthetic_is_as_its_generator_draws_it() -> None:
    """One linear model for all clients, up to a factor; the logits have a noise of 0.1."""
    data = load("leaf-synthetic,users=400,seed=1")
    assert data.user is not None
    sizes = np.bincount(data.user)
    assert (len(sizes), data.x.shape[1:], data.classes) == (400, (60,), 10)
    assert (sizes.min(), sizes.max()) == (5, 1000)
    assert 20 < np.median(sizes) < 32  # exp(3) + 5 is 25.
    large = np.flatnonzero(sizes == 1000)
    assert len(large) > 1
    variances = np.mean([data.x[data.user == client].var(0) for client in large], axis=0)
    assert np.allclose(variances, np.arange(1, 61) ** -1.2, rtol=0.1)
    centres = np.array([data.x[data.user == client].mean(0) for client in range(400)])
    assert np.std(centres.mean(1)) == pytest.approx(1, abs=0.15)  # of B
    assert np.mean(centres.std(1)) == pytest.approx(1, abs=0.15)  # of v around B


def test_what_is_learnt_from_some_clients_fits_others_only_in_leafs_synthetic() -> None:
    torch = pytest.importorskip("torch")

    def _learn_from_half(name: str, users: int) -> float:
        data = load(name, users=users)
        assert data.user is not None
        x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
        known = torch.from_numpy(data.user < users // 2)
        torch.manual_seed(0)
        model = torch.nn.Linear(60, 10)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        for _ in range(100):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[known]), y[known]).backward()
            optimizer.step()
        return float((model(x[~known]).argmax(1) == y[~known]).float().mean())

    assert _learn_from_half("leaf-synthetic", 200) > 0.6
    assert _learn_from_half("synthetic", 20) < 0.4


def test_leafs_synthetic_is_drawn_from_its_seed_alone() -> None:
    first, again, other = (load("leaf-synthetic", seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(first.x, again.x)
    assert np.array_equal(first.y, again.y)
    assert first.x.shape != other.x.shape
    with pytest.raises(UsageError, match="leaf-synthetic needs"):
        load("leaf-synthetic,users=0")


def test_synthetic_is_as_fedprox_describes_it() -> None:
    """Setup D: 100 clients with lognormal sizes from 50, 60 features, 10 classes.

    Feature j has the variance j^-1.2 within a client.
    """
    data = load("synthetic", alpha=1, beta=1)
    assert data.user is not None
    sizes = np.bincount(data.user)
    assert (len(sizes), data.x.shape[1:], data.classes) == (100, (60,), 10)
    assert sizes.min() >= 50
    assert sizes.max() > 10 * np.median(sizes)
    largest = data.x[data.user == sizes.argmax()]
    assert np.allclose(largest.var(0), np.arange(1, 61) ** -1.2, rtol=0.2)


def test_synthetic_clients_differ_more_with_larger_alpha_and_beta() -> None:
    def _spread(beta: float) -> float:
        data = load("synthetic", alpha=0, beta=beta)
        assert data.user is not None
        return float(np.std([data.x[data.user == user].mean() for user in range(100)]))

    assert _spread(0) < 0.3 < 0.7 < _spread(1) < 2 < _spread(16)


def test_the_rotated_digits_are_the_demos_clients() -> None:
    data, shards = load("digits-rotated"), embedded.partition(*embedded.images())
    assert data.user is not None
    assert data.user_names == embedded.CLIENTS
    for number, shard in enumerate(shards.values()):
        own = np.flatnonzero(data.user == number)
        assert np.array_equal(data.x[own[own < data.train_size]], shard.train_images)
        assert np.array_equal(data.y[own[own >= data.train_size]], shard.test_labels)


def small(x: np.ndarray, y: list[int], train_size: int, classes: int = 4) -> Dataset:
    """Return a dataset in which each sample has its own user."""
    return Dataset(
        "small",
        x,
        np.array(y),
        train_size,
        classes,
        user=np.arange(len(y)),
        class_names=tuple("abcd"),
    )


def test_a_dataset_can_be_cut_to_its_training_part_and_to_some_classes() -> None:
    full = small(np.arange(6), [3, 1, 0, 3, 2, 1], 4)
    train = full.training_part()
    assert (train.x.tolist(), train.y.tolist(), len(train)) == ([0, 1, 2, 3], [3, 1, 0, 3], 4)
    some = full.only_classes([3, 1])
    assert (some.x.tolist(), some.y.tolist(), some.train_size) == ([0, 1, 3, 5], [0, 1, 0, 1], 3)
    assert (some.classes, some.class_names) == (2, ("d", "b"))
    assert some.user is not None
    assert some.user.tolist() == [0, 1, 3, 5]
    with pytest.raises(UsageError, match="0 to 3"):
        full.only_classes([4])


@pytest.mark.parametrize(
    ("x", "y"), [(np.zeros(2), [0]), (np.zeros(1), [4]), (np.zeros(1), [-1]), (np.zeros(0), [])]
)
def test_arrays_that_do_not_fit_together_are_refused(x: np.ndarray, y: list[int]) -> None:
    with pytest.raises(BrokenDataset):
        small(x, y, 0)


def test_preprocessing_is_that_of_the_papers() -> None:
    grey = small(np.array([[[0, 255]], [[51, 51]]], np.uint8), [0, 1], 2)
    assert preprocessing("unit", grey)(grey.x).tolist() == [[[[0, 1]]], [[[np.float32(0.2)] * 2]]]
    standard = preprocessing("standard", grey)(grey.x)
    assert standard[0, 0] == pytest.approx([-25.5 / 25.501, 102 / 102.001])
    colour = small(np.full((1, 3, 2, 2), 255, np.uint8), [0], 1)
    expected = [(1 - 0.4914) / 0.2023, (1 - 0.4822) / 0.1994, (1 - 0.4465) / 0.2010]
    assert preprocessing("cifar10", colour)(colour.x)[0, :, 0, 0] == pytest.approx(expected)
    assert preprocessing("plain", colour)(colour.x).dtype == np.int64
    with pytest.raises(UsageError, match="plain, unit"):
        preprocessing("whiten", colour)


def test_preprocessing_leaves_the_stored_values_alone() -> None:
    dataset = small(np.ones((2, 3, 2, 2), np.float32), [0, 1], 2)
    for name in ("plain", "unit", "cifar10", "standard"):
        assert preprocessing(name, dataset)(dataset.x).dtype == np.float32
        assert dataset.x.min() == dataset.x.max() == 1


@real_data
@pytest.mark.parametrize(
    ("name", "shape", "train", "counts"),
    [
        ("fashion-mnist", (28, 28), 60_000, [6000] * 10),
        ("mnist", (28, 28), 60_000, [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]),
        ("adult", (99,), 32_561, [24_720, 7_841]),
    ],
)
def test_real_data_have_the_published_counts(
    name: str, shape: tuple[int, ...], train: int, counts: list[int]
) -> None:
    data = load(name, Path(REAL))
    assert (data.x.shape[1:], data.train_size) == (shape, train)
    assert np.bincount(data.y[:train]).tolist() == counts


@real_data
@pytest.mark.slow
def test_real_cifar10_has_the_published_counts_and_mean() -> None:
    data = load("cifar10", Path(REAL)).training_part()
    assert np.bincount(data.y).tolist() == [5000] * 10
    assert data.x.mean((0, 2, 3)) / 255 == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)


def test_a_tar_archive_is_not_extracted(tmp_path: Path) -> None:
    """A member with a path outside is looked up by its last name only, and read in memory."""
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        for name in BATCHES:
            content = pickle.dumps({b"labels": [1], b"data": images(1, 3072)}, protocol=2)
            member = tarfile.TarInfo(f"../../{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    before = sorted(tmp_path.parent.iterdir())
    assert len(load("cifar10", tmp_path)) == 6
    assert sorted(tmp_path.parent.iterdir()) == before
