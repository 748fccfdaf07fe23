"""Data with natural clients (roles, sensors, LEAF's users), and the user's own data."""

from __future__ import annotations

import gzip
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fairfleet.common.errors import UsageError
from fairfleet.lab.datasets import BrokenDataset, MissingDataset, leaf, load
from fairfleet.lab.datasets.places import VARIABLE
from fairfleet.lab.datasets.shakespeare import ALPHABET
from fairfleet.lab.datasets.text import Alphabet, windows
from fairfleet.lab.partitioning.partitions import partition
from fairfleet.lab.partitioning.splits import split_as_published

REAL = Path(os.environ.get(VARIABLE, "/nowhere"))


def users_of(data: Any) -> list[str]:
    """Return the name of each sample's user."""
    return [data.user_names[user] for user in data.user]


def write_json(path: Path, content: Any) -> Path:
    """Write JSON, gzipped if the name ends with .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@given(st.text(max_size=200), st.integers(1, 90))
def test_a_sample_is_80_characters_and_its_label_the_next(text: str, stride: int) -> None:
    codes = ALPHABET.encode(text)
    x, y = windows(codes, stride)
    assert len(codes) == len(text)
    assert len(x) == len(y) == len(range(0, max(0, len(text) - 80), stride))
    for index, (sample, label) in enumerate(zip(x, y, strict=True)):
        start = index * stride
        assert np.array_equal(sample, codes[start : start + 80])
        assert label == codes[start + 80]


def test_an_alphabet_encodes_unknown_characters_as_blanks() -> None:
    assert Alphabet("ab c").encode("cab\n\U0001f600").tolist() == [3, 0, 1, 2, 2]


@pytest.mark.usefixtures("no_data")
def test_each_role_with_enough_text_is_a_client(tmp_path: Path) -> None:
    text = {"HAMLET": "To be, or not\nto be: " * 10, "GHOST": "Mark me." * 10, "OPHELIA": "x" * 81}
    write_json(
        tmp_path / "shakespeare/roles.json.gz", {"format": 1, "users": list(text), "text": text}
    )
    data = load("shakespeare", tmp_path)
    # The ghost has 80 characters, and no character follows.
    assert data.user_names == ("HAMLET", "OPHELIA")
    assert data.user is not None
    assert np.bincount(data.user).tolist() == [130, 1]
    assert "".join(ALPHABET.characters[code] for code in data.x[0]) == text["HAMLET"][:80].replace(
        "\n", " "
    )
    assert load("shakespeare,stride=80", tmp_path).y.shape == (3,)
    assert load("shakespeare,minimum=2", tmp_path).user_names == ("HAMLET",)
    with pytest.raises(BrokenDataset, match="no role"):
        load("shakespeare,minimum=500", tmp_path)


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("content", [[], {"text": []}, {"text": {"A": 3}}, {}])
def test_a_roles_file_with_another_structure_is_refused(tmp_path: Path, content: Any) -> None:
    write_json(tmp_path / "shakespeare/roles.json", content)
    with pytest.raises(BrokenDataset, match="names and lines"):
        load("shakespeare", tmp_path)


@pytest.mark.usefixtures("no_data")
def test_vehicle_has_a_client_for_each_sensor(tmp_path: Path) -> None:
    (tmp_path / "vehicle").mkdir()
    np.savez(
        tmp_path / "vehicle/train.npz",
        x=np.ones((3, 4)),
        y=np.array([0, 1, 1]),
        client=np.array([2, 0, 2]),
    )
    data = load("vehicle", tmp_path)
    assert users_of(data) == ["sensor-02", "sensor-00", "sensor-02"]
    assert [share.tolist() for share in partition("user", data.y, data.user)] == [[1], [0, 2]]


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize(
    "odd",
    [
        {"y": np.array([0.2, 0.9, 1.0])},
        {"x": np.array([[1.0], [np.nan], [2.0]])},
        {"x": np.array([["a"], ["b"], ["c"]])},
        {"client": np.array([0.0, np.nan, 1.0])},
        {"client": np.array(["a", "b", "c"])},
        {"client": np.array([-1, 0, 1])},
        {"x": np.empty((0, 1)), "y": np.empty(0, int), "client": np.empty(0, int)},
    ],
)
def test_vehicle_with_wrong_arrays_is_refused(tmp_path: Path, odd: dict[str, Any]) -> None:
    (tmp_path / "vehicle").mkdir()
    right = {"x": np.ones((3, 1)), "y": np.array([0, 1, 1]), "client": np.array([2, 0, 10**12])}
    np.savez(tmp_path / "vehicle/train.npz", **right)
    assert load("vehicle", tmp_path).user_names == ("sensor-00", "sensor-02", f"sensor-{10**12}")
    np.savez(tmp_path / "vehicle/train.npz", **(right | odd))
    with pytest.raises(BrokenDataset):
        load("vehicle", tmp_path)


@pytest.mark.skipif(
    not REAL.joinpath("vehicle").exists(), reason=f"{VARIABLE} names no folder with vehicle"
)
def test_real_vehicle_and_shakespeare_have_the_described_clients() -> None:
    vehicle, shakespeare = load("vehicle"), load("shakespeare")
    assert (len(vehicle), len(vehicle.user_names), vehicle.y.sum()) == (1860, 23, 1023)
    assert (len(shakespeare), len(shakespeare.user_names)) == (4_194_762, 1157)


def leaf_file(**users: tuple[list[Any], list[Any]]) -> dict[str, Any]:
    """Return the content of a LEAF file with these users' samples and labels."""
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    return {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": data,
    }


