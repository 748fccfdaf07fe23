"""Softmax regression by torch and by numpy gives the same result for every plan."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fairfleet.client.softmax import SoftmaxTask
from fairfleet.client.task import Job
from fairfleet.client.torch import TorchTask
from fairfleet.common.training_plan import Plan

# On a busy machine the threads of small models wait for each other for seconds.
torch.set_num_threads(1)

random = np.random.default_rng(11)
# 65 samples are two batches of 32 and one more sample.
TRAIN = random.normal(size=(65, 6)), random.integers(0, 4, 65)
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
    "nesterov, decay and proximal": {
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 0.1,
        "proximal_mu": 0.5,
    },
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
    by_torch, by_numpy = BY_TORCH.train(RECEIVED, job), BY_NUMPY.train(RECEIVED, job)
    for name, received in RECEIVED.items():
        assert by_torch.arrays[name] == pytest.approx(by_numpy.arrays[name], abs=2e-5)
        assert np.abs(by_torch.arrays[name] - received).max() > 0.01
    first, second = by_torch.report, by_numpy.report
    assert (first.samples, first.steps) == (second.samples, second.steps)
    for name in ("loss_before", "loss_after", "gradient_norm", "learning_rate"):
        assert getattr(first, name) == pytest.approx(getattr(second, name), rel=1e-4)


def test_both_tasks_evaluate_to_the_same_result() -> None:
    by_torch, by_numpy = BY_TORCH.evaluate(RECEIVED), BY_NUMPY.evaluate(RECEIVED)
    assert by_torch.accuracy == pytest.approx(by_numpy.accuracy)
    assert by_torch.loss == pytest.approx(by_numpy.loss, rel=1e-5)
    assert by_torch.samples == by_numpy.samples == 20


def test_every_option_of_the_plan_changes_the_result() -> None:
    """Otherwise the comparison above would pass for an option that both ignore."""
    results = [
        BY_NUMPY.train(RECEIVED, Job(Plan(steps=5, **options))).arrays
        for options in SOLVERS.values()
    ]
    for first, second in itertools.combinations(results, 2):
        assert np.abs(first["linear.weight"] - second["linear.weight"]).max() > 1e-3


def test_both_tasks_have_the_same_signature() -> None:
    assert BY_TORCH.initial_model().signature == BY_NUMPY.initial_model().signature
