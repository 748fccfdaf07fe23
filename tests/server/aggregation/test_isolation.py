"""The search for the update that makes a round fail: bounded, deterministic, odd ones first."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from fairfleet.server.aggregation.isolation import ALONE, Attempt, isolate, most_conspicuous


def names(count: int) -> list[str]:
    return [f"client-{index}" for index in range(count)]


@given(st.integers(1, 3000), st.booleans())
def test_attempts_are_few_and_each_leaves_an_update(count: int, has_history: bool) -> None:
    tried: list[Attempt] = []

    def fails(attempt: Attempt) -> bool:
        tried.append(attempt)
        return False

    assert isolate(names(count), fails, has_history=has_history) is None
    assert len(tried) <= has_history + 2 * (3 + ALONE + math.log2(count + 2))
    assert tried[0] == Attempt()
    assert all(len(attempt.without) < count for attempt in tried)
    assert len(set(tried)) == len(tried)


@given(st.integers(2, 3000), st.data())
def test_a_single_culprit_is_left_out_alone_at_any_position(
    count: int, data: st.DataObject
) -> None:
    culprit = data.draw(st.sampled_from(names(count)))
    tried: list[Attempt] = []

    def succeeds(attempt: Attempt) -> bool:
        tried.append(attempt)
        return culprit in attempt.without

    assert isolate(names(count), succeeds, has_history=False) == Attempt(frozenset([culprit]))
    assert len(tried) <= 2 + ALONE + 2 * math.log2(count) + 2


@given(st.integers(1, 100))
def test_a_state_that_is_the_cause_is_reset_and_no_update_left_out(count: int) -> None:
    result = isolate(names(count), lambda attempt: attempt.fresh_state, has_history=False)
    assert result == Attempt(fresh_state=True)


@given(st.integers(3, 300), st.sets(st.integers(0, 299), min_size=2, max_size=5))
def test_several_culprits_are_left_out_together(count: int, culprits: set[int]) -> None:
    wrong = {f"client-{index}" for index in culprits if index < count - 1}
    result = isolate(names(count), lambda attempt: wrong <= attempt.without, has_history=False)
    assert result is not None
    assert wrong <= result.without


def test_nothing_is_tried_without_an_update() -> None:
    assert isolate(most_conspicuous([], {"norm": []}), lambda _: True, has_history=True) is None


@given(st.permutations(range(6)), st.sampled_from([1e-45, 0.0, 1e38, math.inf, math.nan]))
def test_the_unusual_update_comes_first_in_any_order(order: list[int], odd: float) -> None:
    norms = [1.0, 2.0, 0.7, 1.1, 0.9, odd]
    clients = [f"client-{index}" for index in order]
    ordered = most_conspicuous(
        clients, {"norm": [norms[index] for index in order], "loss": [1.0] * 6}
    )
    assert ordered[0] == "client-5"


def test_equal_updates_are_ordered_by_name() -> None:
    assert most_conspicuous(["bob", "ann"], {"norm": [1.0, 1.0]}) == ["ann", "bob"]
