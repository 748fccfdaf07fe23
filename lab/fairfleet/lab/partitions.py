"""Who holds what: ways to share a dataset's samples out among clients, and each client's into train and test.

Pure and seeded: labels, natural users, a number of clients and a seed in, one array of indices per client out. No
sample is given to two clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from fairfleet.common.errors import UsageError

Indices = NDArray[np.int64]
Kind = Literal["iid", "shards", "pat", "pat-fixed", "dirichlet", "dirichlet-capped", "quantity", "class", "user"]
KINDS: tuple[str, ...] = get_args(Kind)
WHOLE = {"shards", "pat", "pat-fixed"}  # their parameter counts things
POSITIVE = {"dirichlet", "dirichlet-capped", "quantity"}  # their parameter is a concentration
DRAWS = 1000  # before a minimum size is given up


class Partition(BaseModel):
    """How data are shared out; written `dirichlet:0.1`, `shards:2`, `user,minimum=50`, or as a mapping in YAML."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    parameter: float | None = Field(
        default=None, description="shards or classes per client, or the concentration of Dirichlet draws"
    )
    minimum: NonNegativeInt | None = Field(
        default=None, description="samples of every client, at least: 10 for Dirichlet draws, 1 for natural users"
    )

    @model_validator(mode="after")
    def _fits(self) -> Partition:
        value = self.parameter
        if self.kind in WHOLE and (value is None or value < 1 or not value.is_integer()):
            raise ValueError(f"{self.kind} needs a whole number from 1, as in {self.kind}:2 (found {value})")
        if self.kind in POSITIVE and (value is None or not 0 < value < float("inf")):
            raise ValueError(f"{self.kind} needs a number above 0, as in {self.kind}:0.5 (found {value})")
        if self.kind not in WHOLE | POSITIVE and value is not None:
            raise ValueError(f"{self.kind} takes no number (found {value})")
        if self.minimum is not None and self.kind not in POSITIVE | {"user"}:
            raise ValueError(f"{self.kind} takes no minimum: its sizes are not drawn")
        return self

    @property
    def least(self) -> int:
        return self.minimum if self.minimum is not None else 1 if self.kind == "user" else 10

    @classmethod
    def parse(cls, text: str) -> Partition:
        """`KIND`, `KIND:PARAMETER`, either followed by `,minimum=N`."""
        head, *options = text.replace(" ", "").split(",")
        kind, colon, parameter = head.partition(":")
        values: dict[str, Any] = {"kind": kind, **dict(option.partition("=")[::2] for option in options)}
        if colon:
            values["parameter"] = parameter
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            said = "; ".join(one["msg"].removeprefix("Value error, ") for one in error.errors())
            raise UsageError(f"cannot take {text!r} for a partition: {said}. There are {', '.join(KINDS)}.") from None

    def __str__(self) -> str:
        number = "" if self.parameter is None else f":{self.parameter!r}".removesuffix(".0")
        minimum = "" if self.minimum is None else f",minimum={self.minimum}"
        return f"{self.kind}{number}{minimum}"


class Split(NamedTuple):
    """One client's samples."""

    train: Indices
    test: Indices
    validation: Indices


def partition(
    spec: Partition | str, labels: Indices, users: Indices | None = None, clients: int | None = None, seed: int = 0
) -> list[Indices]:
    """The samples of each client. `clients` may be left out where the data say how many there are."""
    chosen = Partition.parse(spec) if isinstance(spec, str) else spec
    random = np.random.default_rng(seed)
    if chosen.kind == "user":
        shares = _by_user(_known(users), clients, chosen.least, random)
    else:
        wanted = len(_classes(labels)) if clients is None and chosen.kind == "class" else clients
        if wanted is None or not 1 <= wanted <= len(labels):
            raise UsageError(
                f"{chosen} needs a number of clients from 1 to {len(labels)}, one for each sample (found {wanted})"
            )
        shares = SHARED[chosen.kind](labels, wanted, chosen, random)
    if not min(map(len, shares)):
        raise UsageError(f"{chosen} leaves a client without samples; take fewer clients or a larger dataset")
    return shares


def _known(users: Indices | None) -> Indices:
    if users is None:
        raise UsageError("this dataset has no natural users; take another partition, such as dirichlet:0.5 or iid")
    return users


def _iid(labels: Indices, clients: int, spec: Partition, random: np.random.Generator) -> list[Indices]:
    return np.array_split(random.permutation(len(labels)), clients)


