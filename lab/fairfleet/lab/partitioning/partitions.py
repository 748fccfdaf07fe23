"""Ways to divide a dataset's samples among clients.

All functions are pure and seeded: they take labels, natural users, a number of clients and a
seed, and return one array of sample indices for each client. No sample goes to two clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from fairfleet.common.errors import UsageError

Indices = NDArray[np.int64]
Kind = Literal[
    "iid",
    "shards",
    "pat",
    "pat-fixed",
    "dirichlet",
    "dirichlet-capped",
    "quantity",
    "class",
    "user",
]
KINDS: tuple[str, ...] = get_args(Kind)
COUNTING_KINDS = {"shards", "pat", "pat-fixed"}  # Their parameter is a number of things.
DIRICHLET_KINDS = {"dirichlet", "dirichlet-capped", "quantity"}  # Theirs is a concentration.
MAX_DRAWS = 1000  # Attempts to reach the minimum size.


class Partition(BaseModel):
    """How samples are divided among clients.

    Written as `dirichlet:0.1`, `shards:2` or `user,minimum=50`, or as a mapping in YAML.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    parameter: float | None = Field(
        default=None,
        description="Shards or classes per client, or the concentration of Dirichlet draws.",
    )
    minimum: NonNegativeInt | None = Field(
        default=None,
        description="Minimum number of samples per client: by default 10 for Dirichlet draws "
        "and 1 for natural users.",
    )

    @model_validator(mode="after")
    def _check_parameter(self) -> Partition:
        value = self.parameter
        if self.kind in COUNTING_KINDS and (value is None or value < 1 or not value.is_integer()):
            raise ValueError(
                f"{self.kind} needs a whole number from 1, as in {self.kind}:2 (found {value})"
            )
        if self.kind in DIRICHLET_KINDS and (value is None or not 0 < value < float("inf")):
            raise ValueError(
                f"{self.kind} needs a number above 0, as in {self.kind}:0.5 (found {value})"
            )
        if self.kind not in COUNTING_KINDS | DIRICHLET_KINDS and value is not None:
            raise ValueError(f"{self.kind} takes no number (found {value})")
        if self.minimum is not None and self.kind not in DIRICHLET_KINDS | {"user"}:
            raise ValueError(f"{self.kind} takes no minimum, because its sizes are not drawn")
        return self

    @property
    def min_samples(self) -> int:
        """The minimum number of samples per client, with the default of the kind."""
        return self.minimum if self.minimum is not None else 1 if self.kind == "user" else 10

    @classmethod
    def parse(cls, text: str) -> Partition:
        """Parse `KIND` or `KIND:PARAMETER`, either followed by `,minimum=N` or not.

        Raises UsageError if the text is no partition.
        """
        head, *options = text.replace(" ", "").split(",")
        kind, colon, parameter = head.partition(":")
        values: dict[str, Any] = {
            "kind": kind,
            **dict(option.partition("=")[::2] for option in options),
        }
        if colon:
            values["parameter"] = parameter
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            reasons = "; ".join(
                detail["msg"].removeprefix("Value error, ") for detail in error.errors()
            )
            raise UsageError(
                f"{text!r} is not a valid partition: {reasons}. There are {', '.join(KINDS)}."
            ) from None

    def __str__(self) -> str:
        number = "" if self.parameter is None else f":{self.parameter!r}".removesuffix(".0")
        minimum = "" if self.minimum is None else f",minimum={self.minimum}"
        return f"{self.kind}{number}{minimum}"


def partition(
    spec: Partition | str,
    labels: Indices,
    users: Indices | None = None,
    clients: int | None = None,
    seed: int = 0,
) -> list[Indices]:
    """Return the indices of each client's samples.

    `clients` may be omitted if the data determine the number: for natural users and classes.
    Raises UsageError if the partition does not fit the data or leaves a client without samples.
    """
    chosen = Partition.parse(spec) if isinstance(spec, str) else spec
    random = np.random.default_rng(seed)
    if chosen.kind == "user":
        shares = _divide_by_user(_require_users(users), clients, chosen.min_samples, random)
    else:
        count = len(np.unique(labels)) if clients is None and chosen.kind == "class" else clients
        if count is None or not 1 <= count <= len(labels):
            raise UsageError(
                f"{chosen} needs a number of clients from 1 to {len(labels)}, the number of "
                f"samples (found {count})"
            )
        shares = DIVIDERS[chosen.kind](labels, count, chosen, random)
    if not min(map(len, shares)):
        raise UsageError(
            f"{chosen} leaves a client without samples; use fewer clients or a larger dataset"
        )
    return shares


