"""Adult: predict who earns more than 50,000 dollars a year, from the US census of 1994.

Its two natural clients are people with a doctorate and all others. The 99 binary features are
those of the fairness papers: one for each value of the eight categorical columns, in the order
of the published description, with none set where a value is missing. So column 21 is a doctorate.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fairfleet.common.errors import UsageError
from fairfleet.lab.datasets.base import BrokenDataset, Dataset, concatenate_parts
from fairfleet.lab.datasets.files import UNREADABLE, open_plain
from fairfleet.lab.datasets.places import Form, read_first_form

COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation",
    "relationship", "race", "sex", "capital_gain", "capital_loss", "hours_per_week",
    "native_country", "income",
)  # fmt: skip
CATEGORIES = {
    "workclass": "Private, Self-emp-not-inc, Self-emp-inc, Federal-gov, Local-gov, State-gov, "
    "Without-pay, Never-worked",
    "education": "Bachelors, Some-college, 11th, HS-grad, Prof-school, Assoc-acdm, Assoc-voc, 9th, "
    "7th-8th, 12th, Masters, 1st-4th, 10th, Doctorate, 5th-6th, Preschool",
    "marital_status": "Married-civ-spouse, Divorced, Never-married, Separated, Widowed, "
    "Married-spouse-absent, Married-AF-spouse",
    "occupation": "Tech-support, Craft-repair, Other-service, Sales, Exec-managerial, "
    "Prof-specialty, Handlers-cleaners, Machine-op-inspct, Adm-clerical, Farming-fishing, "
    "Transport-moving, Priv-house-serv, Protective-serv, Armed-Forces",
    "relationship": "Wife, Own-child, Husband, Not-in-family, Other-relative, Unmarried",
    "race": "White, Asian-Pac-Islander, Amer-Indian-Eskimo, Other, Black",
    "sex": "Female, Male",
    "native_country": "United-States, Cambodia, England, Puerto-Rico, Canada, Germany, "
    "Outlying-US(Guam-USVI-etc), India, Japan, Greece, South, China, Cuba, Iran, Honduras, "
    "Philippines, Italy, Poland, Jamaica, Vietnam, Mexico, Portugal, Ireland, France, "
    "Dominican-Republic, Laos, Ecuador, Taiwan, Haiti, Columbia, Hungary, Guatemala, Nicaragua, "
    "Scotland, Thailand, Yugoslavia, El-Salvador, Trinadad&Tobago, Peru, Hong, Holand-Netherlands",
}
BINARY = tuple(
    (column, value) for column, values in CATEGORIES.items() for value in values.split(", ")
)
NUMBERS = ("age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week")
MISSING = "?"
INCOMES = ("<=50K", ">50K")
DOMAINS = ("doctorate", "others")
HOW_TO_GET = "download adult.data and adult.test from https://archive.ics.uci.edu/dataset/2/adult"
FORMS = (
    ("adult/train.csv.gz", "adult/test.csv.gz"),
    ("adult/train.csv", "adult/test.csv"),
    ("adult/adult.data", "adult/adult.test"),
)

Table = dict[str, list[str]]


def adult(folders: Sequence[Path], features: str = "binary", shift: int = 0) -> Dataset:
    """Return Adult with two natural clients, `doctorate` and `others`.

    `features` is "binary" for the 99 binary features, or "all" for these and the six numbers,
    standardised over the training part. `shift=1` gives each doctor's place in the training part
    to the next row, as FedMGDA+'s own code does. Raises UsageError for other features.
    """
    if features not in ("binary", "all"):
        raise UsageError(f"adult has features=binary and features=all, not {features!r}")
    forms = [Form(files, lambda paths: [read_table(path) for path in paths]) for files in FORMS]
    train, test = read_first_form("adult", forms, folders, HOW_TO_GET)
    x, y, train_size = concatenate_parts(
        [(binary_features(train), incomes(train))], [(binary_features(test), incomes(test))]
    )
    if features == "all":
        numbers = np.concatenate([number_features(train), number_features(test)])
        x = np.hstack([x, _standardised(numbers, train_size)])
    domain = np.array(
        [value != "Doctorate" for value in train["education"] + test["education"]], np.int64
    )
    domain[:train_size] = np.roll(domain[:train_size], shift)
    return Dataset(
        "adult", x, y, train_size, 2, user=domain, user_names=DOMAINS, class_names=INCOMES
    )


def read_table(path: Path) -> Table:
    """Read the columns by name, from the published files or from CSV with a header.

    Raises BrokenDataset if the file is unreadable or a row has too few or too many columns.
    """
    try:
        with open_plain(path) as file:
            rows = list(csv.reader(io.TextIOWrapper(file, "utf-8-sig"), skipinitialspace=True))
    except UNREADABLE as error:
        raise BrokenDataset(f"cannot read {path}: {error}") from error
    # adult.test starts with a remark of one cell. Both published files end with an empty line.
    people = [row for row in rows if len(row) > 1 and row[0] != COLUMNS[0]]
    if odd := next((row for row in people if len(row) != len(COLUMNS)), None):
        raise BrokenDataset(
            f"{path} has a row of {len(odd)} columns, expected {len(COLUMNS)}: {','.join(odd)[:80]}"
        )
    return {name: [row[index] for row in people] for index, name in enumerate(COLUMNS)}


def binary_features(table: Table) -> np.ndarray:
    """Return the binary features of each row, with shape (rows, 99) and type float32.

    Raises BrokenDataset for a value that the published description does not contain.
    """
    columns = {pair: index for index, pair in enumerate(BINARY)}
    features = np.zeros((len(table["income"]), len(BINARY)), np.float32)
    for category in CATEGORIES:
        for row, value in enumerate(table[category]):
            if (category, value) in columns:
                features[row, columns[category, value]] = 1.0
            elif value != MISSING:
                raise BrokenDataset(
                    f"adult has {category}={value[:40]!r}, which its description does not contain"
                )
    return features


def number_features(table: Table) -> np.ndarray:
    """Return the six numbers of each row, with shape (rows, 6) and type float64."""
    try:
        return np.stack([np.array(table[column], np.float64) for column in NUMBERS], axis=1)
    except ValueError as error:
        raise BrokenDataset(
            f"adult has a value that is not a number in a column of numbers: {error}"
        ) from error


def incomes(table: Table) -> np.ndarray:
    """Return a label for each row: 1 for an income above 50K, otherwise 0.

    The labels of the published test file end with a full stop, which is ignored.
    """
    values = [value.rstrip(".") for value in table["income"]]
    if odd := next((value for value in values if value not in INCOMES), None):
        raise BrokenDataset(f"adult has income {odd[:40]!r}, expected {' or '.join(INCOMES)}")
    return np.array([value == INCOMES[1] for value in values], np.int64)


def _standardised(values: np.ndarray, train_size: int) -> np.ndarray:
    centre, spread = values[:train_size].mean(0), values[:train_size].std(0)
    scaled: np.ndarray = (values - centre) / np.where(spread > 0, spread, 1.0)
    return scaled.astype(np.float32)
