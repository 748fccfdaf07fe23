"""Tasks measure the losses that are wanted, in passes that can be watched and ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from fairfleet.client.softmax import SoftmaxTask
from fairfleet.client.task import Abandoned, Job, Refreshing, Task
from fairfleet.client.torch import TorchTask
from fairfleet.client.training.losses import FirstPassLoss, loss_of_groups, sample_groups
from fairfleet.common.errors import TaskFailed, UsageError
from fairfleet.common.training_plan import NO_PASSES, LossPlan, Plan
from tests.support.samples.torch_tasks import linear, same

COUNT = 2000
random = np.random.default_rng(3)
X = random.normal(size=(COUNT, 5)).astype(np.float32)
Y = random.integers(0, 3, COUNT)
SAMPLED = LossPlan(before="sampled", after="sampled", samples=200)
MakeTask = Callable[[], Task]


def softmax_task() -> Task:
    return SoftmaxTask((X, Y), classes=3)


def torch_task(**options: Any) -> TorchTask:
    usual: dict[str, Any] = {"train": (X, Y), "loss": cross_entropy, "device": "cpu"}
    torch.manual_seed(5)
    return TorchTask(linear, **{**usual, **options})


@pytest.fixture(params=[softmax_task, torch_task])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeTask:
    """Make either task, which measures in batches of 100 samples."""
    monkeypatch.setattr("fairfleet.client.softmax.MEASURE_BATCH", 100)
    monkeypatch.setattr("fairfleet.client.torch.MEASURE_BATCH", 100)
    task: MakeTask = request.param
    return task


def moved_model(task: Task) -> Any:
    """Return a model that is not the initial one, so that losses differ between samples."""
    return task.train(task.initial_model().named(), Job(Plan(steps=20, seed=9))).arrays


def test_a_loss_without_a_pass_is_the_mean_of_the_first_pass(make: MakeTask) -> None:
    task, losses = make(), list[float]()
    plan = Plan(epochs=2, batch_size=COUNT // 2, learning_rate=1e-6)
    job = Job(plan, losses=NO_PASSES)
    report = task.train(moved_model(task), job).report
    exact = task.train(moved_model(task), Job(plan)).report
    assert (report.loss_measurement, report.loss_after, report.accuracy) == ("batches", None, None)
    assert report.loss_before == pytest.approx(exact.loss_before, rel=1e-4)  # tiny steps
    assert not losses


@pytest.mark.parametrize("losses", [NO_PASSES, SAMPLED])
def test_what_is_measured_changes_no_bit_of_the_training(make: MakeTask, losses: LossPlan) -> None:
    task = make()
    received, plan = moved_model(task), Plan(epochs=1, batch_size=64, momentum=0.9, seed=4)
    expected = task.train(received, Job(plan)).arrays
    assert same(task.train(received, Job(plan, losses=losses)).arrays, expected)


def test_a_sampled_loss_is_within_a_few_standard_errors_of_the_exact_one(make: MakeTask) -> None:
    task = make()
    received, plan = moved_model(task), Plan(steps=1, seed=11)
    exact = task.train(received, Job(plan)).report
    sampled = task.train(received, Job(plan, losses=SAMPLED)).report
    error = sampled.loss_standard_error
    assert sampled.loss_measurement == "sampled"
    assert error is not None
    assert 0 < error < 0.2
    assert abs(sampled.loss_before - exact.loss_before) < 4 * error
    assert sampled.loss_after is not None


def test_a_sample_of_all_samples_is_exact(make: MakeTask) -> None:
    task = make()
    losses = LossPlan(before="sampled", after="none", samples=COUNT)
    report = task.train(moved_model(task), Job(Plan(steps=1), losses=losses)).report
    assert (report.loss_measurement, report.loss_standard_error) == ("exact", None)


def test_a_gradient_norm_takes_a_pass_which_measures_exactly(make: MakeTask) -> None:
    task = make()
    report = task.train(moved_model(task), Job(Plan(steps=1), True, losses=NO_PASSES)).report
    assert report.loss_measurement == "exact"
    assert report.gradient_norm is not None


def test_a_pass_reports_progress_and_can_be_abandoned(make: MakeTask) -> None:
    task, calls = make(), list[tuple[int, int]]()

    def progress(done: int, planned: int, loss: float) -> None:
        calls.append((done, planned))
        if len(calls) == 3:
            raise Abandoned

    with pytest.raises(Abandoned):
        task.train(task.initial_model().named(), Job(Plan(steps=7), progress=progress))
    assert calls == [(0, 7)] * 3


def test_a_pass_that_does_not_fit_into_the_time_fails_if_it_must_be_exact(make: MakeTask) -> None:
    task, asked = make(), list[int]()

    def enough() -> bool:
        asked.append(1)
        return len(asked) == 4

    with pytest.raises(TaskFailed, match=r"when 400 of 2000 samples.*--max-seconds.*sampled"):
        task.train(task.initial_model().named(), Job(Plan(), enough=enough))


def test_a_sample_is_cut_short_when_the_time_is_up(make: MakeTask) -> None:
    """One step is still taken, and the loss is that of a smaller sample."""
    task = make()
    report = task.train(moved_model(task), Job(Plan(), enough=lambda: True, losses=SAMPLED)).report
    assert (report.steps, report.loss_measurement) == (1, "sampled")


def test_an_unfinished_loss_after_training_is_left_out(make: MakeTask) -> None:
    task, losses = make(), LossPlan(before="batches", after="exact")
    job = Job(Plan(steps=5), enough=lambda: True, losses=losses)
    assert task.train(moved_model(task), job).report.loss_after is None


def test_torch_reads_a_loss_from_the_device_at_intervals_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads, item = list[Tensor](), Tensor.item

    def counted(tensor: Tensor) -> Any:
        reads.append(tensor)
        return item(tensor)

    task = torch_task()
    monkeypatch.setattr("fairfleet.client.training.torch_measures.READ_SECONDS", 1e9)
    monkeypatch.setattr(Tensor, "item", counted)
    report = task.train(task.initial_model().named(), Job(Plan(steps=100), losses=NO_PASSES)).report
    assert report.steps == 100
    assert len(reads) == 2  # of the first step, so that people see progress, and of the last


def test_torch_finds_a_loss_that_is_not_finite_at_the_latest_at_the_end() -> None:
    task = torch_task()
    with pytest.raises(TaskFailed, match="at step 30 of 30 is"):
        task.train(
            task.initial_model().named(),
            Job(Plan(steps=30, learning_rate=1e38), losses=NO_PASSES),
        )


# ---- datasets ------------------------------------------------------------------------------------


class CountedData(Dataset[Any]):
    """Counts how often samples are read in this process."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return torch.from_numpy(X[index]), int(Y[index])


