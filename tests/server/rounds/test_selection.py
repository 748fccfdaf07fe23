"""Every selection policy does what its name says, and the same seed selects the same clients."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.server.rounds.selection import (
    POLICIES,
    Candidate,
    Selection,
    by_samples,
    least_recent,
    power_of_choice,
)

candidates = st.lists(
    st.builds(
        Candidate,
        st.text("abcdefgh", min_size=1, max_size=4),
        st.integers(0, 1000),
        st.none() | st.integers(0, 50),
        st.none() | st.floats(0, 10),
    ),
    max_size=12,
    unique_by=lambda candidate: candidate.client,
)


@pytest.mark.parametrize("policy", POLICIES)
@given(some=candidates, count=st.integers(1, 15), seed=st.integers(0, 99), data=st.data())
def test_every_policy_selects_the_requested_number_whatever_the_order(
    policy: Selection, some: list[Candidate], count: int, seed: int, data: st.DataObject
) -> None:
    choose = POLICIES[policy]
    chosen = choose(some, count, (seed, 1, 2))
    assert chosen <= {candidate.client for candidate in some}
    assert len(chosen) == min(count, len(some))
    assert choose(data.draw(st.permutations(some)), count, (seed, 1, 2)) == chosen


@pytest.mark.parametrize("policy", ["uniform", "samples"])
def test_another_round_selects_other_clients(policy: Selection) -> None:
    some = [Candidate(str(k), samples=10) for k in range(20)]
    assert len({POLICIES[policy](some, 5, (0, number, 0)) for number in range(10)}) > 5


def test_samples_selects_in_proportion_to_sample_counts() -> None:
    some = [Candidate("small", 100), Candidate("large", 900), Candidate("none", 0)]
    drawn = Counter(client for seed in range(2000) for client in by_samples(some, 1, (seed,)))
    assert drawn["none"] == 0
    assert drawn["large"] / 2000 == pytest.approx(0.9, abs=0.03)
    assert by_samples(some, 3, (0,)) == {"small", "large", "none"}


def test_least_recent_selects_every_client_before_any_twice() -> None:
    last: dict[str, int | None] = dict.fromkeys("abcdefgh")
    for number in range(8):
        chosen = least_recent([Candidate(c, last_round=last[c]) for c in last], 3, (0, number))
        waiting = sorted((-1 if last[c] is None else last[c] or 0) for c in last if c not in chosen)
        assert max(-1 if last[c] is None else last[c] or 0 for c in chosen) <= min(waiting)
        last |= dict.fromkeys(chosen, number)


def test_clients_that_never_deliver_are_selected_less_often() -> None:
    """3 of 30 clients never deliver and get less than their share of a tenth."""
    last, missed, selected = dict[str, int](), Counter[str](), Counter[str]()
    for number in range(300):
        fleet = [
            Candidate(f"c{k}", last_selected=last.get(f"c{k}"), selections_missed=missed[f"c{k}"])
            for k in range(30)
        ]
        for client in least_recent(fleet, 3, (0, number)):
            last[client] = number
            selected[client] += 1
            missed[client] += client in ("c0", "c1", "c2")
    broken = sum(selected[client] for client in ("c0", "c1", "c2"))
    assert 0 < broken < 0.05 * selected.total()


def test_power_of_choice_selects_the_highest_losses_and_newcomers() -> None:
    some = [
        Candidate(c, samples=1, loss=loss)
        for c, loss in zip("abcd", (0.1, 0.9, 0.5, None), strict=True)
    ]
    for order in permutations(some):
        assert power_of_choice(order, 2, (0,), factor=2.0) == {"b", "d"}