@pytest.mark.usefixtures("no_data")
def test_leaf_users_keep_their_published_train_and_test_parts(tmp_path: Path) -> None:
    two_images, one_image = [[0.5] * 784] * 2, [[1.0] * 784]
    write_json(tmp_path / "leaf/femnist/train/a.json", leaf_file(f0=(two_images, [3, 61])))
    write_json(tmp_path / "leaf/femnist/train/b.json", leaf_file(f1=(one_image, [7])))
    test_users = leaf_file(f1=(two_images, [1, 2]), f0=(one_image, [0]))
    write_json(tmp_path / "leaf/femnist/test/a.json", test_users)
    data = load("leaf-femnist", tmp_path)
    assert (data.x.shape, data.x.dtype, data.classes, data.train_size) == (
        (6, 28, 28),
        np.float32,
        62,
        3,
    )
    assert users_of(data) == ["f0", "f0", "f1", "f1", "f1", "f0"]
    first, second = split_as_published(partition("user", data.y, data.user), data.train_size)
    assert (data.y[first.train].tolist(), data.y[first.test].tolist()) == ([3, 61], [0])
    assert (data.y[second.train].tolist(), data.y[second.test].tolist()) == ([7], [1, 2])


@pytest.mark.usefixtures("no_data")
def test_leafs_shakespeare_has_its_80_characters(tmp_path: Path) -> None:
    line = "x" * 79 + "}"
    write_json(
        tmp_path / "shakespeare/data/train/a.json", leaf_file(KING=([line, line], ["a", "\n"]))
    )
    data = load("leaf-shakespeare", tmp_path)
    assert (data.classes, data.x.shape) == (80, (2, 80))
    assert [leaf.SHAKESPEARE.characters[code] for code in data.y] == ["a", "\n"]
    assert "".join(leaf.SHAKESPEARE.characters[code] for code in data.x[0]) == line


@pytest.mark.usefixtures("no_data")
def test_leafs_tweets_end_at_the_end_of_their_row(tmp_path: Path) -> None:
    def _tweet(text: str) -> list[str]:
        return ["1", "Mon", "NO_QUERY", "me", text, "?"]

    users = leaf_file(me=([_tweet("good day"), _tweet("b" * 200)], [1, 0]))
    write_json(tmp_path / "leaf/sent140/train/a.json", users)
    data = load("leaf-sent140", tmp_path)
    read = ["".join(leaf.PRINTABLE.characters[code] for code in row) for row in data.x]
    assert read == ["good day".rjust(140), "b" * 140]
    assert (data.y.tolist(), data.classes) == ([1, 0], 2)


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize(
    "content", [{}, [], {"user_data": {"a": {"x": [[1, 2]], "y": [1]}}},
                {"user_data": {"a": {"x": [[0.0] * 784]}}},
                {"user_data": {"a": {"x": [[0.0] * 784], "y": ["?"]}}}, {"user_data": [3]},
                {"user_data": {"a": {"x": [[0.0] * 784], "y": [10**30]}}},
                {"user_data": {"a": {"x": [[0.0] * 784], "y": [math.inf]}}},
                {"user_data": {"\ud800": {"x": [[0.0] * 784], "y": [1]}}}]
)  # fmt: skip
def test_a_file_that_is_not_from_leaf_is_named(tmp_path: Path, content: Any) -> None:
    write_json(tmp_path / "leaf/femnist/train/odd.json", content)
    with pytest.raises(BrokenDataset, match=r"odd\.json"):
        load("leaf-femnist", tmp_path)


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize(
    "name", ["leaf-femnist", "leaf-sent140", "leaf-shakespeare", "shakespeare", "vehicle"]
)
def test_the_error_for_missing_natural_data_says_how_to_get_them(name: str, tmp_path: Path) -> None:
    with pytest.raises(MissingDataset, match="How to get it"):
        load(name, tmp_path)


