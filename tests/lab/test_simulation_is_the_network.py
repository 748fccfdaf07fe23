"""One small federation, run by real processes over the network and in the simulation: the same model comes out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from fairfleet.client import display
from fairfleet.client.task import load_task
from fairfleet.common.plan import Plan
from fairfleet.common.tensors import Model
from fairfleet.lab import digits
from fairfleet.lab.clients import ClientData
from fairfleet.lab.federation import Engine, Federation
from fairfleet.lab.local import LocalFederation, run_federation
from fairfleet.lab.simulation import Simulation
from fairfleet.server.rules import recipe

ROUNDS, PER_ROUND, SEED, PLAN_SEED = 5, 2, 11, 4
NAMES = digits.CLIENTS[4:]
PLAN = Plan(steps=6, batch_size=32, learning_rate=0.1, momentum=0.5, seed=PLAN_SEED)
SETTINGS = {
    "codec": "int8",
    "seed": str(SEED),
    "round.clients": str(PER_ROUND),
    "round.evaluate_every": "0",
    "plan.steps": "6",
    "plan.momentum": "0.5",
    "plan.seed": str(PLAN_SEED),
}


class Made(NamedTuple):
    rule: str
    initial: Model
    model: Model  # that real processes made of it


WITH_TRIALS = pytest.param("fedmdfg", marks=pytest.mark.slow)  # of every step


@pytest.fixture(scope="module", params=["fedlf", WITH_TRIALS])
def over_the_network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("network")
    digits.write_shards(folder / "data")
    task, initial = "fairfleet.lab.digits:torch_mlp", folder / "initial.safetensors"
    clients = {name: {"shard": name, "data": str(folder / "data")} for name in NAMES}
    # The same each time: a rule may stand at a fork, where the smallest difference leads elsewhere.
    torch.manual_seed(SEED)
    load_task(task, clients[NAMES[0]]).initial_model().save(initial)
    settings = {**SETTINGS, "rule.name": request.param, "round.evaluate_every": str(ROUNDS)}
    federation = LocalFederation(
        "both", request.param, folder, initial, folder / "out.safetensors", ROUNDS, task, clients, settings
    )
    run_federation(federation, display.nothing())
    return Made(request.param, Model.load(initial)[0], Model.load(folder / "out.safetensors")[0])


def simulated(over: Made, engine: Engine, codec: str = "int8") -> Model:
    shards = digits.partition(*digits.images())
    clients = [ClientData(name, *shards[name]) for name in NAMES]
    federation = Federation(
        clients,
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, digits.CLASSES)),
        recipe(over.rule),
        PLAN,
        ROUNDS,
        clients_per_round=PER_ROUND,
        seed=SEED,
        initial=over.initial,
        codec=codec,
        engine=engine,
        workers=1,
    )
    simulation = Simulation(federation)
    for _ in simulation.rounds():
        pass
    return simulation.model


def test_the_sequential_simulation_gives_the_networks_model_bit_for_bit(over_the_network: Made) -> None:
    made = over_the_network.model
    assert np.abs(made.parameters - over_the_network.initial.parameters).max() > 0.1
    np.testing.assert_array_equal(simulated(over_the_network, "sequential").parameters, made.parameters)


def test_the_batched_simulation_gives_the_same_model_but_for_rounding(over_the_network: Made) -> None:
    # not through int8, where a value on the edge may be rounded the other way
    batched, sequential = (
        simulated(over_the_network, engine, "raw32").parameters for engine in ("batched", "sequential")
    )
    np.testing.assert_allclose(batched, sequential, rtol=1e-3, atol=1e-5)


def test_other_seeds_give_another_model(over_the_network: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SEED", SEED + 1)
    made = over_the_network.model
    assert np.abs(simulated(over_the_network, "batched").parameters - made.parameters).max() > 0.01
