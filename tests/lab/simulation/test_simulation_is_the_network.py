"""A small federation gives the same model over the network and in the simulation.

The selected clients are the same too, also if some never deliver.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from fairfleet.client.operator import display
from fairfleet.client.task import load_task
from fairfleet.common.tensors import Model
from fairfleet.common.training_plan import Plan
from fairfleet.lab import digits
from fairfleet.lab.datasets.client_data import ClientData
from fairfleet.lab.demo.local_federation import LocalFederation, run_federation
from fairfleet.lab.simulation.behaviour import Behaviour, FleetBehaviour
from fairfleet.lab.simulation.federation import Engine, Federation
from fairfleet.lab.simulation.simulation import Simulation
from fairfleet.server.aggregation.rule_loss import LossOfRule
from fairfleet.server.rules import recipe
from tests.support.device import Device
from tests.support.fleet import Fleet
from tests.support.samples import simulated_fleets as fleets

ROUNDS, PER_ROUND, SEED, PLAN_SEED = 5, 2, 11, 4
NAMES = digits.CLIENTS[4:]
DECAY = 0.7
PLAN = Plan(
    steps=6,
    batch_size=32,
    learning_rate=0.1,
    learning_rate_decay=DECAY,
    momentum=0.5,
    seed=PLAN_SEED,
)
SETTINGS = {
    "codec": "int8",
    "seed": str(SEED),
    "round.clients": str(PER_ROUND),
    "round.evaluate_every": "0",
    "plan.steps": "6",
    "plan.learning_rate_decay": str(DECAY),
    "plan.momentum": "0.5",
    "plan.seed": str(PLAN_SEED),
}


pytestmark = pytest.mark.slow


class Made(NamedTuple):
    rule: str
    loss: LossOfRule
    initial: Model
    model: Model  # the model of real processes


@pytest.fixture(
    scope="module",
    params=[
        ("fedlf", "before"),
        ("fedmdfg", "before"),
        ("adafedadam", "before"),
        ("adafedadam", "after"),
        ("adafed", "after"),
    ],
    ids="-".join,
)
def over_the_network(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Made:
    folder = tmp_path_factory.mktemp("network")
    digits.write_shards(folder / "data")
    task, initial = "fairfleet.lab.digits:torch_mlp", folder / "initial.safetensors"
    clients = {name: {"shard": name, "data": str(folder / "data")} for name in NAMES}
    # The seed is fixed: where a rule branches, the smallest difference changes the result.
    torch.manual_seed(SEED)
    load_task(task, clients[NAMES[0]]).initial_model().save(initial)
    rule, loss = request.param
    settings = {
        **SETTINGS,
        "rule.name": rule,
        "losses.rule": loss,
        "round.evaluate_every": str(ROUNDS),
    }
    federation = LocalFederation(
        "both",
        rule,
        folder,
        initial,
        folder / "out.safetensors",
        ROUNDS,
        task,
        clients,
        settings,
    )
    run_federation(federation, display.nothing())
    trained, _ = Model.load(folder / "out.safetensors")
    return Made(rule, loss, Model.load(initial)[0], trained)


def simulated(over: Made, engine: Engine, codec: str = "int8") -> Model:
    shards = digits.partition(*digits.images())
    clients = [ClientData(name, *shards[name]) for name in NAMES]
    federation = Federation(
        clients,
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, digits.CLASSES)
        ),
        recipe(over.rule),
        PLAN,
        ROUNDS,
        clients_per_round=PER_ROUND,
        seed=SEED,
        initial=over.initial,
        codec=codec,
        loss=over.loss,
        engine=engine,
        workers=1,
    )
    simulation = Simulation(federation)
    for _ in simulation.rounds():
        pass
    return simulation.model


def test_the_sequential_simulation_gives_a_bit_identical_model(
    over_the_network: Made,
) -> None:
    networks_model = over_the_network.model
    moved = np.abs(networks_model.parameters - over_the_network.initial.parameters).max()
    assert moved > (0.01 if over_the_network.rule == "adafedadam" else 0.1)  # Adam's rate is small
    np.testing.assert_array_equal(
        simulated(over_the_network, "sequential").parameters, networks_model.parameters
    )


def test_the_batched_simulation_gives_the_same_model_but_for_rounding(
    over_the_network: Made,
) -> None:
    # not with int8, where a value between two steps may be rounded the other way
    batched, sequential = (
        simulated(over_the_network, engine, "raw32").parameters
        for engine in ("batched", "sequential")
    )
    np.testing.assert_allclose(batched, sequential, rtol=1e-3, atol=1e-5)


def test_other_seeds_give_another_model(
    over_the_network: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.SEED", SEED + 1)
    networks_model = over_the_network.model
    assert (
        np.abs(simulated(over_the_network, "batched").parameters - networks_model.parameters).max()
        > 0.01
    )


class SomeNeverDeliver(FleetBehaviour):
    BROKEN = ("client-1", "client-4")

    def delivers(self, client: str, round_number: int) -> bool:
        return client not in self.BROKEN


def test_the_simulation_selects_the_same_clients_even_if_some_never_deliver(
    tmp_path: Path,
) -> None:
    """Select 3 of 7 by turn, until the two failing clients have waited several turns more."""
    clients, rounds = fleets.fleet((10,) * 7), 30
    simulation = Simulation(
        fleets.federation(
            clients=clients, rounds=rounds, clients_per_round=3, selection="least_recent", seed=SEED
        )
    )
    names = [client.name for client in clients]
    simulation.behaviour = SomeNeverDeliver(Behaviour(), names, SEED)
    attendance = simulation.attendance
    selected = [
        {name for name in names if attendance.of(name).last_selected == result.round}
        for result in simulation.rounds()
    ]
    assert attendance.of("client-1").missed == attendance.of("client-4").missed == 4
    assert selected == selected_over_the_network(tmp_path, names, rounds)


def selected_over_the_network(folder: Path, names: list[str], rounds: int) -> list[set[str]]:
    settings = {
        "seed": SEED,
        "round__clients": 3,
        "round__selection": "least_recent",
        "lease_seconds": 60,
    }
    # One update suffices, but a round waits until all clients have answered. So timing does not
    # influence the selection.
    waits_for_all = {"round__minimum_clients": len(names), "round__quorum": 0.3}
    fleet = Fleet(folder)
    try:
        fleet.init(20)
        fleet.start_server(rounds=rounds, **settings, **waits_for_all)
        for name in names:
            if name in SomeNeverDeliver.BROKEN:
                device = Device(fleet.address, name)
                device.join()
                device.fail_all_tasks()
            else:
                fleet.start_client(name)
        fleet.wait_clients()
        return fleet.selections()
    finally:
        fleet.end()
