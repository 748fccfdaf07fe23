"""Aggregation rules and server optimizers: the library for people who write their own.

A rule maps the inner products of a round's updates, and the clients' reports, to one coefficient
per client. It never sees an update, a socket or the clock, so it can be tested on a small matrix by
hand, and its cost does not depend on the size of the model. To write one, subclass `Rule` and
return a `Step` from its method `step`; to write an optimizer, subclass `Optimizer`. To run a rule
on plain arrays without a server, use `recipe` and `fairfleet.server.aggregation.aggregate`.
"""

from fairfleet.server.rules.base import (
    Blocks,
    LineSearch,
    LineSearchResult,
    Needs,
    Rule,
    State,
    Step,
    StepTrials,
)
from fairfleet.server.rules.cohort import Cohort, PastRow, Report, Vector
from fairfleet.server.rules.errors import NonFiniteChoice, NonFiniteStep, RuleError, UnusableReport
from fairfleet.server.rules.optimizer_vectors import OptimizerState
from fairfleet.server.rules.optimizers import Optimizer
from fairfleet.server.rules.registry import Listing, Recipe, listings, optimizer, recipe

__all__ = [
    "Blocks",
    "Cohort",
    "LineSearch",
    "LineSearchResult",
    "Listing",
    "Needs",
    "NonFiniteChoice",
    "NonFiniteStep",
    "Optimizer",
    "OptimizerState",
    "PastRow",
    "Recipe",
    "Report",
    "Rule",
    "RuleError",
    "State",
    "Step",
    "StepTrials",
    "UnusableReport",
    "Vector",
    "listings",
    "optimizer",
    "recipe",
]
