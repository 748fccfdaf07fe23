"""Small fleets for tests of the simulation: blobs of a few classes, unevenly spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from fairfleet.common.training_plan import Plan
from fairfleet.lab.datasets.client_data import ClientData
from fairfleet.lab.simulation.federation import Federation, RoundResult
from fairfleet.lab.simulation.simulation import Simulation
from fairfleet.server.rules import recipe

FEATURES, CLASSES = 6, 3


def fleet(sizes: Sequence[int] = (40, 7, 23, 31, 12), seed: int = 0) -> list[ClientData]:
    random = np.random.default_rng(seed)
    centres = random.normal(size=(CLASSES, FEATURES))

    def samples(count: int) -> tuple[Any, Any]:
        y = random.integers(0, CLASSES, count)
        return (centres[y] + random.normal(size=(count, FEATURES))).astype(np.float32), y

    return [ClientData(f"client-{k}", *samples(size), *samples(10)) for k, size in enumerate(sizes)]


def mlp(hidden: int = 5, softmax: bool = False) -> nn.Module:
    layers = [nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)]
    return nn.Sequential(*layers, nn.Softmax(1)) if softmax else nn.Sequential(*layers)


def federation(rule: str = "fedavg", plan: Plan | None = None, **fields: Any) -> Federation:
    settings = {"clients": fleet(), "model": mlp, "rounds": 3, "workers": 2}
    parameters = fields.pop("parameters", {})
    rule_recipe = recipe(rule, **parameters)
    return Federation(
        recipe=rule_recipe, plan=plan or Plan(epochs=2, batch_size=8), **(settings | fields)
    )


def run(federation_: Federation) -> tuple[Simulation, list[RoundResult]]:
    simulation = Simulation(federation_)
    return simulation, list(simulation.rounds())
