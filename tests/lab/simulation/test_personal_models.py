"""Ditto's personal models in a simulation equal those of network clients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fairfleet.client.torch import TorchTask
from fairfleet.client.training.personal_model import PersonalModel
from fairfleet.common.reports import Evaluation
from fairfleet.common.training_plan import Plan
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.experiments.runner import run
from fairfleet.lab.reports.result_rows import measures_shown, result_rows
from fairfleet.lab.simulation.model_average import copy_model
from fairfleet.lab.simulation.simulation import Simulation
from tests.support.samples.simulated_fleets import federation, fleet, mlp

LAMBDA = {"ditto_lambda": 0.5}


def task_of(client: int) -> TorchTask:
    from torch.nn.functional import cross_entropy

    own = fleet()[client]
    pairs = ((own.train_x, own.train_y), (own.test_x, own.test_y))
    return TorchTask(mlp, train=pairs[0], test=pairs[1], loss=cross_entropy, device="cpu")


@pytest.mark.parametrize("engine", ["batched", "sequential"])
def test_they_are_bit_identical_to_those_of_network_clients(engine: str, tmp_path: Path) -> None:
    setup = federation(
        "ditto", parameters=LAMBDA, clients_per_round=3, rounds=4, engine=engine, evaluate_every=4
    )
    simulation = Simulation(setup)
    models, cohorts = [copy_model(simulation.model)], []
    for result in simulation.rounds():
        cohorts.append(result.clients)
        models.append(copy_model(simulation.model))
    assert simulation.personal is not None
    taking_part = sorted({int(name[-1]) for cohort in cohorts for name in cohort})
    assert sorted(simulation.personal.models) == taking_part
    for client in taking_part:
        folder, task, name = tmp_path / str(client), task_of(client), f"client-{client}"
        folder.mkdir()
        personal = PersonalModel(folder)
        for number, cohort in enumerate(cohorts):
            if name in cohort:
                plan = simulation.plan.for_client(name, number)
                personal.train(task, models[number], plan, lambda done, planned, loss: None)
        evaluation = personal.evaluate(task, Evaluation(samples=10, loss=0.0, accuracy=0.0))
        assert result.scores is not None
        assert result.scores.personal is not None
        assert result.scores.personal[client] == evaluation.personal_accuracy
        np.testing.assert_array_equal(
            simulation.personal.models[client].parameters, personal._load(models[0]).parameters
        )


def test_the_shared_model_is_that_of_fedavg_and_without_ditto_there_are_none() -> None:
    plan = Plan(epochs=1, batch_size=8)
    ditto, plain = (
        Simulation(federation(rule, plan, parameters=given))
        for rule, given in (("ditto", LAMBDA), ("fedavg", {}))
    )
    for simulation in (ditto, plain):
        list(simulation.rounds())
    np.testing.assert_array_equal(ditto.model.parameters, plain.model.parameters)
    assert plain.personal is None


def test_a_run_records_them_and_a_table_shows_them() -> None:
    turned = {"rounds": 20, "plan": {"steps": 5}, "evaluate_every": 20}
    ditto, fedavg = (
        run(Experiment.model_validate(turned | {"rule": rule})) for rule in ("ditto", "fedavg")
    )
    assert ditto.accuracy == fedavg.accuracy
    assert (len(ditto.personal), fedavg.personal) == (10, ())
    both = result_rows([ditto, fedavg.model_copy(update={"label": "fedavg"})])
    assert [measure.name for measure in measures_shown(both)][-2:] == [
        "personal_average",
        "personal_worst_5",
    ]
    assert both[0].measures["personal_average"].mean > both[0].measures["average"].mean
    assert "personal_average" not in result_rows([fedavg])[0].measures
