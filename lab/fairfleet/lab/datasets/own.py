"""One's own data: a folder with a subfolder of images for each class, an npz file, or a CSV file.

* folder: `<class>/*.png` (or .jpg), or `train/<class>/…` and `test/<class>/…`; all images of one size. Of 16
  bits the upper 8 are kept.
* npz: arrays `x` and `y`, and if there are any, `user` (whose each sample is) and `train_size`. The labels `y` are the
  classes from 0 to the highest; if they are far apart, as ids are, each that occurs is the name of a class instead.
* CSV: a header, numbers, and a column `label`; a column `user`, if there is one, names natural clients. Each label that
  occurs is the name of a class.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fairfleet.common.errors import UsageError, short
from fairfleet.lab.datasets.base import Array, BrokenDataset, Dataset, Labels, pooled
from fairfleet.lab.datasets.files import UNREADABLE, read_npz, read_pair, read_samples

IMAGES = {".png", ".jpg", ".jpeg"}
NEARLY_BLACK = 16  # of 256 shades: what is left of 12 bits that were stored as 16
MANY_CLASSES = 1000  # up to here no label is too high, since a part of ImageNet may keep the labels of the whole
FAR_APART = 10  # times as high as there are labels
LONGEST_NUMBER = 18  # digits that surely fit 64 bits


def own(path: Path) -> Dataset:
    if not path.is_dir() and path.suffix not in READERS:
        raise UsageError(f"{path} is neither a folder of images, nor an .npz, nor a .csv file")
    found = folder(path) if path.is_dir() else READERS[path.suffix](path)
    if found.x.dtype.kind not in "iuf" or not np.isfinite(found.x).all():
        raise BrokenDataset(
            f"{path} has x of {found.x.dtype}, expected finite numbers: clean or convert them first, or leave them out"
        )
    if found.x.dtype.kind == "f" and np.abs(found.x).max(initial=0) > np.finfo(np.float32).max:
        raise BrokenDataset(f"{path} has values beyond 3.4e38, which float32 cannot hold: scale them down")
    return found


def sources(path: Path) -> list[Path]:
    """The files that are read: in a folder of images there may be others beside them, such as records of runs."""
    if not path.is_dir():
        return [path]
    return sorted(file for depth in ("*/*", "*/*/*") for file in path.glob(depth) if file.suffix.lower() in IMAGES)


def folder(path: Path) -> Dataset:
    parts = [path / "train", path / "test"] if (path / "train").is_dir() else [path]
    images = [_images(part) for part in parts]
    if not images[0]:
        raise BrokenDataset(f"{path} has no images: expected folders named by class with {', '.join(sorted(IMAGES))}")
    names = sorted({file.parent.name for part in images for file in part})  # a folder without images is no class
    numbers = {name: number for number, name in enumerate(names)}
    pairs = [(_pixels(part), np.array([numbers[file.parent.name] for file in part])) for part in images if part]
    return Dataset(path.name, *pooled(pairs[:1], pairs[1:]), len(names), class_names=tuple(names))


def _images(part: Path) -> list[Path]:
    return sorted(file for file in part.glob("*/*") if file.suffix.lower() in IMAGES)


def _pixels(files: Sequence[Path]) -> Array:
    """Grey images as height x width, coloured ones as channels x height x width."""
    first = _picture(files[0])
    stacked = np.empty((len(files), *first.shape), np.uint8)
    for place, file in enumerate(files):
        image = _picture(file)
        if image.shape != first.shape:
            raise BrokenDataset(
                f"{file} is an image of {image.shape}, but {files[0]} of {first.shape}: all must be of one size and "
                "all grey or all coloured"
            )
        stacked[place] = _eight_bits(image)
    if first.dtype == np.uint16 and stacked.max() < NEARLY_BLACK:
        raise BrokenDataset(
            f"{files[0]} and all beside it have 16 bits but use the darkest sixteenth of them at most, and would be "
            "nearly black in 8 bits: stretch them to the full range, or save their numbers as an npz"
        )
    return stacked


def _eight_bits(image: Array) -> Array:
    """The upper byte of 16 bits: so pillow itself reads coloured images of 16 bits."""
    return image >> 8 if image.dtype == np.uint16 else image


def _picture(file: Path) -> Array:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise UsageError("folders of images need pillow: pip install 'fairfleet[plots]'") from error
    try:
        with Image.open(file, formats=("PNG", "JPEG")) as image:
            if image.mode in ("I;16", "I"):  # in these formats both are 16 bits of grey: "I" is older pillow's name
                return np.asarray(image).astype(np.uint16)
            grey = image.mode in ("1", "L", "LA")
            pixels = np.asarray(image.convert("L" if grey else "RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BrokenDataset(f"cannot read the image {file}: {error}") from error
    return pixels if grey else np.moveaxis(pixels, 2, 0)


def npz(path: Path) -> Dataset:
    x, y = read_pair(path)
    with np.load(path, allow_pickle=False) as file:
        given = set(file.files)
    user, user_names = _users(path) if "user" in given else (None, ())
    train_size = _train_size(path) if "train_size" in given else len(y)
    labels, classes, class_names = _classes(y)
    return Dataset(path.stem, x, labels, train_size, classes, user, user_names, class_names)


def _users(path: Path) -> tuple[Labels, tuple[str, ...]]:
    _, user = read_samples(path, ("y", "user"))
    if user.ndim != 1:
        raise BrokenDataset(f"{path} has user of {user.shape}, expected one name or number for each sample")
    return coded(user)


def _train_size(path: Path) -> int:
    (size,) = read_npz(path, ["train_size"])
    if size.size != 1 or size.dtype.kind not in "iu":
        raise BrokenDataset(
            f"{path} has train_size of {size.dtype} {size.shape}, expected one whole number: "
            "how many samples, from the first on, are for training"
        )
    return int(size.item())


def _classes(y: Array) -> tuple[Labels, int, tuple[str, ...]]:
    """Labels, how many classes there are, and their names if the labels are far apart.

    Labels are the numbers of classes, so that there is a class for each up to the highest, whether it occurs or not.
    Ids or hashes would ask for millions that way: where the highest label is 1000 or more, and at least ten times as
    high as there are different labels, they are coded like names. Labels below 0 are left for `Dataset` to refuse.
    """
    highest = int(y.max(initial=0))
    if highest < MANY_CLASSES or highest < FAR_APART * len(np.unique(y)) or y.min() < 0:
        return y.astype(np.int64), highest + 1, ()
    labels, names = coded(y)
    return labels, len(names), names


class Row(NamedTuple):
    line: int  # of the file, where a row in several lines ends
    cells: list[str]


def table(path: Path) -> Dataset:
    header, rows = _rows(path)
    labels, class_names = _names(path, header, rows, "label")
    user, user_names = _names(path, header, rows, "user") if "user" in header else (None, ())
    x = _numbers(path, header, rows)
    return Dataset(path.stem, x, labels, len(labels), len(class_names), user, user_names, class_names)


def _rows(path: Path) -> tuple[list[str], list[Row]]:
    """The names of the columns, and rows of as many cells."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets begin their files with a mark
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            rows = [Row(reader.line_num, cells) for cells in reader if cells]
    except UNREADABLE as error:
        raise BrokenDataset(f"cannot read {path} as CSV in UTF-8: {error}") from error
    name, count = Counter(header).most_common(1)[0] if header else ("", 0)
    if count > 1:
        raise BrokenDataset(f"{path} has {count} columns named {short(repr(name))}: rename or leave out all but one")
    if "label" not in header:
        found = short(", ".join(map(repr, header))) or "an empty line"
        raise BrokenDataset(
            f"{path} has no column named label, only {found}: its first line must name the columns, with commas "
            "between them"
        )
    if not rows:
        raise BrokenDataset(f"{path} has no rows below its header")
    if odd := next((row for row in rows if len(row.cells) != len(header)), None):
        cells = "1 cell" if len(odd.cells) == 1 else f"{len(odd.cells)} cells"
        raise BrokenDataset(f"{path} has {cells} in line {odd.line}, expected {len(header)} as in its header")
    return header, rows


