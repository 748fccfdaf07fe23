"""TorchTask measures losses, gradient norms and accuracy over all samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from fairfleet.client.task import Job
from fairfleet.common.errors import UsageError
from fairfleet.common.training_plan import Plan
from tests.support.samples.torch_tasks import X, Y, normalised, random, task


def test_the_losses_are_over_all_data_in_eval_mode_and_the_gradient_is_theirs() -> None:
    once = task(normalised)
    received = once.initial_model()
    module = normalised()
    module.load_state_dict({name: torch.tensor(array) for name, array in received.named().items()})
    module.eval()
    loss = cross_entropy(module(torch.from_numpy(X)), torch.from_numpy(Y))
    loss.backward()  # type: ignore[no-untyped-call]
    norm = math.sqrt(
        sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None)
    )
    trained = once.train(received.named(), Job(Plan(batch_size=8), want_gradient_norm=True))
    assert trained.report.loss_before == pytest.approx(loss.item(), rel=1e-5)
    assert trained.report.gradient_norm == pytest.approx(norm, rel=1e-5)
    module.load_state_dict({name: torch.tensor(array) for name, array in trained.arrays.items()})
    after = cross_entropy(module.eval()(torch.from_numpy(X)), torch.from_numpy(Y)).item()
    assert trained.report.loss_after == pytest.approx(after, rel=1e-5)


def test_measuring_in_several_batches_gives_the_result_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(Plan(), want_gradient_norm=True)
    received = task().initial_model().named()
    report, evaluation = task().train(received, job).report, task().evaluate(received)
    monkeypatch.setattr("fairfleet.client.torch.MEASURE_BATCH", 7)
    report_in_parts = task().train(received, job).report
    evaluation_in_parts = task().evaluate(received)
    assert report_in_parts.loss_before == pytest.approx(report.loss_before, rel=1e-6)
    assert report_in_parts.gradient_norm == pytest.approx(report.gradient_norm, rel=1e-5)
    assert evaluation_in_parts.accuracy == pytest.approx(evaluation.accuracy)
    assert evaluation_in_parts.loss == pytest.approx(evaluation.loss, rel=1e-6)


def test_the_gradient_norm_is_reported_only_on_request() -> None:
    assert task().train(task().initial_model().named(), Job(Plan())).report.gradient_norm is None


def test_accuracy_is_known_for_class_logits_only() -> None:
    target = random.normal(size=(33, 3))
    regression = task(train=(X, target), test=(X, target), loss=mse_loss)
    evaluation = regression.evaluate(regression.initial_model().named())
    assert (evaluation.accuracy, evaluation.samples) == (None, 33)
    assert evaluation.loss > 0


def test_accuracy_may_be_a_users_function() -> None:
    def close(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target).abs() < 1e9).float().mean()

    target = random.normal(size=(33, 3))
    regression = task(train=(X, target), test=(X, target), loss=mse_loss, accuracy=close)
    assert regression.evaluate(regression.initial_model().named()).accuracy == 1.0


def test_accuracy_is_the_share_of_right_answers() -> None:
    received = task().initial_model()
    evaluation = task().evaluate(received.named())
    predictions = (X[:9] @ received.named()["weight"].T + received.named()["bias"]).argmax(1)
    assert evaluation.accuracy == pytest.approx(np.mean(predictions == Y[:9]))


def test_without_test_samples_there_is_nothing_to_evaluate() -> None:
    for bare in (task(test=None), task(test=(X[:0], Y[:0]))):
        assert bare.test_samples == 0
        with pytest.raises(UsageError, match="test="):
            bare.evaluate(bare.initial_model().named())