def save_image(path: Path, shade: int, mode: str = "L", size: tuple[int, int] = (4, 3)) -> None:
    """Save an image of one shade."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, shade if mode == "L" else (shade, 0, 0)).save(path)


def test_a_folder_for_each_class_is_a_dataset(tmp_path: Path) -> None:
    for path, shade in {
        "pets/dog/1.png": 10,
        "pets/cat/b.PNG": 20,
        "pets/cat/a.png": 30,
        "pets/cat/notes.txt": 0,
    }.items():
        if path.endswith("txt"):
            (tmp_path / path).write_text("no image")
        else:
            save_image(tmp_path / path, shade)
    data = load(str(tmp_path / "pets"))
    assert (data.name, data.class_names, data.x.shape, data.train_size) == (
        "pets",
        ("cat", "dog"),
        (3, 3, 4),
        3,
    )
    assert (data.x[:, 0, 0].tolist(), data.y.tolist()) == ([30, 20, 10], [0, 0, 1])


def test_a_folder_without_images_is_no_class(tmp_path: Path) -> None:
    save_image(tmp_path / "a/1.png", 10)
    save_image(tmp_path / "b/1.png", 20)
    for folder in (".git", "results", "a.partial"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "runs.jsonl").write_text("")
    assert load(str(tmp_path)).class_names == ("a", "b")


def test_folders_train_and_test_are_the_published_parts(tmp_path: Path) -> None:
    save_image(tmp_path / "train/a/1.png", 10, "RGB")
    save_image(tmp_path / "train/b/1.jpg", 200, "RGB")
    save_image(tmp_path / "test/b/1.png", 30, "RGB")
    data = load(str(tmp_path))
    assert (data.x.shape, data.train_size, data.y.tolist()) == ((3, 3, 3, 4), 2, [0, 1, 1])
    assert (data.x[0, :, 0, 0].tolist(), abs(int(data.x[1, 0, 0, 0]) - 200) < 5) == (
        [10, 0, 0],
        True,
    )


def test_images_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save_image(tmp_path / "a/1.png", 1)
    save_image(tmp_path / "a/2.png", 1, size=(5, 5))
    with pytest.raises(BrokenDataset, match=r"2\.png is an image of \(5, 5\)"):
        load(str(tmp_path))
    (tmp_path / "a/2.png").write_bytes(b"no image")
    with pytest.raises(BrokenDataset, match=r"cannot read the image .*2\.png"):
        load(str(tmp_path))
    with pytest.raises(BrokenDataset, match="no images"):
        load(str(tmp_path / "a"))


def save_deep(path: Path, values: list[list[int]]) -> None:
    """Save a grey PNG of 16 bits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.array(values, np.uint16)).save(path)


def test_images_of_16_bits_are_scaled_to_8(tmp_path: Path) -> None:
    save_deep(tmp_path / "a/1.png", [[0, 255, 256], [32768, 65279, 65535]])
    # This image has 8 bits: some programs save each image with as many bits as it needs.
    save_image(tmp_path / "a/2.png", 200, size=(3, 2))
    data = load(str(tmp_path))
    assert (data.x.dtype, data.x.tolist()) == (
        np.uint8,
        [[[0, 0, 1], [128, 254, 255]], [[200] * 3] * 2],
    )


def test_images_of_16_bits_that_use_only_a_few_are_refused(tmp_path: Path) -> None:
    """Of the 4096 shades of a 12-bit camera or scanner 16 would remain, all nearly black."""
    save_deep(tmp_path / "a/1.png", [[0, 4095]])
    save_deep(tmp_path / "a/2.png", [[0, 17]])
    with pytest.raises(BrokenDataset, match=r"1\.png.* 16 bits .* nearly black.*npz"):
        load(str(tmp_path))
    save_deep(tmp_path / "a/2.png", [[0, 60000]])
    assert load(str(tmp_path)).x.max() == 234


