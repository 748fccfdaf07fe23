"""Adult: who earns more than 50,000 dollars a year, by the census of 1994. Its two domains are doctors and others.

The 99 binary features are those of the fairness papers: one for each value of the eight categorical columns, in the
order of the published description, with none set where a value is missing. Column 21 is then a doctorate.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fairfleet.common.errors import UsageError
from fairfleet.lab.datasets.base import BrokenDataset, Dataset, pooled
from fairfleet.lab.datasets.files import UNREADABLE, open_plain
from fairfleet.lab.datasets.places import Form, find

COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship",
    "race", "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country", "income",
)  # fmt: skip
CATEGORIES = {
    "workclass": "Private, Self-emp-not-inc, Self-emp-inc, Federal-gov, Local-gov, State-gov, Without-pay, "
    "Never-worked",
    "education": "Bachelors, Some-college, 11th, HS-grad, Prof-school, Assoc-acdm, Assoc-voc, 9th, 7th-8th, 12th, "
    "Masters, 1st-4th, 10th, Doctorate, 5th-6th, Preschool",
    "marital_status": "Married-civ-spouse, Divorced, Never-married, Separated, Widowed, Married-spouse-absent, "
    "Married-AF-spouse",
    "occupation": "Tech-support, Craft-repair, Other-service, Sales, Exec-managerial, Prof-specialty, "
    "Handlers-cleaners, Machine-op-inspct, Adm-clerical, Farming-fishing, Transport-moving, Priv-house-serv, "
    "Protective-serv, Armed-Forces",
    "relationship": "Wife, Own-child, Husband, Not-in-family, Other-relative, Unmarried",
    "race": "White, Asian-Pac-Islander, Amer-Indian-Eskimo, Other, Black",
    "sex": "Female, Male",
    "native_country": "United-States, Cambodia, England, Puerto-Rico, Canada, Germany, Outlying-US(Guam-USVI-etc), "
    "India, Japan, Greece, South, China, Cuba, Iran, Honduras, Philippines, Italy, Poland, Jamaica, Vietnam, Mexico, "
    "Portugal, Ireland, France, Dominican-Republic, Laos, Ecuador, Taiwan, Haiti, Columbia, Hungary, Guatemala, "
    "Nicaragua, Scotland, Thailand, Yugoslavia, El-Salvador, Trinadad&Tobago, Peru, Hong, Holand-Netherlands",
}
BINARY = tuple((column, value) for column, values in CATEGORIES.items() for value in values.split(", "))
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
    """`features`: "binary" for the 99, "all" for these and the six numbers, standardised over the training part.

    `shift=1` gives each doctor's place in the training part to the row after, as FedMGDA+'s own code did.
    """
    if features not in ("binary", "all"):
        raise UsageError(f"adult has features=binary and features=all, not {features!r}")
    forms = [Form(files, lambda paths: [read_table(path) for path in paths]) for files in FORMS]
    train, test = find("adult", forms, folders, HOW_TO_GET)
    x, y, train_size = pooled([(binary(train), incomes(train))], [(binary(test), incomes(test))])
    if features == "all":
        x = np.hstack([x, _standardised(np.concatenate([numbers(train), numbers(test)]), train_size)])
    domain = np.array([value != "Doctorate" for value in train["education"] + test["education"]], np.int64)
    domain[:train_size] = np.roll(domain[:train_size], shift)
    return Dataset("adult", x, y, train_size, 2, user=domain, user_names=DOMAINS, class_names=INCOMES)


def read_table(path: Path) -> Table:
    """The columns by name; takes the published files and CSV with a header alike."""
    try:
        with open_plain(path) as file:
            rows = list(csv.reader(io.TextIOWrapper(file, "utf-8-sig"), skipinitialspace=True))
    except UNREADABLE as error:
        raise BrokenDataset(f"cannot read {path}: {error}") from error
    # adult.test opens with a remark of one cell; both published files end with an empty line
    kept = [row for row in rows if len(row) > 1 and row[0] != COLUMNS[0]]
    if odd := next((row for row in kept if len(row) != len(COLUMNS)), None):
        raise BrokenDataset(f"{path} has a row of {len(odd)} columns, expected {len(COLUMNS)}: {','.join(odd)[:80]}")
    return {name: [row[place] for row in kept] for place, name in enumerate(COLUMNS)}


def binary(table: Table) -> np.ndarray:
    place = {pair: column for column, pair in enumerate(BINARY)}
    found = np.zeros((len(table["income"]), len(BINARY)), np.float32)
    for column in CATEGORIES:
        for row, value in enumerate(table[column]):
            if (column, value) in place:
                found[row, place[column, value]] = 1.0
            elif value != MISSING:
                raise BrokenDataset(f"adult has {column}={value[:40]!r}, which its description does not know")
    return found


def numbers(table: Table) -> np.ndarray:
    try:
        return np.stack([np.array(table[column], np.float64) for column in NUMBERS], axis=1)
    except ValueError as error:
        raise BrokenDataset(f"adult has a number that is none: {error}") from error


def incomes(table: Table) -> np.ndarray:
    """1 for more than 50K; the published test file ends its labels with a full stop."""
    values = [value.rstrip(".") for value in table["income"]]
    if odd := next((value for value in values if value not in INCOMES), None):
        raise BrokenDataset(f"adult has income {odd[:40]!r}, expected {' or '.join(INCOMES)}")
    return np.array([value == INCOMES[1] for value in values], np.int64)


def _standardised(values: np.ndarray, train_size: int) -> np.ndarray:
    centre, spread = values[:train_size].mean(0), values[:train_size].std(0)
    scaled: np.ndarray = (values - centre) / np.where(spread > 0, spread, 1.0)
    return scaled.astype(np.float32)