def _shards(labels: Indices, clients: int, spec: Partition, random: np.random.Generator) -> list[Indices]:
    """Sorted by label and cut into equal pieces, of which every client draws so many (McMahan; FedFV)."""
    each = int(spec.parameter or 1)
    if clients * each > len(labels):
        raise UsageError(
            f"{spec} for {clients} clients makes more shards than the {len(labels)} samples that there are; take at "
            f"most shards:{len(labels) // clients}"
        )
    pieces = np.array_split(np.argsort(labels, kind="stable"), clients * each)
    drawn = random.permutation(len(pieces)).reshape(clients, each)
    return [np.concatenate([pieces[piece] for piece in mine]) for mine in drawn]


def _pat(labels: Indices, clients: int, spec: Partition, random: np.random.Generator) -> list[Indices]:
    """Every client has k classes drawn at random, every class has as many clients as another, or one more."""
    classes, each = _classes(labels), _classes_each(labels, clients, spec)
    holders: dict[int, list[int]] = {int(label): [] for label in classes}
    for client in random.permutation(clients):
        # the classes with the fewest clients first, ties by lot: no class is left over, none twice with one client
        lot = random.permutation(classes)
        fewest = sorted(lot, key=lambda label: len(holders[int(label)]))[:each]
        for label in fewest:
            holders[int(label)].append(int(client))
    return _dealt(labels, holders, clients, random)