def test_the_users_own_npz_may_name_users_and_a_training_part(tmp_path: Path) -> None:
    x, y = np.arange(8.0).reshape(4, 2), np.array([0, 2, 1, 0])
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    plain = load(str(tmp_path / "mine.npz"))
    assert (plain.name, plain.classes, plain.train_size, plain.user) == ("mine", 3, 4, None)
    np.savez(tmp_path / "mine.npz", x=x, y=y, user=np.array(["b", "a", "b", "b"]), train_size=3)
    data = load(str(tmp_path / "mine.npz"))
    assert (users_of(data), data.train_size) == (["b", "a", "b", "b"], 3)


@pytest.mark.parametrize(
    "arrays",
    [
        {"x": [1, 2], "y": [0.5, 1]},
        {"x": [1]},
        {"x": [1], "y": [0], "train_size": 2},
        {"x": [1], "y": [0], "user": [{}]},
        {"x": [1, 2], "y": [0]},
        {"x": [1, 2], "y": [0, 1], "user": [1]},
        {"x": [np.nan], "y": [0]},
        {"x": ["one"], "y": [0]},
        {"x": 1, "y": [0]},
        {"x": [1], "y": 0},
        {"x": [1], "y": [0], "user": 0},
        {"x": [1], "y": [0], "user": [[0]]},
        {"x": [1], "y": [0], "train_size": 0.5},
        {"x": [1], "y": [-1]},
        {"x": [1, 2], "y": [-1, 10**9]},
    ],
)
def test_an_npz_that_does_not_fit_is_refused(tmp_path: Path, arrays: dict[str, Any]) -> None:
    np.savez(
        tmp_path / "odd.npz",
        allow_pickle=True,
        **{name: np.array(value) for name, value in arrays.items()},
    )
    with pytest.raises(BrokenDataset, match="odd"):
        load(str(tmp_path / "odd.npz"))


def test_a_training_part_of_two_sizes_is_explained(tmp_path: Path) -> None:
    np.savez(tmp_path / "odd.npz", x=np.zeros((3, 2)), y=np.arange(3), train_size=np.array([2, 1]))
    with pytest.raises(
        BrokenDataset, match=r"odd\.npz has train_size of int64 \(2,\), expected one whole number"
    ):
        load(str(tmp_path / "odd.npz"))


