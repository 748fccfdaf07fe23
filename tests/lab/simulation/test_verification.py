"""Verified descent in the lab: stopping at the first accepted trial decides like the server."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from fairfleet.lab.simulation.verification import decide_early
from fairfleet.server.rounds.verification import VerificationPolicy, decide
from fairfleet.server.rules import StepTrials
from fairfleet.server.rules.directions.fedmdfg import SearchLine

BEFORE = {"a": 1.0, "b": 0.5, "c": 1.5}
LINE = SearchLine(
    s=1, beta=1e-4, stretch=2.0, guided=True, absent=False, slopes=dict.fromkeys("abc", 1.0)
)

losses = st.floats(0.0, 2.0) | st.just(math.inf)
tables = st.lists(st.tuples(losses, losses, losses), min_size=4, max_size=4)
terms = st.builds(
    VerificationPolicy,
    threshold=st.sampled_from((0.3, 0.6, 1.0)),
    quorum=st.sampled_from((0.5, 1.0)),
    fallback=st.sampled_from(("commit", "smallest", "skip")),
)


@given(tables, terms, st.sampled_from((StepTrials(3), LINE.trials())))
def test_the_verdict_equals_that_on_all_trials(
    table: list[tuple[float, ...]], under: VerificationPolicy, trials: StepTrials
) -> None:
    answers = dict(zip(BEFORE, zip(*table, strict=True), strict=True))
    early, all_trials = (
        decide_early(trials, under, BEFORE, iter(table)),
        decide(trials, under, BEFORE, answers),
    )
    assert (early.outcome, early.reason, early.halvings) == (
        all_trials.outcome,
        all_trials.reason,
        all_trials.halvings,
    )


def test_nothing_is_tried_after_the_first_accepted_trial() -> None:
    def tried() -> Iterator[tuple[float, ...]]:
        yield 2.0, 2.0, 2.0
        yield 0.1, 0.1, 0.1
        raise AssertionError("a third trial")

    assert decide_early(StepTrials(3), VerificationPolicy(), BEFORE, tried()).halvings == 1