def _pat_fixed(labels: Indices, clients: int, spec: Partition, random: np.random.Generator) -> list[Indices]:
    """FedLF's groups: class after class goes to the first clients that still have room for one; nothing is drawn."""
    classes, each = _classes(labels), _classes_each(labels, clients, spec)
    room = np.full(clients, each)
    holders = {}
    for label in classes:
        mine = np.flatnonzero(room)[: clients * each // len(classes)]
        room[mine] -= 1
        holders[int(label)] = mine.tolist()
    if left_over := int(np.count_nonzero(room == each)):
        fitting = len(classes) // math.gcd(len(classes), each)
        raise UsageError(
            f"{spec} deals {len(classes)} classes to groups of one size and leaves {left_over} of {clients} clients "
            f"without samples; take a multiple of {fitting} clients"
        )
    return _dealt(labels, holders, clients, None)


def _classes_each(labels: Indices, clients: int, spec: Partition) -> int:
    """How many classes a client has: not more than there are, and enough that every class has a client."""
    classes, each = len(_classes(labels)), int(spec.parameter or 1)
    if each > classes:
        raise UsageError(f"{spec} gives {each} classes to a client, but there are only {classes}")
    if clients * each < classes:
        raise UsageError(
            f"{spec} lets {clients} clients hold {clients * each} of {classes} classes; take {-(-classes // each)} "
            "clients or more, or more classes for each"
        )
    return each


def _dealt(
    labels: Indices, holders: dict[int, list[int]], clients: int, random: np.random.Generator | None
) -> list[Indices]:
    """The samples of each class, in equal parts, to those who hold it; shuffled first if there is a generator."""
    held: list[list[Indices]] = [[np.empty(0, np.int64)] for _ in range(clients)]
    for label, mine in holders.items():
        samples = np.flatnonzero(labels == label)
        for client, part in zip(
            mine, np.array_split(random.permutation(samples) if random else samples, len(mine)), strict=True
        ):
            held[client].append(part)
    return [np.concatenate(parts) for parts in held]


def _dirichlet(labels: Indices, clients: int, spec: Partition, random: np.random.Generator) -> list[Indices]:
    """Each class is shared out by a Dirichlet draw of its own, all drawn anew until nobody has too few."""
    capped = spec.kind == "dirichlet-capped"
    for _ in range(DRAWS):
        held = _dirichlet_draw(labels, clients, float(spec.parameter or 0), capped, random)
        if held and min(map(len, held)) >= spec.least:
            return held
    raise _hopeless(spec, clients, len(labels))


def _dirichlet_draw(
    labels: Indices, clients: int, concentration: float, capped: bool, random: np.random.Generator
) -> list[Indices]:
    """One draw. Capped (FedLF): who already has an even share gets nothing of the classes that follow."""
    held = [np.empty(0, np.int64)] * clients
    for label in _classes(labels):
        samples = random.permutation(np.flatnonzero(labels == label))
        shares = random.dirichlet(np.full(clients, concentration))
        if capped:
            shares = shares * (np.array([len(mine) for mine in held]) < len(labels) / clients)
        if not shares.sum() > 0:
            return []  # the cap left nobody, or the concentration is too small for the arithmetic
        held = [np.concatenate(pair) for pair in zip(held, _cut(samples, shares), strict=True)]
    return held


def _quantity(labels: Indices, clients: int, spec: Partition, random: np.random.Generator) -> list[Indices]:
    """The same mix of labels for all, but sizes by a Dirichlet draw: some have much, most have little."""
    for _ in range(DRAWS):
        shares = random.dirichlet(np.full(clients, float(spec.parameter or 0)))
        held = _cut(random.permutation(len(labels)), shares)
        if min(map(len, held)) >= spec.least:
            return held
    raise _hopeless(spec, clients, len(labels))


def _cut(samples: Indices, shares: NDArray[np.float64]) -> list[Indices]:
    """In pieces of these relative sizes, rounded, so that a share of zero is an empty piece."""
    return np.split(samples, np.rint(np.cumsum(shares / shares.sum())[:-1] * len(samples)).astype(int))


def _hopeless(spec: Partition, clients: int, samples: int) -> UsageError:
    return UsageError(
        f"{spec} of {samples} samples over {clients} clients gave some client fewer than {spec.least} samples in "
        f"{DRAWS} draws; take a larger concentration, fewer clients, or a lower minimum, as in "
        f"{spec.kind}:{spec.parameter:g},minimum=1"
    )


def _by_class(labels: Indices, clients: int, spec: Partition, random: np.random.Generator) -> list[Indices]:
    """One class per client; with fewer clients they hold groups of classes, with more they share them."""
    classes = _classes(labels)
    if clients <= len(classes):
        return [np.flatnonzero(np.isin(labels, group)) for group in np.array_split(classes, clients)]
    groups = np.array_split(np.arange(clients), len(classes))
    return _dealt(
        labels, {int(label): group.tolist() for label, group in zip(classes, groups, strict=True)}, clients, random
    )


def _by_user(users: Indices, clients: int | None, minimum: int, random: np.random.Generator) -> list[Indices]:
    """Everyone keeps their own; of more users than clients, some are drawn, among those with enough samples."""
    order = np.argsort(users, kind="stable")
    found, starts = np.unique(users[order], return_index=True)
    own = dict(zip(found.tolist(), np.split(order, starts[1:]), strict=True))
    enough = [user for user, samples in own.items() if len(samples) >= minimum]
    if not enough or (clients or 0) > len(enough):
        raise UsageError(
            f"of {len(own)} natural users {len(enough)} have {minimum} samples or more, but {clients or 'some'} "
            "clients are asked for; take fewer clients or a lower minimum, as in user,minimum=1"
        )
    drawn = enough if clients is None else sorted(random.choice(enough, clients, replace=False).tolist())
    return [own[user] for user in drawn]


def _classes(labels: Indices) -> Indices:
    return np.unique(labels)


Share = Callable[[Indices, int, Partition, np.random.Generator], list[Indices]]
SHARED: dict[str, Share] = {
    "iid": _iid,
    "shards": _shards,
    "pat": _pat,
    "pat-fixed": _pat_fixed,
    "dirichlet": _dirichlet,
    "dirichlet-capped": _dirichlet,
    "quantity": _quantity,
    "class": _by_class,
}


def check_shares(shares: Sequence[float]) -> None:
    # in this form NaN is refused as well: it compares as false
    if len(shares) not in (2, 3) or not (min(shares) >= 0 and abs(sum(shares) - 1) <= 1e-6):
        raise UsageError(
            f"the shares of train, test and validation: found {tuple(shares)}; give two or three, none below 0, "
            "that add up to 1, such as 0.8, 0.2"
        )


def split(indices: Indices, shares: Sequence[float] = (0.8, 0.2), seed: int | Sequence[int] = 0) -> Split:
    """Shuffled, then cut into train, test and (if a third share is given) validation.

    Whoever has two samples or more has at least one to train and, if the test's share is above 0, one to test with.
    """
    check_shares(shares)
    _, test, validation = (*shares, 0.0)[:3]
    total = len(indices)
    tested = min(max(round(test * total), int(test > 0)), max(total - 1, 0))
    validated = min(round(validation * total), max(total - tested - 1, 0))
    mixed = np.random.default_rng(seed).permutation(indices)
    return Split(*np.split(mixed, [total - tested - validated, total - validated]))


def split_all(parts: Sequence[Indices], shares: Sequence[float] = (0.8, 0.2), seed: int = 0) -> list[Split]:
    """Every client's samples, each shuffled by itself: another client's share never changes this one's split."""
    return [split(indices, shares, (seed, client)) for client, indices in enumerate(parts)]


def split_as_published(parts: Sequence[Indices], train_size: int) -> list[Split]:
    """By the published parts of the dataset: what is in its training part trains, the rest tests."""
    none = np.empty(0, np.int64)
    found = [Split(indices[indices < train_size], indices[indices >= train_size], none) for indices in parts]
    if idle := sum(not len(one.train) for one in found):
        raise UsageError(
            f"{idle} of {len(found)} clients have no sample in the published training part; split each client's "
            "samples by shares instead, such as 0.8, 0.2"
        )
    return found
