"""The same softmax regression by torch and by numpy: whatever the plan says, both mean the same."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fairfleet.client.softmax import SoftmaxTask
from fairfleet.client.task import Job
from fairfleet.client.torch import TorchTask
from fairfleet.common.plan import Plan

torch.set_num_threads(1)  # on a busy machine the threads of small models wait for each other for seconds

random = np.random.default_rng(11)
TRAIN = random.normal(size=(65, 6)), random.integers(0, 4, 65)  # 65 is two batches of 32 and one sample over
TEST = random.normal(size=(20, 6)), random.integers(0, 4, 20)
RECEIVED = {
    "linear.weight": random.normal(size=(4, 6)).astype(np.float32),
    "linear.bias": random.normal(size=4).astype(np.float32),
}

SOLVERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.8, "nesterov": True},
    "adam": {"solver": "adam", "learning_rate": 0.01},
    "decay": {"weight_decay": 0.1},
    "proximal": {"proximal_mu": 0.5},
    "momentum, decay and proximal": {"momentum": 0.9, "weight_decay": 0.1, "proximal_mu": 0.5},
    "nesterov, decay and proximal": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "proximal_mu": 0.5},
    "adam, decay and proximal": {"solver": "adam", "weight_decay": 0.1, "proximal_mu": 0.5},
}
LENGTHS: dict[str, dict[str, Any]] = {
    "full batch": {"epochs": 12, "batch_size": 0},
    "epochs": {"epochs": 3, "batch_size": 16},
    "a last batch of one": {"epochs": 2, "batch_size": 32},
    "steps": {"steps": 7, "batch_size": 20},
}


def linear() -> nn.Module:
    return nn.Sequential(OrderedDict(linear=nn.Linear(6, 4)))


BY_TORCH = TorchTask(linear, train=TRAIN, test=TEST, loss=nn.functional.cross_entropy, device="cpu")
BY_NUMPY = SoftmaxTask(TRAIN, test=TEST, classes=4)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_both_tasks_end_with_the_same_parameters_and_report(solver: str, length: str) -> None:
    job = Job(Plan(seed=3, **LENGTHS[length], **SOLVERS[solver]), want_gradient_norm=True)
    one, other = BY_TORCH.train(RECEIVED, job), BY_NUMPY.train(RECEIVED, job)
    for name, received in RECEIVED.items():
        assert one.arrays[name] == pytest.approx(other.arrays[name], abs=2e-5)
        assert np.abs(one.arrays[name] - received).max() > 0.01
    assert (one.report.samples, one.report.steps) == (other.report.samples, other.report.steps)
    for name in ("loss_before", "loss_after", "gradient_norm", "learning_rate"):
        assert getattr(one.report, name) == pytest.approx(getattr(other.report, name), rel=1e-4)


def test_both_tasks_evaluate_alike() -> None:
    one, other = BY_TORCH.evaluate(RECEIVED), BY_NUMPY.evaluate(RECEIVED)
    assert one.accuracy == pytest.approx(other.accuracy)
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    assert one.samples == other.samples == 20


def test_every_option_of_the_plan_changes_the_result() -> None:
    """Else the comparison above would pass for a solver that both ignore."""
    ends = [BY_NUMPY.train(RECEIVED, Job(Plan(steps=5, **options))).arrays for options in SOLVERS.values()]
    for place, end in enumerate(ends):
        for other in ends[:place]:
            assert np.abs(end["linear.weight"] - other["linear.weight"]).max() > 1e-3


def test_both_have_the_same_signature() -> None:
    assert BY_TORCH.initial_model().signature == BY_NUMPY.initial_model().signature