def _require_users(users: Indices | None) -> Indices:
    if users is None:
        raise UsageError(
            "this dataset has no natural users; use another partition, such as dirichlet:0.5 or iid"
        )
    return users


def _divide_iid(
    labels: Indices, clients: int, spec: Partition, random: np.random.Generator
) -> list[Indices]:
    return np.array_split(random.permutation(len(labels)), clients)


def _divide_shards(
    labels: Indices, clients: int, spec: Partition, random: np.random.Generator
) -> list[Indices]:
    """Sort by label, cut into equal shards, and give each client the same number of them.

    The shards are drawn at random, as in McMahan's and FedFV's papers.
    """
    shards_each = int(spec.parameter or 1)
    if clients * shards_each > len(labels):
        raise UsageError(
            f"{spec} for {clients} clients makes more shards than the {len(labels)} samples of the "
            f"dataset; use at most shards:{len(labels) // clients}"
        )
    shards = np.array_split(np.argsort(labels, kind="stable"), clients * shards_each)
    drawn = random.permutation(len(shards)).reshape(clients, shards_each)
    return [np.concatenate([shards[index] for index in indices]) for indices in drawn]


def _divide_pat(
    labels: Indices, clients: int, spec: Partition, random: np.random.Generator
) -> list[Indices]:
    """Give each client k classes drawn at random, so that all classes have equally many clients.

    If that does not divide evenly, some classes have one client more.
    """
    classes, classes_each = np.unique(labels), _classes_per_client(labels, clients, spec)
    holders: dict[int, list[int]] = {int(label): [] for label in classes}
    for client in random.permutation(clients):
        # The classes with the fewest clients come first, ties at random. So no class is left over
        # and no client gets a class twice.
        shuffled = random.permutation(classes)
        fewest = sorted(shuffled, key=lambda label: len(holders[int(label)]))[:classes_each]
        for label in fewest:
            holders[int(label)].append(int(client))
    return _deal_classes(labels, holders, clients, random)


