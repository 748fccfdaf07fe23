"""Ditto's personal models in a simulation are those that network clients would have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fairfleet.client.personal import Personal
from fairfleet.client.torch import TorchTask
from fairfleet.common.plan import Plan
from fairfleet.common.reports import Evaluation
from fairfleet.lab import tables
from fairfleet.lab.experiment import Experiment
from fairfleet.lab.runs import run
from fairfleet.lab.simulation import Simulation, copied
from tests.lab.fleets import federation, fleet, mlp

LAMBDA = {"ditto_lambda": 0.5}


def task_of(client: int) -> TorchTask:
    from torch.nn.functional import cross_entropy

    own = fleet()[client]
    pairs = ((own.train_x, own.train_y), (own.test_x, own.test_y))
    return TorchTask(mlp, train=pairs[0], test=pairs[1], loss=cross_entropy, device="cpu")


@pytest.mark.parametrize("engine", ["batched", "sequential"])
def test_they_have_the_bits_of_the_network_clients_own(engine: str, tmp_path: Path) -> None:
    made = federation("ditto", parameters=LAMBDA, clients_per_round=3, rounds=4, engine=engine, evaluate_every=4)
    simulation = Simulation(made)
    models, cohorts = [copied(simulation.model)], []
    for told in simulation.rounds():
        cohorts.append(told.clients)
        models.append(copied(simulation.model))
    assert simulation.personal is not None
    taking_part = sorted({int(name[-1]) for cohort in cohorts for name in cohort})
    assert sorted(simulation.personal.models) == taking_part
    for client in taking_part:
        folder, task, name = tmp_path / str(client), task_of(client), f"client-{client}"
        folder.mkdir()
        personal = Personal(folder)
        for number, cohort in enumerate(cohorts):
            if name in cohort:
                plan = simulation.plan.for_client(name, number)
                personal.train(task, models[number], plan, lambda done, planned, loss: None)
        found = personal.evaluate(task, Evaluation(samples=10, loss=0.0, accuracy=0.0))
        assert told.served is not None
        assert told.served.personal is not None
        assert told.served.personal[client] == found.personal_accuracy
        np.testing.assert_array_equal(
            simulation.personal.models[client].parameters, personal._find(models[0]).parameters
        )


def test_the_shared_model_is_that_of_fedavg_and_without_ditto_there_are_none() -> None:
    plan = Plan(epochs=1, batch_size=8)
    ditto, plain = (
        Simulation(federation(rule, plan, parameters=given)) for rule, given in (("ditto", LAMBDA), ("fedavg", {}))
    )
    for one in (ditto, plain):
        list(one.rounds())
    np.testing.assert_array_equal(ditto.model.parameters, plain.model.parameters)
    assert plain.personal is None


def test_a_run_records_them_and_a_table_shows_them_where_they_are() -> None:
    turned = {"rounds": 20, "plan": {"steps": 5}, "evaluate_every": 20}
    ditto, fedavg = (run(Experiment.model_validate(turned | {"rule": rule})) for rule in ("ditto", "fedavg"))
    assert ditto.accuracy == fedavg.accuracy
    assert (len(ditto.personal), fedavg.personal) == (10, ())
    both = tables.rows([ditto, fedavg.model_copy(update={"label": "fedavg"})])
    assert [measure.name for measure in tables.shown(both)][-2:] == ["personal_average", "personal_worst_5"]
    assert both[0].measures["personal_average"].mean > both[0].measures["average"].mean
    assert "personal_average" not in tables.rows([fedavg])[0].measures
