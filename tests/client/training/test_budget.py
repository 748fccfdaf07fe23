"""A client with a budget does exactly what the budget allows, and reports it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fairfleet.client.softmax import SoftmaxTask
from fairfleet.client.task import Job, Task
from fairfleet.client.torch import TorchTask
from fairfleet.client.training.batches import batches
from fairfleet.client.training.budget import Budget, Training
from fairfleet.common.errors import UsageError
from fairfleet.common.reports import TrainReport
from fairfleet.common.training_plan import Plan

DONE = TrainReport(samples=100, loss_before=1.0, loss_after=0.5, steps=10, learning_rate=0.1)


def softmax() -> SoftmaxTask:
    random = np.random.default_rng(0)
    return SoftmaxTask((random.normal(size=(100, 5)), random.integers(0, 3, 100)), classes=3)


def perceptron(width: int = 8) -> TorchTask:
    x, y = torch.randn(100, 5), torch.randint(0, 3, (100,))
    layers = (
        nn.Linear(5, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(width, 3),
    )
    return TorchTask(
        lambda: nn.Sequential(*layers), train=(x, y), loss=nn.functional.cross_entropy, device="cpu"
    )


@pytest.fixture(params=[softmax, perceptron])
def task(request: pytest.FixtureRequest) -> Task:
    task: Task = request.param()
    return task


def trained(task: Task, training: Training) -> TrainReport:
    job = Job(training.plan, enough=training.enough)
    return training.complete_report(task.train(task.initial_model().named(), job).report)


def ticking() -> Iterator[float]:
    return map(float, count())


@given(
    st.integers(0, 3),
    st.integers(0, 64),
    st.integers(1, 200),
    st.none() | st.integers(1, 50),
    st.integers(1, 300),
)
def test_a_budget_never_means_more_work_than_the_plan(
    epochs: int, batch_size: int, samples: int, steps: int | None, largest: int
) -> None:
    plan = Plan(epochs=epochs, batch_size=batch_size)
    training = Training(plan, samples, Budget(steps=steps), largest)
    drawn = [len(indices) for indices in batches(training.plan, samples)]
    assert len(drawn) == min(plan.steps_for(samples), steps or 1000)
    # A single last sample joins the batch before it.
    assert max(drawn) <= max(min(batch_size or samples, largest), 1) + 1
    assert sum(drawn) <= sum(len(indices) for indices in batches(plan, samples))


def test_a_plan_that_fits_is_followed_unchanged() -> None:
    plan = Plan(epochs=2, batch_size=10)
    training = Training(plan, 100, Budget(steps=20, seconds=1e9), largest_batch=10)
    assert training.plan is plan
    assert not training.enough()
    report = training.complete_report(DONE)
    assert (report.planned_steps, report.batch_size, report.cut_by) == (20, 10, ())


def test_fewer_steps_are_taken_and_reported(task: Task) -> None:
    report = trained(task, Training(Plan(epochs=2, batch_size=10), 100, Budget(steps=3)))
    assert (report.steps, report.planned_steps, report.cut_by) == (3, 20, ("steps",))


def test_no_step_starts_after_the_time_limit_but_one_is_always_taken(task: Task) -> None:
    clock = ticking()  # each reading takes a second
    report = trained(
        task, Training(Plan(batch_size=10), 100, Budget(seconds=4), now=lambda: next(clock))
    )
    assert (report.steps, report.planned_steps, report.cut_by) == (4, 10, ("seconds",))
    clock = ticking()
    report = trained(
        task, Training(Plan(batch_size=10), 100, Budget(seconds=0.5), now=lambda: next(clock))
    )
    assert (report.steps, report.cut_by) == (1, ("seconds",))


def test_a_time_limit_that_ends_with_the_last_step_is_not_reported_as_a_cut(task: Task) -> None:
    clock = ticking()
    report = trained(
        task, Training(Plan(batch_size=10), 100, Budget(seconds=10), now=lambda: next(clock))
    )
    assert (report.steps, report.cut_by) == (10, ())


def test_less_memory_means_smaller_batches_and_not_more_of_them(task: Task) -> None:
    report = trained(task, Training(Plan(batch_size=50), 100, Budget(memory_mb=1), largest_batch=4))
    assert (report.steps, report.planned_steps) == (2, 2)
    assert (report.batch_size, report.cut_by) == (4, ("memory",))


def test_a_step_with_the_largest_batch_fits_and_more_memory_fits_more(task: Task) -> None:
    sizes = [
        task.fit_into(memory)  # type: ignore[attr-defined]
        for memory in (100_000, 200_000, 400_000)
    ]
    assert 0 < sizes[0] < sizes[1] < sizes[2]
    assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), abs=2)
    before = task.initial_model()
    task.fit_into(100_000)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(task.initial_model().parameters, before.parameters)


def test_a_wider_model_fits_fewer_samples() -> None:
    assert perceptron(64).fit_into(1_000_000) < perceptron(8).fit_into(1_000_000) / 4


def test_too_little_memory_for_one_sample_is_an_error() -> None:
    with pytest.raises(UsageError, match="more than 1 MB even with a single sample"):
        Budget(memory_mb=1).largest_batch(perceptron(width=20_000))


def test_a_task_without_fit_into_cannot_have_a_memory_budget() -> None:
    with pytest.raises(UsageError, match="object cannot keep to a memory budget"):
        Budget(memory_mb=1).largest_batch(object())  # type: ignore[arg-type]
