"""Protocol versions and features: what each side can do, and what a task needs of a client.

proto/FEATURES.md defines the names. The tables below hold what this version implements: add a name
to CLIENT_FEATURES or SERVER_FEATURES together with its behaviour. A plan field that an older client
would ignore gets its feature in PLAN_FEATURES, so that no client trains something else silently.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import version
from typing import NamedTuple

from fairfleet.common.errors import WrongState

MEASURES = "measures"
LOSS_PLAN = "loss-plan"
COUNTS = "counts"
INITIAL_LOSS = "initial-loss"
FEATURES = (MEASURES, LOSS_PLAN, COUNTS, INITIAL_LOSS)  # all names in proto/FEATURES.md

CLIENT_FEATURES: tuple[str, ...] = FEATURES  # that a client of this version has
SERVER_FEATURES: tuple[str, ...] = FEATURES  # that a server of this version knows

# The fields of the message Plan that every client of protocol version 1 follows.
PLAN_FIELDS_OF_VERSION_1 = frozenset(
    {
        "epochs",
        "steps",
        "batch_size",
        "learning_rate",
        "solver",
        "momentum",
        "nesterov",
        "weight_decay",
        "proximal_mu",
        "seed",
        "personal_lambda",
    }
)
# By later field of the message Plan: the feature of a client that follows it.
PLAN_FEATURES = {"loss_before": LOSS_PLAN, "loss_after": LOSS_PLAN, "loss_samples": LOSS_PLAN}
# Features whose plan fields a client may ignore: it then does more than is asked for, not less.
OPTIONAL_PLAN_FEATURES = frozenset({LOSS_PLAN})


class VersionRange(NamedTuple):
    """The protocol versions that one side speaks."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        """Return the range for people, such as `1` or `1 to 3`."""
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


SPOKEN = VersionRange(1, 1)  # by this version of FairFleet, as client and as server


def newest_common(own: VersionRange, other: VersionRange) -> int | None:
    """Return the newest protocol version that both sides speak; None if there is none.

    >>> newest_common(VersionRange(1, 3), VersionRange(2, 5))
    3
    """
    newest = min(own.newest, other.newest)
    return newest if newest >= max(own.oldest, other.oldest) else None


def check_spoken(address: str, answered: int) -> None:
    """Raise WrongState unless this client speaks the protocol version that a server answered.

    0 stands for an older server, which speaks version 1.
    """
    if newest_common(SPOKEN, VersionRange(answered or 1, answered or 1)) is None:
        raise WrongState(
            f"server {address} answered with protocol version {answered}; this client speaks "
            f"{SPOKEN}. Upgrade the older side."
        )


def plan_features(fields: Collection[str]) -> frozenset[str]:
    """Return the features that a client needs to follow a plan that sets these fields.

    Fields that have their default value are not passed: an older client does the same.

    >>> plan_features({"epochs", "momentum"})
    frozenset()
    """
    needed = {PLAN_FEATURES[field] for field in fields if field not in PLAN_FIELDS_OF_VERSION_1}
    return frozenset(needed - OPTIONAL_PLAN_FEATURES)


def unknown_to_client(required: Collection[str]) -> list[str]:
    """Return which of the features that a task requires a client of this version lacks."""
    return sorted(set(required) - set(CLIENT_FEATURES))


def software() -> str:
    """Return the name and version of this software, as a peer is told."""
    return f"fairfleet {version('fairfleet')}"
