"""The batches of a plan: every sample once per epoch, in an order that the seed decides."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.client.training.batches import batches, sequential_batches
from fairfleet.common.training_plan import Plan

sizes = st.integers(1, 60)


@given(samples=sizes, batch_size=st.integers(0, 20), epochs=st.integers(1, 3))
def test_each_epoch_sees_every_sample_once(samples: int, batch_size: int, epochs: int) -> None:
    plan = Plan(epochs=epochs, batch_size=batch_size)
    drawn = list(batches(plan, samples))
    assert len(drawn) == plan.steps_for(samples)
    seen = np.concatenate(drawn).reshape(epochs, samples)
    assert (np.sort(seen, axis=1) == np.arange(samples)).all()


@given(samples=sizes, batch_size=st.integers(2, 20), steps=st.integers(1, 30))
def test_no_batch_holds_a_single_sample_unless_the_client_has_no_more(
    samples: int, batch_size: int, steps: int
) -> None:
    lengths = [len(batch) for batch in batches(Plan(steps=steps, batch_size=batch_size), samples)]
    assert len(lengths) == steps
    assert min(lengths) >= min(2, samples)
    assert max(lengths) <= batch_size + 1


def test_the_seed_alone_decides_the_order() -> None:
    def drawn(seed: int) -> list[list[int]]:
        return [batch.tolist() for batch in batches(Plan(epochs=2, batch_size=4, seed=seed), 11)]

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    assert drawn(2**64 - 1)
    first, second = drawn(7)[:3], drawn(7)[3:]
    assert first != second  # each epoch has its own order


def test_without_samples_there_are_no_batches() -> None:
    assert list(batches(Plan(steps=3), 0)) == []


@given(samples=st.integers(0, 60), size=sizes)
def test_a_measuring_pass_sees_every_sample_once_in_order(samples: int, size: int) -> None:
    parts = list(sequential_batches(samples, size))
    assert np.concatenate([np.arange(0), *parts]).tolist() == list(range(samples))
    assert all(0 < len(part) <= size for part in parts)
