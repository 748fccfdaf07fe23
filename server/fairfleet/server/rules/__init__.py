"""Aggregation rules: from inner products and reports to one coefficient per client.

No rule sees an update, a socket or the clock, so each can be tested on a small matrix by hand, and none depends on
the size of the model. With plain arrays and no server, `recipe` and `fairfleet.server.aggregation.aggregate` do all.
"""

from fairfleet.server.rules.base import Cohort, Needs, PastRow, Report, Rule, RuleError, State, Step
from fairfleet.server.rules.registry import Listing, Recipe, listings, optimizer, recipe

__all__ = [
    "Cohort",
    "Listing",
    "Needs",
    "PastRow",
    "Recipe",
    "Report",
    "Rule",
    "RuleError",
    "State",
    "Step",
    "listings",
    "optimizer",
    "recipe",
]
