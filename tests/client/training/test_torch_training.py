"""TorchTask trains what the plan says, repeatably, and changes nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fairfleet.client.task import Abandoned, Job, Task
from fairfleet.common.errors import TaskFailed
from fairfleet.common.tensors import Section
from fairfleet.common.training_plan import Plan
from tests.support.samples.torch_tasks import X, Y, moved, normalised, same, task


def test_torch_task_is_a_task() -> None:
    assert isinstance(task(), Task)
    assert (task().train_samples, task().test_samples, task().device) == (33, 9, "cpu")


def test_the_same_plan_and_model_give_the_same_result_to_the_bit() -> None:
    """This includes dropout and batch order, whatever was trained or drawn in between."""
    once = task(normalised)
    received = once.initial_model().named()
    job = Job(Plan(epochs=2, batch_size=8, momentum=0.9, seed=5))
    first = once.train(received, job)
    once.train(received, Job(Plan(epochs=3, seed=6)))
    torch.rand(7)  # other code draws random numbers as well
    again = once.train(received, job)
    assert same(first.arrays, again.arrays)
    assert first.report.loss_after == again.report.loss_after
    reseeded = once.train(received, Job(Plan(epochs=2, batch_size=8, momentum=0.9, seed=7)))
    assert not same(first.arrays, reseeded.arrays)


def test_training_does_not_change_the_random_state_of_the_caller() -> None:
    once = task(normalised)
    received = once.initial_model().named()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    once.train(received, Job(Plan()))
    assert torch.equal(torch.rand(3), expected)


def test_a_trained_model_is_not_changed_by_the_next_training() -> None:
    once = task()
    received = once.initial_model()
    before = received.parameters.copy()
    trained = once.train(received.named(), Job(Plan())).arrays
    copies = {name: array.copy() for name, array in trained.items()}
    once.train(received.named(), Job(Plan(epochs=5)))
    assert same(trained, copies)
    assert np.array_equal(received.parameters, before)


def test_the_initial_model_is_untrained_even_after_a_training() -> None:
    def ones() -> nn.Module:
        module = nn.Linear(5, 3)
        nn.init.ones_(module.weight)
        return module

    once = task(ones)
    once.train(once.initial_model().named(), Job(Plan()))
    assert (once.initial_model().named()["weight"] == 1).all()


def test_batch_norm_statistics_and_counters_are_part_of_the_model() -> None:
    once = task(normalised)
    received = once.initial_model()
    sections = {tensor.name: tensor.section for tensor in received.signature.tensors}
    assert sections["1.weight"] is Section.PARAMETERS
    assert sections["1.running_mean"] is sections["1.running_var"] is Section.BUFFERS
    assert sections["1.num_batches_tracked"] is Section.COUNTERS
    received.named()["1.num_batches_tracked"][...] = 40
    trained = once.train(received.named(), Job(Plan(steps=7, batch_size=8)))
    # Batch normalisation subtracts the mean, so the bias before it does not move.
    assert moved(received.named(), trained.arrays) | {"0.bias"} == set(sections)
    # The received counter goes on, not that of this process.
    assert trained.arrays["1.num_batches_tracked"] == 47


def test_measuring_does_not_change_batch_norm_statistics() -> None:
    once = task(normalised)
    received = once.initial_model().named()
    trained = once.train(received, Job(Plan(steps=1, batch_size=8), want_gradient_norm=True))
    assert trained.arrays["1.num_batches_tracked"] == 1


@pytest.mark.parametrize("samples", [17, 33])
def test_a_last_batch_of_one_sample_does_not_break_batch_norm(samples: int) -> None:
    once = task(normalised, train=(X[:samples], Y[:samples]))
    report = once.train(once.initial_model().named(), Job(Plan(epochs=2, batch_size=16))).report
    assert report.steps == 2 * (samples // 16)


def test_a_model_that_cannot_train_on_a_single_sample_is_explained() -> None:
    once = task(normalised, train=(X[:1], Y[:1]))
    with pytest.raises(TaskFailed, match=r"one sample.*batch_size"):
        once.train(once.initial_model().named(), Job(Plan()))
    single = task(train=(X[:1], Y[:1]))
    assert single.train(task().initial_model().named(), Job(Plan())).report.steps == 1


def test_unsaved_buffers_and_second_names_of_a_tensor_are_not_part_of_the_model() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
            self.out.weight = self.into.weight
            self.register_buffer("scratch", torch.zeros(2), persistent=False)
            self.register_buffer("scale", torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.into(x)) * self.scale  # type: ignore[no-any-return]

    once = task(Tied, loss=cross_entropy)
    received = once.initial_model()
    assert set(received.named()) == {"into.weight", "scale"}
    received.named()["scale"][...] = 0.0
    trained = once.train(received.named(), Job(Plan(steps=2, proximal_mu=0.1)))
    # With a received scale of zero, every gradient is zero.
    assert moved(received.named(), trained.arrays) == set()
    received.named()["scale"][...] = 1.0
    assert moved(received.named(), once.train(received.named(), Job(Plan(steps=2))).arrays) == {
        "into.weight"
    }
    module = once._module
    assert isinstance(module, Tied)
    assert module.out.weight is module.into.weight


def test_frozen_parameters_are_neither_trained_nor_decayed_nor_pulled() -> None:
    def frozen() -> nn.Module:
        module = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
        module[0].requires_grad_(False)
        return module

    once = task(frozen)
    received = once.initial_model().named()
    trained = once.train(
        received, Job(Plan(proximal_mu=1.0, weight_decay=0.1), want_gradient_norm=True)
    )
    assert moved(received, trained.arrays) == {"1.weight", "1.bias"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_every_float_type_train_and_keep_their_type(dtype: torch.dtype) -> None:
    once = task(lambda: normalised().to(dtype))
    received = once.initial_model()
    types = {tensor.name: tensor.dtype for tensor in received.signature.tensors}
    assert types["0.weight"] == types["1.running_mean"] == str(dtype).removeprefix("torch.")
    assert types["1.num_batches_tracked"] == "int64"
    trained = once.train(
        received.named(), Job(Plan(epochs=5, batch_size=8), want_gradient_norm=True)
    )
    assert trained.report.loss_after < trained.report.loss_before
    assert {str(array.dtype) for array in trained.arrays.values()} == {"float32", "int64"}
    assert once.evaluate(trained.arrays).accuracy is not None


def test_progress_is_reported_after_each_step_and_may_end_the_training() -> None:
    reported: list[tuple[int, int]] = []

    def progress(done: int, planned: int, loss: float) -> None:
        assert math.isfinite(loss)
        reported.append((done, planned))
        if done == 2:
            raise Abandoned

    once = task()
    received = once.initial_model().named()
    with pytest.raises(Abandoned):
        once.train(received, Job(Plan(epochs=1, batch_size=11), progress=progress))
    assert reported == [(1, 3), (2, 3)]
    again = once.train(received, Job(Plan(epochs=1, batch_size=11)))
    assert again.report.steps == 3
