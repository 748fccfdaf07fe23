"""Verified descent in the lab: stopping at the first accepted trial decides as the server does with all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from fairfleet.lab.verified import decide_early
from fairfleet.server.rules.base import Trials
from fairfleet.server.rules.fedmdfg import Line
from fairfleet.server.verification import Terms, decide

BEFORE = {"a": 1.0, "b": 0.5, "c": 1.5}
LINE = Line(s=1, beta=1e-4, stretch=2.0, guided=True, absent=False, slopes=dict.fromkeys("abc", 1.0))

losses = st.floats(0.0, 2.0) | st.just(math.inf)
tables = st.lists(st.tuples(losses, losses, losses), min_size=4, max_size=4)
terms = st.builds(
    Terms,
    threshold=st.sampled_from((0.3, 0.6, 1.0)),
    quorum=st.sampled_from((0.5, 1.0)),
    fallback=st.sampled_from(("commit", "smallest", "skip")),
)


@given(tables, terms, st.sampled_from((Trials(3), LINE.trials())))
def test_the_verdict_is_that_on_all_trials(table: list[tuple[float, ...]], under: Terms, trials: Trials) -> None:
    answers = dict(zip(BEFORE, zip(*table, strict=True), strict=True))
    early, whole = decide_early(trials, under, BEFORE, iter(table)), decide(trials, under, BEFORE, answers)
    assert (early.outcome, early.reason, early.halvings) == (whole.outcome, whole.reason, whole.halvings)


def test_nothing_is_tried_after_the_first_accepted_trial() -> None:
    def tried() -> Iterator[tuple[float, ...]]:
        yield 2.0, 2.0, 2.0
        yield 0.1, 0.1, 0.1
        raise AssertionError("a third trial")

    assert decide_early(Trials(3), Terms(), BEFORE, tried()).halvings == 1
