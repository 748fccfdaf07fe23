"""Revisions: what rules, datasets and measures meant when older records were made.

A record is found by the key of its experiment. If a name changes its meaning, its revision number
rises and enters the key, so the experiment is run again. Records of earlier readings stay, and are
shown with the words of their reading. A subject's first revision is not in the key, so the keys of
experiments that no revision concerns never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from fairfleet.common.training_plan import Plan
from fairfleet.lab.datasets.registry import EARLIER_READINGS
from fairfleet.server.rules import Recipe, listings

PastReadings = Mapping[str, tuple[str, ...]]  # subject -> its earlier readings, oldest first

# Measure in the records -> what it meant before, oldest first. A measure that is only computed
# from records needs no revision. An entry here means that all experiments are run again.
MEASURES: dict[str, tuple[str, ...]] = {}


def past_readings(rule: str, recipe: Recipe, plan: Plan, data: str) -> PastReadings:
    """Return the earlier readings that concern an experiment; subjects without any are left out.

    `rule` and `data` are texts such as "fedfv,alpha=0.1"; `recipe` is the rule as written.
    """
    earlier = listings()[rule.replace(" ", "").split(",")[0]].earlier
    past = {
        "rule": tuple(reading.words for reading in earlier if reading.concerns(recipe, plan)),
        "data": EARLIER_READINGS.get(data.split(",")[0], ()),
        **{f"measure {name}": readings for name, readings in MEASURES.items()},
    }
    return {subject: readings for subject, readings in past.items() if readings}


def as_first_written(rule: str) -> str:
    """Return a rule's text without parameters that only ask for its first reading.

    `fedlf,layers=tensors` means what `fedlf` meant first, so it has the same records.
    """
    name, *parameters = rule.split(",")
    earlier = listings()[name.strip()].earlier
    if not earlier or earlier[0].written not in parameters:
        return rule
    return ",".join([name, *(text for text in parameters if text != earlier[0].written)])


def earlier_readings(past: PastReadings) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the words and the revision numbers of every combination before the present one."""
    choices = [range(1, len(readings) + 2) for readings in past.values()]
    for numbers in product(*choices):
        revisions = dict(zip(past, numbers, strict=True))
        words = [past[s][n - 1] for s, n in revisions.items() if n <= len(past[s])]
        if words:
            yield "; ".join(words), revisions