@pytest.mark.parametrize(("losses", "passes"), [(NO_PASSES, 1), (LossPlan(after="none"), 2)])
def test_a_dataset_is_read_once_per_pass(losses: LossPlan, passes: int) -> None:
    data = CountedData()
    task = torch_task(train=data)
    task.train(task.initial_model().named(), Job(Plan(batch_size=8), losses=losses))
    assert data.reads == passes * len(data)


def test_workers_of_a_data_loader_give_the_batches_of_the_plan() -> None:
    """The loader's own batch size and order do not count. Its workers serve several trainings."""
    loader = DataLoader(CountedData(), batch_size=3, shuffle=True, num_workers=1)
    plain, loaded = torch_task(train=CountedData()), torch_task(train=loader)
    received = plain.initial_model().named()
    for seed in (1, 2):
        job = Job(Plan(batch_size=8, seed=seed))
        expected = plain.train(received, job)
        trained = loaded.train(received, job)
        assert same(trained.arrays, expected.arrays)
        assert trained.report.loss_before == expected.report.loss_before


def test_a_data_loader_without_batches_is_refused() -> None:
    with pytest.raises(UsageError, match="batch_size=None"):
        torch_task(train=DataLoader(CountedData(), batch_size=None))


# ---- data that arrive later ----------------------------------------------------------------------


def test_a_task_made_of_functions_may_begin_without_data() -> None:
    size = 0
    tasks: list[Task] = [
        SoftmaxTask(lambda: (X[:size], Y[:size]), classes=3, test=lambda: (X[:size], Y[:size])),
        torch_task(train=lambda: (X[:size], Y[:size]), test=lambda: (X[:size], Y[:size])),
    ]
    for task in tasks:
        assert isinstance(task, Refreshing)
        assert (task.train_samples, task.test_samples) == (0, 0)
    size = 50
    for task in tasks:
        assert isinstance(task, Refreshing)
        task.refresh()
        assert (task.train_samples, task.test_samples) == (50, 50)
        assert task.train(task.initial_model().named(), Job(Plan())).report.samples == 50


def test_data_that_are_given_as_such_may_not_be_empty() -> None:
    with pytest.raises(UsageError, match=r"empty.*give a function"):
        SoftmaxTask((X[:0], Y[:0]), classes=3)
    with pytest.raises(UsageError, match=r"empty.*give a function"):
        torch_task(train=(X[:0], Y[:0]))


def test_an_empty_list_needs_the_number_of_features() -> None:
    with pytest.raises(UsageError, match="features=784"):
        SoftmaxTask(lambda: ([], []), classes=3)
    assert SoftmaxTask(lambda: ([], []), classes=3, features=5).train_samples == 0


def test_later_data_must_fit_the_model() -> None:
    pair: list[Any] = [(X, Y)]
    task = SoftmaxTask(lambda: pair[-1], classes=3)
    pair.append((X[:, :4], Y))
    with pytest.raises(UsageError, match="have 4 features; expected 5"):
        task.refresh()
    assert task.train_samples == COUNT


# ---- the helpers for tasks of one's own ----------------------------------------------------------


def test_the_first_pass_ends_with_the_last_batch_of_an_epoch() -> None:
    first = FirstPassLoss(Plan(epochs=3, batch_size=4), samples=8)
    for loss, samples in ((1.0, 4), (3.0, 4), (100.0, 4)):
        first.add(loss, samples)
    assert first.measured() == (2.0, "batches", None)


def test_samples_are_drawn_without_replacement_and_alike_for_one_seed() -> None:
    groups = sample_groups(7, 1000, 300)
    chosen = np.concatenate(groups)
    assert len(set(chosen.tolist())) == len(chosen) == 300
    assert np.array_equal(chosen, np.concatenate(sample_groups(7, 1000, 300)))
    assert not np.array_equal(chosen, np.concatenate(sample_groups(8, 1000, 300)))
    assert max(map(len, sample_groups(7, 100_000, 50_000, largest=512))) <= 512


def test_the_standard_error_agrees_with_the_spread_of_repeated_samples() -> None:
    values = np.random.default_rng(0).exponential(size=5000)
    results = []
    for seed in range(300):
        groups = sample_groups(seed, len(values), 1000)
        means = [float(values[group].mean()) for group in groups]
        results.append(loss_of_groups(means, list(map(len, groups)), len(values)))
    spread = float(np.std([result.loss for result in results]))
    errors = [result.standard_error or 0.0 for result in results]
    assert float(np.mean(errors)) == pytest.approx(spread, rel=0.15)
