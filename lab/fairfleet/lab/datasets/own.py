"""The user's own data: a folder with images of each class, an npz file, or a CSV file.

* Folder: `<class>/*.png` (or .jpg), or `train/<class>/…` and `test/<class>/…`. All images have one
  size. Of 16 bits the upper 8 are used.
* npz: arrays `x` and `y`, and optionally `user` (the client of each sample) and `train_size`. The
  labels `y` are the classes from 0 to the highest. If they are far apart, as ids are, each label
  that occurs is the name of a class instead.
* CSV: a header, numbers, and a column `label`. An optional column `user` names natural clients.
  Each label that occurs is the name of a class.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fairfleet.common.errors import UsageError, short
from fairfleet.common.extras import require
from fairfleet.lab.datasets.base import Array, BrokenDataset, Dataset, Labels, concatenate_parts
from fairfleet.lab.datasets.files import UNREADABLE, read_npz, read_pair, read_samples

IMAGES = {".png", ".jpg", ".jpeg"}
NEARLY_BLACK = 16  # Of 256 shades: what remains of 12 bits that were stored as 16.
# Up to here no label is too high, since a part of ImageNet may keep the labels of all of it.
MANY_CLASSES = 1000
FAR_APART = 10  # Ratio of the highest label to the number of different labels.
LONGEST_NUMBER = 18  # Digits that always fit 64 bits.


def load_own(path: Path) -> Dataset:
    """Load a folder of images, an npz file or a CSV file.

    Raises UsageError for another kind of file, and BrokenDataset if the content does not fit.
    """
    if not path.is_dir() and path.suffix not in READERS:
        raise UsageError(f"{path} is neither a folder of images, nor an .npz, nor a .csv file")
    dataset = read_image_folder(path) if path.is_dir() else READERS[path.suffix](path)
    x = dataset.x
    if x.dtype.kind not in "iuf" or not np.isfinite(x).all():
        raise BrokenDataset(
            f"{path} has x of {x.dtype}, expected finite numbers: convert, clean or remove the "
            "other values first"
        )
    if x.dtype.kind == "f" and np.abs(x).max(initial=0) > np.finfo(np.float32).max:
        raise BrokenDataset(
            f"{path} has values beyond 3.4e38, which float32 cannot represent: scale them down"
        )
    return dataset


def sources(path: Path) -> list[Path]:
    """Return the files that are read.

    A folder of images may also contain other files, such as records of runs.
    """
    if not path.is_dir():
        return [path]
    return sorted(
        file
        for depth in ("*/*", "*/*/*")
        for file in path.glob(depth)
        if file.suffix.lower() in IMAGES
    )


def read_image_folder(path: Path) -> Dataset:
    """Read a folder with one subfolder of images for each class.

    Raises BrokenDataset if there are no images or they differ in size.
    """
    parts = [path / "train", path / "test"] if (path / "train").is_dir() else [path]
    images = [_image_files(part) for part in parts]
    if not images[0]:
        raise BrokenDataset(
            f"{path} has no images: expected one folder for each class, with files "
            f"{', '.join(sorted(IMAGES))}"
        )
    # A folder without images is no class.
    names = sorted({file.parent.name for part in images for file in part})
    numbers = {name: number for number, name in enumerate(names)}
    pairs = [
        (_stack_images(part), np.array([numbers[file.parent.name] for file in part]))
        for part in images
        if part
    ]
    return Dataset(
        path.name,
        *concatenate_parts(pairs[:1], pairs[1:]),
        len(names),
        class_names=tuple(names),
    )


def _image_files(part: Path) -> list[Path]:
    return sorted(file for file in part.glob("*/*") if file.suffix.lower() in IMAGES)


def _stack_images(files: Sequence[Path]) -> Array:
    """Return grey images as height x width, coloured ones as channels x height x width."""
    first = _read_image(files[0])
    stacked = np.empty((len(files), *first.shape), np.uint8)
    for index, file in enumerate(files):
        image = _read_image(file)
        if image.shape != first.shape:
            raise BrokenDataset(
                f"{file} is an image of {image.shape}, but {files[0]} of {first.shape}: all images "
                "must have one size, and all must be grey or all coloured"
            )
        stacked[index] = _to_eight_bits(image)
    if first.dtype == np.uint16 and stacked.max() < NEARLY_BLACK:
        raise BrokenDataset(
            f"{files[0]} and all images with it have 16 bits but use at most the darkest sixteenth "
            "of the range, and would be nearly black in 8 bits: stretch them to the full range, or "
            "save their numbers as an npz"
        )
    return stacked


def _to_eight_bits(image: Array) -> Array:
    """Return the upper byte of 16 bits, as pillow does for coloured images of 16 bits."""
    return image >> 8 if image.dtype == np.uint16 else image


def _read_image(file: Path) -> Array:
    require("a folder of images", "PIL")
    from PIL import Image

    try:
        with Image.open(file, formats=("PNG", "JPEG")) as image:
            # In these formats both modes are 16 bits of grey; "I" is the name in older pillow.
            if image.mode in ("I;16", "I"):
                return np.asarray(image).astype(np.uint16)
            is_grey = image.mode in ("1", "L", "LA")
            pixels = np.asarray(image.convert("L" if is_grey else "RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BrokenDataset(f"cannot read the image {file}: {error}") from error
    return pixels if is_grey else np.moveaxis(pixels, 2, 0)


def read_own_npz(path: Path) -> Dataset:
    """Read an npz file with x, y and optionally user and train_size."""
    x, y = read_pair(path)
    with np.load(path, allow_pickle=False) as file:
        names = set(file.files)
    user, user_names = _read_users(path) if "user" in names else (None, ())
    train_size = _read_train_size(path) if "train_size" in names else len(y)
    labels, classes, class_names = _classes(y)
    return Dataset(path.stem, x, labels, train_size, classes, user, user_names, class_names)


def _read_users(path: Path) -> tuple[Labels, tuple[str, ...]]:
    _, user = read_samples(path, ("y", "user"))
    if user.ndim != 1:
        raise BrokenDataset(
            f"{path} has user of {user.shape}, expected one name or number for each sample"
        )
    return encode_values(user)


def _read_train_size(path: Path) -> int:
    (size,) = read_npz(path, ["train_size"])
    if size.size != 1 or size.dtype.kind not in "iu":
        raise BrokenDataset(
            f"{path} has train_size of {size.dtype} {size.shape}, expected one whole number: "
            "how many samples, from the first on, are for training"
        )
    return int(size.item())


def _classes(y: Array) -> tuple[Labels, int, tuple[str, ...]]:
    """Return the labels, the number of classes, and class names if the labels are far apart.

    Labels are the numbers of classes, so there is a class for each number up to the highest,
    whether it occurs or not. Ids or hashes would need millions of classes that way: where the
    highest label is 1000 or more, and at least ten times as high as the number of different
    labels, they are encoded like names. Labels below 0 are left for `Dataset` to refuse.
    """
    highest = int(y.max(initial=0))
    if highest < MANY_CLASSES or highest < FAR_APART * len(np.unique(y)) or y.min() < 0:
        return y.astype(np.int64), highest + 1, ()
    labels, names = encode_values(y)
    return labels, len(names), names


class TableRow(NamedTuple):
    """One row of a CSV file."""

    line: int  # Number of the line in the file where the row ends.
    cells: list[str]


def read_csv(path: Path) -> Dataset:
    """Read a CSV file with a header, a column `label`, and columns of numbers."""
    header, rows = _read_rows(path)
    _check_rows(path, header, rows)
    labels, class_names = _encode_column(path, header, rows, "label")
    user, user_names = (
        _encode_column(path, header, rows, "user") if "user" in header else (None, ())
    )
    x = _number_columns(path, header, rows)
    return Dataset(
        path.stem, x, labels, len(labels), len(class_names), user, user_names, class_names
    )


def _read_rows(path: Path) -> tuple[list[str], list[TableRow]]:
    """Return the names of the columns, and the rows that are not empty."""
    try:
        # Spreadsheets start their files with a byte order mark, which utf-8-sig removes.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            return header, [TableRow(reader.line_num, cells) for cells in reader if cells]
    except UNREADABLE as error:
        raise BrokenDataset(f"cannot read {path} as CSV in UTF-8: {error}") from error


def _check_rows(path: Path, header: Sequence[str], rows: Sequence[TableRow]) -> None:
    name, count = Counter(header).most_common(1)[0] if header else ("", 0)
    if count > 1:
        raise BrokenDataset(
            f"{path} has {count} columns named {short(repr(name))}: rename or remove all but one"
        )
    if "label" not in header:
        columns = short(", ".join(map(repr, header))) or "an empty line"
        raise BrokenDataset(
            f"{path} has no column named label, only {columns}: its first line must name the "
            "columns, with commas between them"
        )
    if not rows:
        raise BrokenDataset(f"{path} has no rows below its header")
    if odd := next((row for row in rows if len(row.cells) != len(header)), None):
        cells = "1 cell" if len(odd.cells) == 1 else f"{len(odd.cells)} cells"
        raise BrokenDataset(
            f"{path} has {cells} in line {odd.line}, expected {len(header)} as in its header"
        )


def _encode_column(
    path: Path, header: Sequence[str], rows: Sequence[TableRow], column: str
) -> tuple[Labels, tuple[str, ...]]:
    """Return the codes and names of a column; an empty cell is refused, not taken as a name."""
    index = header.index(column)
    if empty := next((row for row in rows if not row.cells[index].strip()), None):
        raise BrokenDataset(
            f"{path} has no {column} in line {empty.line}: fill it in, or remove the row"
        )
    return encode_values(np.array([row.cells[index].strip() for row in rows]))


def _number_columns(path: Path, header: Sequence[str], rows: Sequence[TableRow]) -> Array:
    """Return all columns except `label` and `user` as float32."""
    columns = [index for index, name in enumerate(header) if name not in ("label", "user")]
    if not columns:
        raise BrokenDataset(f"{path} has no column of numbers, only {' and '.join(header)}")
    try:
        return np.array([[row.cells[column] for column in columns] for row in rows], np.float32)
    except ValueError:
        row, column = next(
            (row, column) for row in rows for column in columns if not _is_number(row.cells[column])
        )
        raise BrokenDataset(
            f"{path} has {short(repr(row.cells[column]))} in line {row.line}, column "
            f"{short(repr(header[column]))}, expected a number: fix it, or remove the row or the "
            "column"
        ) from None


def _is_number(text: str) -> bool:
    try:
        np.array([text], np.float32)
    except ValueError:
        return False
    return True


def encode_values(values: Array) -> tuple[Labels, tuple[str, ...]]:
    """Return a code from 0 for each value, and the text of each code.

    Values may be of any kind; whole numbers keep their order.
    """
    ordered = values.astype(np.int64) if _are_numerals(values) else values
    names, codes = np.unique(ordered, return_inverse=True)
    return codes.astype(np.int64), tuple(str(name) for name in names)


def _are_numerals(values: Array) -> bool:
    """Return whether all texts are plain numbers of at most 18 digits.

    Longer numbers, such as hashes, stay text. So do 01 and 1, which may be different names.
    """
    return values.dtype.kind == "U" and all(
        value.isdecimal() and len(value) <= LONGEST_NUMBER and value == str(int(value))
        for value in values
    )


READERS = {".npz": read_own_npz, ".csv": read_csv}