def test_an_npy_file_in_place_of_an_npz_is_explained(tmp_path: Path) -> None:
    with (tmp_path / "odd.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(BrokenDataset, match=r"odd\.npz holds a single array \(npy\)"):
        load(str(tmp_path / "odd.npz"))


@pytest.mark.parametrize(
    ("y", "classes"),
    [([0, 2, 1, 0], 3), ([3, 3], 4), ([5, 900], 901), ([*range(1000), 9_999], 10_000)],
)
def test_labels_with_few_gaps_are_the_classes_themselves(
    tmp_path: Path, y: list[int], classes: int
) -> None:
    np.savez(tmp_path / "mine.npz", x=np.zeros((len(y), 2)), y=np.array(y))
    data = load(str(tmp_path / "mine.npz"))
    assert (data.y.tolist(), data.y.dtype, data.classes, data.class_names) == (
        y,
        np.int64,
        classes,
        (),
    )


@pytest.mark.parametrize("far", [1000, 10**9, 2**63 - 1, 2**64 - 1])
def test_labels_that_are_far_apart_are_names_of_classes(tmp_path: Path, far: int) -> None:
    np.savez(tmp_path / "mine.npz", x=np.zeros((4, 2)), y=np.array([far, 7, 7, far - 1], np.uint64))
    data = load(str(tmp_path / "mine.npz"))
    assert (data.y.tolist(), data.classes) == ([2, 0, 0, 1], 3)
    assert data.class_names == ("7", str(far - 1), str(far))


@pytest.mark.parametrize("ids", [[2**64 - 1, 2**63, 5], [2**63 - 1, 0, 1]])
def test_users_may_have_ids_of_any_size(tmp_path: Path, ids: list[int]) -> None:
    np.savez(
        tmp_path / "mine.npz", x=np.zeros((3, 2)), y=np.arange(3), user=np.array(ids, np.uint64)
    )
    data = load(str(tmp_path / "mine.npz"))
    assert users_of(data) == [str(user) for user in ids]
    assert data.user_names == tuple(str(user) for user in sorted(ids))


def test_users_and_labels_of_a_table_may_have_more_digits_than_a_number(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(f"a,label,user\n0,{10**19},{10**30}\n0,3,{10**30 + 1}\n")
    data = load(str(tmp_path / "mine.csv"))
    assert users_of(data) == [str(10**30), str(10**30 + 1)]
    assert [data.class_names[label] for label in data.y] == [str(10**19), "3"]


def test_the_users_own_csv_has_a_column_for_labels_and_may_have_one_for_users(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.csv").write_text(
        "width,label,user,height\n1,yes,ann,2\n3,no,bob,4.5\n5,yes,ann,6\n"
    )
    data = load(str(tmp_path / "mine.csv"))
    assert (data.x.tolist(), data.class_names) == ([[1, 2], [3, 4.5], [5, 6]], ("no", "yes"))
    assert (data.y.tolist(), users_of(data)) == ([1, 0, 1], ["ann", "bob", "ann"])


def test_names_ignore_blanks_around_them_but_not_leading_zeros(
    tmp_path: Path,
) -> None:
    path = tmp_path / "table.csv"
    path.write_text("a, label,user \n1,cat,01\n2, cat,1\n3,cat ,01\n")
    data = load(str(path))
    assert data.class_names == ("cat",)
    assert users_of(data) == ["01", "1", "01"]


def test_labels_that_are_numbers_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("a,label\n0,10\n0,9\n0,2\n")
    assert load(str(tmp_path / "mine.csv")).class_names == ("2", "9", "10")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,b\n1,2\n",
        "a,label\nx,1\n",
        "a,label\n1,2,3\n",
        "label,a\n1\n",
        "label,a\n1,inf\n",
        "a,label\n",
    ],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.csv").write_text(text)
    with pytest.raises(BrokenDataset, match="odd"):
        load(str(tmp_path / "odd.csv"))


def test_a_table_that_a_spreadsheet_saved_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("label,a\r\nyes,1\r\n\r\nno,2\r\n", "utf-8-sig", newline="")
    data = load(str(tmp_path / "mine.csv"))
    assert (data.x.tolist(), data.class_names, data.y.tolist()) == (
        [[1], [2]],
        ("no", "yes"),
        [1, 0],
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b,a,label\n1,2,3,x\n", r"odd\.csv has 2 columns named 'a'"),
        ("label,a,label,label\nx,2,y,z\n", r"odd\.csv has 3 columns named 'label'"),
        ("a,label\n1,x\n\n2,\n", r"odd\.csv has no label in line 4"),
        ("a,label\n1,  \n", r"odd\.csv has no label in line 2"),
        ("a,label,user\n1,x,ann\n2,x,\n", r"odd\.csv has no user in line 3"),
        ("a,label\n1,x\n2\n", r"odd\.csv has 1 cell in line 3, expected 2"),
        ("a,label\n1,x,2\n", r"odd\.csv has 3 cells in line 2, expected 2"),
        ("a,label\n1,x\ntwo,y\n", r"odd\.csv has 'two' in line 3, column 'a', expected a number"),
        ('a,label\n1,"x\ny"\n,y\n', r"odd\.csv has '' in line 4, column 'a', expected a number"),
        ("a;label\n1;x\n", r"odd\.csv has no column named label, only 'a;label'.* commas"),
        ("label\nx\n", r"odd\.csv has no column of numbers"),
        ("a,label\n", r"odd\.csv has no rows"),
        ("", r"odd\.csv has no column named label"),
        (f"a,label\n1,{'x' * 200_000}\n", r"cannot read .*odd\.csv"),
    ],
)
def test_an_error_in_a_table_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "odd.csv").write_text(text)
    with pytest.raises(BrokenDataset, match=says):
        load(str(tmp_path / "odd.csv"))


def test_a_table_that_is_not_in_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "odd.csv").write_text("a,label\n1,gr\u00fcn\n", "utf-16")
    with pytest.raises(BrokenDataset, match=r"cannot read .*odd\.csv.*UTF-8"):
        load(str(tmp_path / "odd.csv"))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.bin").touch()
    with pytest.raises(UsageError, match=r"nor a \.csv"):
        load(str(tmp_path / "data.bin"))