def _divide_pat_fixed(
    labels: Indices, clients: int, spec: Partition, random: np.random.Generator
) -> list[Indices]:
    """Form FedLF's groups: each class goes to the first clients that need another class.

    Nothing is drawn at random.
    """
    classes, classes_each = np.unique(labels), _classes_per_client(labels, clients, spec)
    remaining = np.full(clients, classes_each)
    holders = {}
    for label in classes:
        group = np.flatnonzero(remaining)[: clients * classes_each // len(classes)]
        remaining[group] -= 1
        holders[int(label)] = group.tolist()
    if without_class := int(np.count_nonzero(remaining == classes_each)):
        multiple = len(classes) // math.gcd(len(classes), classes_each)
        raise UsageError(
            f"{spec} gives {len(classes)} classes to groups of one size and leaves {without_class} "
            f"of {clients} clients without samples; use a multiple of {multiple} clients"
        )
    return _deal_classes(labels, holders, clients, None)


def _classes_per_client(labels: Indices, clients: int, spec: Partition) -> int:
    """Return the number of classes of each client.

    Raises UsageError if there are fewer classes, or too few clients to cover all classes.
    """
    classes, classes_each = len(np.unique(labels)), int(spec.parameter or 1)
    if classes_each > classes:
        raise UsageError(
            f"{spec} gives {classes_each} classes to a client, but there are only {classes}"
        )
    if clients * classes_each < classes:
        raise UsageError(
            f"{spec} lets {clients} clients hold {clients * classes_each} of {classes} classes; "
            f"use {-(-classes // classes_each)} clients or more, or more classes for each"
        )
    return classes_each


def _deal_classes(
    labels: Indices, holders: dict[int, list[int]], clients: int, random: np.random.Generator | None
) -> list[Indices]:
    """Divide the samples of each class equally among its holders.

    The samples are shuffled first if there is a generator.
    """
    pieces: list[list[Indices]] = [[np.empty(0, np.int64)] for _ in range(clients)]
    for label, group in holders.items():
        samples = np.flatnonzero(labels == label)
        ordered = random.permutation(samples) if random else samples
        for client, piece in zip(group, np.array_split(ordered, len(group)), strict=True):
            pieces[client].append(piece)
    return [np.concatenate(own_pieces) for own_pieces in pieces]


def _divide_dirichlet(
    labels: Indices, clients: int, spec: Partition, random: np.random.Generator
) -> list[Indices]:
    """Divide each class by its own Dirichlet draw; repeat until each client has enough samples."""
    capped = spec.kind == "dirichlet-capped"
    for _ in range(MAX_DRAWS):
        shares = _draw_dirichlet(labels, clients, float(spec.parameter or 0), capped, random)
        if shares and min(map(len, shares)) >= spec.min_samples:
            return shares
    raise _too_few_samples(spec, clients, len(labels))


def _draw_dirichlet(
    labels: Indices, clients: int, concentration: float, capped: bool, random: np.random.Generator
) -> list[Indices]:
    """Return one draw, or nothing if the draw is not usable.

    Capped (FedLF): a client that already has an even share gets nothing of the later classes.
    """
    shares = [np.empty(0, np.int64)] * clients
    for label in np.unique(labels):
        samples = random.permutation(np.flatnonzero(labels == label))
        proportions = random.dirichlet(np.full(clients, concentration))
        if capped:
            sizes = np.array([len(share) for share in shares])
            proportions = proportions * (sizes < len(labels) / clients)
        if not proportions.sum() > 0:
            # All clients have reached the cap, or the concentration is too small for floats.
            return []
        pieces = _cut(samples, proportions)
        shares = [np.concatenate(pair) for pair in zip(shares, pieces, strict=True)]
    return shares


def _divide_by_quantity(
    labels: Indices, clients: int, spec: Partition, random: np.random.Generator
) -> list[Indices]:
    """Give all clients the same mix of labels, but sizes by a Dirichlet draw.

    A few clients have many samples, and most have few.
    """
    for _ in range(MAX_DRAWS):
        proportions = random.dirichlet(np.full(clients, float(spec.parameter or 0)))
        shares = _cut(random.permutation(len(labels)), proportions)
        if min(map(len, shares)) >= spec.min_samples:
            return shares
    raise _too_few_samples(spec, clients, len(labels))


def _cut(samples: Indices, proportions: NDArray[np.float64]) -> list[Indices]:
    """Cut into pieces of these relative sizes, rounded; a proportion of 0 is an empty piece."""
    ends = np.cumsum(proportions / proportions.sum())[:-1] * len(samples)
    return np.split(samples, np.rint(ends).astype(int))


def _too_few_samples(spec: Partition, clients: int, samples: int) -> UsageError:
    return UsageError(
        f"{spec} of {samples} samples over {clients} clients gave some client fewer than "
        f"{spec.min_samples} samples in {MAX_DRAWS} draws; use a larger concentration, fewer "
        f"clients, or a lower minimum, as in {spec.kind}:{spec.parameter:g},minimum=1"
    )


def _divide_by_class(
    labels: Indices, clients: int, spec: Partition, random: np.random.Generator
) -> list[Indices]:
    """Give one class to each client.

    Fewer clients than classes hold groups of classes; more clients share the classes.
    """
    classes = np.unique(labels)
    if clients <= len(classes):
        return [
            np.flatnonzero(np.isin(labels, group)) for group in np.array_split(classes, clients)
        ]
    groups = np.array_split(np.arange(clients), len(classes))
    holders = {int(label): group.tolist() for label, group in zip(classes, groups, strict=True)}
    return _deal_classes(labels, holders, clients, random)


def _divide_by_user(
    users: Indices, clients: int | None, minimum: int, random: np.random.Generator
) -> list[Indices]:
    """Give each natural user's samples to one client.

    If there are more users than clients, users with enough samples are drawn at random.
    """
    order = np.argsort(users, kind="stable")
    distinct, starts = np.unique(users[order], return_index=True)
    by_user = dict(zip(distinct.tolist(), np.split(order, starts[1:]), strict=True))
    eligible = [user for user, samples in by_user.items() if len(samples) >= minimum]
    if not eligible or (clients or 0) > len(eligible):
        raise UsageError(
            f"of {len(by_user)} natural users {len(eligible)} have {minimum} samples or more, but "
            f"the partition needs {clients or 'some'} clients; use fewer clients or a lower "
            "minimum, as in user,minimum=1"
        )
    if clients is None:
        return [by_user[user] for user in eligible]
    drawn = sorted(random.choice(eligible, clients, replace=False).tolist())
    return [by_user[user] for user in drawn]


Divider = Callable[[Indices, int, Partition, np.random.Generator], list[Indices]]
DIVIDERS: dict[str, Divider] = {
    "iid": _divide_iid,
    "shards": _divide_shards,
    "pat": _divide_pat,
    "pat-fixed": _divide_pat_fixed,
    "dirichlet": _divide_dirichlet,
    "dirichlet-capped": _divide_dirichlet,
    "quantity": _divide_by_quantity,
    "class": _divide_by_class,
}
