"""The batched trainer computes the network client's training in another order."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fairfleet.common.training_plan import Plan
from fairfleet.lab.simulation import batched_trainer as batched
from fairfleet.lab.simulation.batched_trainer import BatchedTrainer
from fairfleet.lab.simulation.dense_network import DenseNetwork
from fairfleet.lab.simulation.federation import Federation, initial_model, trainer_for
from fairfleet.lab.simulation.sequential_trainer import SequentialTrainer
from fairfleet.lab.simulation.trainer import FleetData, TrainMeasures, TrainRequest, Work
from tests.support.samples.simulated_fleets import CLASSES, FEATURES, federation, fleet, mlp, run

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


PLAIN_REQUEST = TrainRequest()


def trained(
    setup: Federation, engine: Any, plan: Plan, request: TrainRequest = PLAIN_REQUEST
) -> tuple[Any, list[TrainMeasures]]:
    data = FleetData.of(setup.clients)
    model = initial_model(setup.model, 1)
    trainer = trainer_for(
        Federation(setup.clients, setup.model, setup.recipe, engine=engine), data, model, workers=2
    )
    assert isinstance(trainer, BatchedTrainer if engine == "batched" else SequentialTrainer)
    rows = np.empty((len(data.names), len(model.parameters)), np.float32)
    work = [Work(client, plan.for_client(name, 4)) for client, name in enumerate(data.names)]
    try:
        return rows, trainer.train(model, work, request, rows)
    finally:
        trainer.close()


@pytest.mark.parametrize("softmax", [False, True], ids=["logits", "softmax twice"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize(
    "cached_weights", [batched.CACHED_WEIGHTS, 0], ids=["one lane", "a lane for each worker"]
)
def test_batched_training_agrees_with_the_network_clients_task(
    plan: Plan, softmax: bool, cached_weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched, "CACHED_WEIGHTS", cached_weights)
    setup = federation(model=partial(mlp, softmax=softmax))
    request = TrainRequest(gradient_norm=True, loss_after=True)
    expected, batched_measures = trained(setup, "sequential", plan, request)
    rows, measured = trained(setup, "batched", plan, request)
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(
        np.array(measured, float), np.array(batched_measures, float), rtol=2e-5, atol=1e-6
    )
    assert np.abs(expected).max() > 1e-3


def test_clients_with_more_steps_continue_when_others_are_done() -> None:
    setup = federation(clients=fleet((100, 3, 3, 50, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9)))
    plan = Plan(epochs=2, batch_size=4, momentum=0.5)
    expected, sequential_measures = trained(setup, "sequential", plan)
    rows, measured = trained(setup, "batched", plan)
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=2e-6)
    assert [measures.steps for measures in measured] == [
        measures.steps for measures in sequential_measures
    ]
    assert len({measures.steps for measures in sequential_measures}) > 3


def test_evaluation_and_training_losses_agree_too() -> None:
    setup = federation()
    data, model = FleetData.of(setup.clients), initial_model(mlp, 3)
    batched, sequential = (
        trainer_for(Federation(setup.clients, mlp, setup.recipe, engine=engine), data, model, 2)
        for engine in ("batched", "sequential")
    )
    np.testing.assert_allclose(
        batched.evaluate(model)[:2], sequential.evaluate(model)[:2], rtol=1e-6
    )
    np.testing.assert_allclose(
        batched.losses(model, [3, 1]), sequential.losses(model, [3, 1]), rtol=1e-6
    )
    batched.close()
    sequential.close()


def dense(*layers: nn.Module) -> DenseNetwork | None:
    module = nn.Sequential(*layers)
    return DenseNetwork.of(module, initial_model(lambda: module, 0).signature)


def test_only_plain_dense_networks_are_trained_batched() -> None:
    assert dense(nn.Flatten(), nn.Linear(4, 3, bias=False), nn.ReLU(), nn.Linear(3, 2)) is not None
    assert dense(nn.Linear(4, 3), nn.Softmax(1)) == DenseNetwork(
        dense(nn.Linear(4, 3)).layers, True
    )  # type: ignore[union-attr]
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
    """Yield models that look like plain dense networks."""
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
        run(federation(model=lambda: odd_models()[kind], rounds=2, engine=engine))[
            0
        ].model.parameters
        for engine in ("auto", "sequential")
    )
    np.testing.assert_allclose(auto, sequential, rtol=1e-4, atol=2e-6)


def test_a_network_without_biases_trains_batched_as_well() -> None:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 4, bias=False), nn.ReLU(), nn.Linear(4, CLASSES, bias=False)
        )

    setup = federation(model=model)
    expected, _ = trained(setup, "sequential", Plan(batch_size=8))
    rows, _ = trained(setup, "batched", Plan(batch_size=8))
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=2e-6)


def test_the_callers_number_of_torch_threads_is_restored() -> None:
    before = torch.get_num_threads()
    trained(federation(), "batched", Plan(batch_size=8))
    assert torch.get_num_threads() == before
