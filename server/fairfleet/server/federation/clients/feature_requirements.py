"""Which features a client needs for each kind of task, and what a client lacks.

A client that lacks a feature stays connected, is not selected for such tasks, and is shown with the
reason. Everything here is a pure function of the settings and of what the client said at its join.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fairfleet.common.features import MEASURES, plan_features
from fairfleet.common.reports import BUILT_IN
from fairfleet.common.training_plan import Plan
from fairfleet.server.federation.clients.assignments import Kind
from fairfleet.server.federation.clients.sessions import ClientDescription
from fairfleet.server.rounds.measure_choice import AUTO_MEASURE

NO_DATA = "it has no training data yet"
KINDS: tuple[Kind, ...] = ("train", "verify", "evaluate")


class FeatureRequirements(NamedTuple):
    """The features that each kind of task requires of a client."""

    train: frozenset[str] = frozenset()
    verify: frozenset[str] = frozenset()
    evaluate: frozenset[str] = frozenset()

    def of(self, kind: Kind) -> frozenset[str]:
        """Return the features that a task of this kind requires."""
        return {"train": self.train, "verify": self.verify, "evaluate": self.evaluate}[kind]

    def allow(self, member: ClientDescription, kind: Kind) -> bool:
        """Return whether a client can do a task of this kind: it has the features, and the data."""
        return self._has_features(member, kind) and not (kind == "train" and member.waits_for_data)

    def _has_features(self, member: ClientDescription, kind: Kind) -> bool:
        return self.of(kind) <= member.features

    def missing(self, member: ClientDescription) -> list[str]:
        """Return the features that some task requires and the client lacks."""
        return sorted((self.train | self.verify | self.evaluate) - member.features)

    def obstacle(self, member: ClientDescription) -> str:
        """Return why the client is not selected for some tasks, for people; empty if it can be.

        >>> member = ClientDescription("ann", "x", "cpu", 10, 10, ("raw32",), software="old 1")
        >>> FeatureRequirements(evaluate=frozenset({"measures"})).obstacle(member)
        'its software (old 1) lacks measures, required to evaluate; install a newer fairfleet there'
        """
        if not (missing := self.missing(member)):
            return NO_DATA if member.waits_for_data else ""
        kinds = [kind for kind in KINDS if not self._has_features(member, kind)]
        return (
            f"its software ({member.software or 'unknown'}) lacks {', '.join(missing)}, required "
            f"to {' and '.join(kinds)}; install a newer fairfleet there"
        )


NO_REQUIREMENTS = FeatureRequirements()


def required_features(
    plan: Plan,
    *,
    always: Iterable[str] = (),
    measure: str = AUTO_MEASURE,
) -> FeatureRequirements:
    """Return what the settings require of clients; `always` is required for every task.

    A `measure` of the tasks' own can only be reported by clients that name measures.

    >>> required_features(Plan(epochs=2), always=["counts"]).evaluate
    frozenset({'counts'})
    """
    common = frozenset(always)
    named = frozenset() if measure in (AUTO_MEASURE, *BUILT_IN) else frozenset({MEASURES})
    plan_fields = plan.for_round(0).model_dump(exclude_defaults=True)  # as clients receive it
    train = common | plan_features(plan_fields)
    return FeatureRequirements(train=train, verify=common, evaluate=common | named)
