"""The batched trainer is the network client's own training, in another order of arithmetic."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fairfleet.common.plan import Plan
from fairfleet.lab import batched
from fairfleet.lab.batched import BatchedTrainer
from fairfleet.lab.cohort import FleetData, Measured, Wanted, Work
from fairfleet.lab.federation import Federation, initial_model, trainer_for
from fairfleet.lab.perceptron import Perceptron
from fairfleet.lab.sequential import SequentialTrainer
from tests.lab.fleets import CLASSES, FEATURES, federation, fleet, mlp, run

PLANS = {
    "one epoch": Plan(epochs=1, batch_size=8),
    "three epochs": Plan(epochs=3, batch_size=10),
    "steps beyond an epoch": Plan(steps=9, batch_size=8),
    "all samples at once": Plan(epochs=1, batch_size=0),
    "all samples, three times": Plan(epochs=3, batch_size=0),
    "momentum": Plan(epochs=2, batch_size=8, momentum=0.9),
    "nesterov": Plan(epochs=2, batch_size=8, momentum=0.5, nesterov=True),
    "weight decay": Plan(epochs=2, batch_size=8, weight_decay=0.1),
    "proximal": Plan(epochs=2, batch_size=8, proximal_mu=0.5),
    "adam": Plan(epochs=2, batch_size=8, solver="adam", learning_rate=0.01, weight_decay=0.01),
}


def trained(made: Federation, engine: Any, plan: Plan, wanted: Wanted = Wanted()) -> tuple[Any, list[Measured]]:  # noqa: B008
    data = FleetData.of(made.clients)
    model = initial_model(made.model, 1)
    trainer = trainer_for(Federation(made.clients, made.model, made.recipe, engine=engine), data, model, workers=2)
    assert isinstance(trainer, BatchedTrainer if engine == "batched" else SequentialTrainer)
    rows = np.empty((len(data.names), len(model.parameters)), np.float32)
    work = [Work(client, plan.for_client(name, 4)) for client, name in enumerate(data.names)]
    try:
        return rows, trainer.train(model, work, wanted, rows)
    finally:
        trainer.close()


@pytest.mark.parametrize("softmax", [False, True], ids=["logits", "softmax twice"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("near", [batched.NEAR, 0], ids=["one lane", "a lane for each worker"])
def test_batched_training_agrees_with_the_network_clients_task(
    plan: Plan, softmax: bool, near: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched, "NEAR", near)
    made = federation(model=partial(mlp, softmax=softmax))
    wanted = Wanted(gradient_norm=True, loss_after=True)
    expected, told = trained(made, "sequential", plan, wanted)
    rows, measured = trained(made, "batched", plan, wanted)
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(np.array(measured, float), np.array(told, float), rtol=2e-5, atol=1e-6)
    assert np.abs(expected).max() > 1e-3


def test_clients_with_more_steps_train_on_when_others_are_done() -> None:
    made = federation(clients=fleet((100, 3, 3, 50, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9)))
    plan = Plan(epochs=2, batch_size=4, momentum=0.5)
    expected, told = trained(made, "sequential", plan)
    rows, measured = trained(made, "batched", plan)
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=2e-6)
    assert [one.steps for one in measured] == [one.steps for one in told]
    assert len({one.steps for one in told}) > 3


def test_evaluation_and_training_losses_agree_too() -> None:
    made = federation()
    data, model = FleetData.of(made.clients), initial_model(mlp, 3)
    batched, sequential = (
        trainer_for(Federation(made.clients, mlp, made.recipe, engine=engine), data, model, 2)
        for engine in ("batched", "sequential")
    )
    np.testing.assert_allclose(batched.evaluate(model)[:2], sequential.evaluate(model)[:2], rtol=1e-6)
    np.testing.assert_allclose(batched.losses(model, [3, 1]), sequential.losses(model, [3, 1]), rtol=1e-6)
    batched.close()
    sequential.close()


def dense(*layers: nn.Module) -> Perceptron | None:
    module = nn.Sequential(*layers)
    return Perceptron.of(module, initial_model(lambda: module, 0).signature)


def test_only_plain_dense_networks_are_trained_batched() -> None:
    assert dense(nn.Flatten(), nn.Linear(4, 3, bias=False), nn.ReLU(), nn.Linear(3, 2)) is not None
    assert dense(nn.Linear(4, 3), nn.Softmax(1)) == Perceptron(dense(nn.Linear(4, 3)).layers, True)  # type: ignore[union-attr]
    assert dense(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)) is None
    assert dense(nn.Linear(4, 3), nn.ReLU(), nn.Dropout(0.5), nn.Linear(3, 2)) is None
    assert dense(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)) is None
    assert dense(nn.Linear(4, 3), nn.ReLU()) is None
    assert dense(nn.Linear(4, 3), nn.Flatten(0), nn.Linear(3, 2)) is None


class Halved(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


class Stretched(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(3 * x)


def odd_models() -> dict[str, nn.Module]:
    """They look like plain dense networks."""
    act, tied, frozen = nn.ReLU(), nn.Linear(5, 5), nn.Linear(FEATURES, 5)
    frozen.requires_grad_(False)
    weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 5))
    first, last = nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)
    return {
        "an activation twice": nn.Sequential(first, act, nn.Linear(5, 5), act, last),
        "a layer twice": nn.Sequential(first, nn.ReLU(), tied, nn.ReLU(), tied, nn.ReLU(), last),
        "a frozen layer": nn.Sequential(frozen, nn.ReLU(), last),
        "normalised weights": nn.Sequential(weight_norm, nn.ReLU(), last),
        "a layer of its own kind": nn.Sequential(Halved(FEATURES, 5), nn.ReLU(), last),
        "a sequence of its own kind": Stretched(first, nn.ReLU(), last),
        "a single layer": nn.Linear(FEATURES, CLASSES),
    }


@pytest.mark.parametrize("kind", odd_models())
def test_models_that_look_like_dense_networks_train_as_what_they_are(kind: str) -> None:
    auto, sequential = (
        run(federation(model=lambda: odd_models()[kind], rounds=2, engine=engine))[0].model.parameters
        for engine in ("auto", "sequential")
    )
    np.testing.assert_allclose(auto, sequential, rtol=1e-4, atol=2e-6)


def test_a_network_without_biases_trains_batched_as_well() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 4, bias=False), nn.ReLU(), nn.Linear(4, CLASSES, bias=False))

    made = federation(model=model)
    expected, _ = trained(made, "sequential", Plan(batch_size=8))
    rows, _ = trained(made, "batched", Plan(batch_size=8))
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=2e-6)


def test_the_callers_number_of_torch_threads_is_restored() -> None:
    before = torch.get_num_threads()
    trained(federation(), "batched", Plan(batch_size=8))
    assert torch.get_num_threads() == before
