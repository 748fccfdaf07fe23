"""One's own data: a folder with a subfolder of images for each class, an npz file, or a CSV file.

* folder: `<class>/*.png` (or .jpg), or `train/<class>/…` and `test/<class>/…`; all images of one size.
* npz: arrays `x` and `y`, and if there are any, `user` (whose each sample is) and `train_size`.
* CSV: a header, numbers, and a column `label`; a column `user`, if there is one, names natural clients.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fairfleet.common.errors import UsageError
from fairfleet.lab.datasets.base import Array, BrokenDataset, Dataset, Labels, pooled
from fairfleet.lab.datasets.files import UNREADABLE, read_npz

SHORT_ROW = "(missing)"  # no number, so that it is found
IMAGES = {".png", ".jpg", ".jpeg"}


def own(path: Path) -> Dataset:
    if not path.is_dir() and path.suffix not in READERS:
        raise UsageError(f"{path} is neither a folder of images, nor an .npz, nor a .csv file")
    found = folder(path) if path.is_dir() else READERS[path.suffix](path)
    if found.x.dtype.kind not in "iuf" or not np.isfinite(found.x).all():
        raise BrokenDataset(f"{path} has values that are not finite numbers: clean them first, or leave them out")
    return found


def folder(path: Path) -> Dataset:
    parts = [path / "train", path / "test"] if (path / "train").is_dir() else [path]
    names = sorted({child.name for part in parts if part.is_dir() for child in part.iterdir() if child.is_dir()})
    files = [[(file, names.index(file.parent.name)) for file in _images(part)] for part in parts]
    if not files[0]:
        raise BrokenDataset(f"{path} has no images: expected folders named by class with {', '.join(sorted(IMAGES))}")
    pairs = [(_pixels([file for file, _ in part]), np.array([label for _, label in part])) for part in files if part]
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
        stacked[place] = image
    return stacked


def _picture(file: Path) -> Array:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise UsageError("folders of images need pillow: pip install 'fairfleet[plots]'") from error
    try:
        with Image.open(file, formats=("PNG", "JPEG")) as image:
            grey = image.mode in ("1", "L", "LA")
            pixels = np.asarray(image.convert("L" if grey else "RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BrokenDataset(f"cannot read the image {file}: {error}") from error
    return pixels if grey else np.moveaxis(pixels, 2, 0)


def npz(path: Path) -> Dataset:
    x, y = read_npz(path)
    with np.load(path, allow_pickle=False) as file:
        given = set(file.files)
    user = read_npz(path, ["user"])[0] if "user" in given else None
    train_size = int(read_npz(path, ["train_size"])[0]) if "train_size" in given else len(y)
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise BrokenDataset(f"{path} has y of {y.dtype} {y.shape}, expected whole numbers, one for each sample")
    codes, names = (None, ()) if user is None else coded(user)
    return Dataset(path.stem, x, y.astype(np.int64), train_size, _classes(y), user=codes, user_names=names)


def table(path: Path) -> Dataset:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file, restval=SHORT_ROW))
        labels, class_names = coded(np.array([row.pop("label") for row in rows]))
        owners = [row.pop("user") for row in rows] if rows and "user" in rows[0] else None
        x = np.array([list(row.values()) for row in rows], np.float32)
    except KeyError:
        raise BrokenDataset(f"{path} has no column named label") from None
    except (*UNREADABLE, TypeError) as error:
        raise BrokenDataset(f"cannot read {path} as a table of numbers: {error}") from error
    users, names = (None, ()) if owners is None else coded(np.array(owners))
    return Dataset(path.stem, x, labels, len(labels), len(class_names), users, names, class_names)


def coded(values: Array) -> tuple[Labels, tuple[str, ...]]:
    """Numbers from 0 for values of any kind, whole numbers in their order, and what each stands for."""
    order = values.astype(np.int64) if _all_whole(values) else values
    names, codes = np.unique(order, return_inverse=True)
    return codes.astype(np.int64), tuple(str(name) for name in names)


def _all_whole(values: Array) -> bool:
    return values.dtype.kind in "iu" or all(str(value).isdecimal() for value in values)


def _classes(y: Array) -> int:
    return int(y.max()) + 1 if len(y) else 0


READERS = {".npz": npz, ".csv": table}