def _names(path: Path, header: Sequence[str], rows: Sequence[Row], column: str) -> tuple[Labels, tuple[str, ...]]:
    """This column coded; a cell that is empty would be a class or a client that nobody meant."""
    place = header.index(column)
    if empty := next((row for row in rows if not row.cells[place].strip()), None):
        raise BrokenDataset(f"{path} has no {column} in line {empty.line}: fill it in, or leave the row out")
    return coded(np.array([row.cells[place].strip() for row in rows]))


def _numbers(path: Path, header: Sequence[str], rows: Sequence[Row]) -> Array:
    """All the other columns."""
    places = [place for place, name in enumerate(header) if name not in ("label", "user")]
    if not places:
        raise BrokenDataset(f"{path} has no column of numbers beside {' and '.join(header)}")
    try:
        return np.array([[row.cells[place] for place in places] for row in rows], np.float32)
    except ValueError:
        row, place = next((row, place) for row in rows for place in places if not _is_number(row.cells[place]))
        raise BrokenDataset(
            f"{path} has {short(repr(row.cells[place]))} in line {row.line}, column {short(repr(header[place]))}, "
            "expected a number: mend it, or leave the row or the column out"
        ) from None


def _is_number(text: str) -> bool:
    try:
        np.array([text], np.float32)
    except ValueError:
        return False
    return True


def coded(values: Array) -> tuple[Labels, tuple[str, ...]]:
    """Numbers from 0 for values of any kind, whole numbers in their order, and what each stands for."""
    order = values.astype(np.int64) if _are_numerals(values) else values
    names, codes = np.unique(order, return_inverse=True)
    return codes.astype(np.int64), tuple(str(name) for name in names)


def _are_numerals(values: Array) -> bool:
    """Longer ones, such as hashes, stay text; so do 01 and 1, which may be different names."""
    return values.dtype.kind == "U" and all(
        value.isdecimal() and len(value) <= LONGEST_NUMBER and value == str(int(value)) for value in values
    )


READERS = {".npz": npz, ".csv": table}
