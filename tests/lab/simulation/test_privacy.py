"""Privacy in the lab: the server's code, noise from a seed, and comparable records."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from torch import nn

from fairfleet.client.operator import display
from fairfleet.client.task import load_task
from fairfleet.common.errors import UsageError
from fairfleet.common.privacy_costs import report_cost, update_cost
from fairfleet.common.tensors import Model
from fairfleet.common.training_plan import Plan
from fairfleet.lab import digits
from fairfleet.lab.cli import simulate
from fairfleet.lab.datasets.client_data import ClientData
from fairfleet.lab.demo.local_federation import LocalFederation, run_federation
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.experiments.run_log import Ledger
from fairfleet.lab.experiments.runner import run as run_experiment
from fairfleet.lab.reports.result_rows import result_rows
from fairfleet.lab.reports.table_export import as_json
from fairfleet.lab.simulation import checkpoints
from fairfleet.lab.simulation.federation import Federation, RoundResult
from fairfleet.lab.simulation.simulation import Simulation
from fairfleet.server.privacy.accountant import PrivacySpent, SampledRelease, epsilon
from fairfleet.server.privacy.settings import PrivacySettings
from fairfleet.server.rounds.state_machine import Policy
from fairfleet.server.rules import recipe
from tests.support.samples.simulated_fleets import CLASSES, FEATURES, federation, run

UNIFORM = {"weighting": "uniform"}


def private(where: str = "client", **fields: Any) -> PrivacySettings:
    return PrivacySettings.model_validate(
        {"where": where, "clip": 0.5, "noise_multiplier": 1.0} | fields
    )


def parameters(setup: Federation) -> np.ndarray:
    return run(setup)[0].model.parameters


@pytest.mark.parametrize("where", ["client", "server"])
@pytest.mark.parametrize("codec", ["raw32", "int8"])
def test_noise_is_repeatable_and_differs_between_rounds_and_clients(where: str, codec: str) -> None:
    fields = {"parameters": UNIFORM, "codec": codec, "clients_per_round": 3}
    first, again = (
        parameters(federation(privacy=private(where), seed=1, **fields)) for _ in range(2)
    )
    np.testing.assert_array_equal(first, again)
    quiet = private(where, noise_multiplier=0.0)
    different, still = (
        parameters(federation(privacy=privacy, seed=1, **fields))
        for privacy in (private(where), quiet)
    )
    assert np.abs(different - still).max() > 0.05


def test_no_step_is_longer_than_the_bound() -> None:
    for where in ("client", "server"):
        for codec in ("raw32", "int8", "topk:0.2") if where == "server" else ("raw32",):
            privacy = private(where, clip=0.01, noise_multiplier=0.0)
            setup = federation(privacy=privacy, rounds=1, codec=codec, parameters=UNIFORM)
            simulation = Simulation(setup)
            before = simulation.model.parameters.copy()
            list(simulation.rounds())
            assert np.linalg.norm(simulation.model.parameters - before) <= 0.01 * (1 + 1e-4)


def test_epsilon_is_that_of_the_releases() -> None:
    simulation, _ = run(federation("fedlf", privacy=private(), rounds=4))
    assert simulation.epsilon() == pytest.approx(epsilon(PrivacySpent(4 * update_cost(1.0)), 1e-5))
    noised = private(reports="noised", report_noise=2.0)
    simulation, _ = run(federation("fedlf", privacy=noised, rounds=4, evaluate_every=2))
    cost = 4 * update_cost(1.0) + 4 * report_cost(2.0, 1) + 2 * report_cost(2.0, 2)
    assert simulation.epsilon() == pytest.approx(epsilon(PrivacySpent(cost), 1e-5))
    drawn = private("server", amplification=True)
    simulation, _ = run(
        federation(privacy=drawn, rounds=4, clients_per_round=1, parameters=UNIFORM)
    )
    assert simulation.epsilon() == epsilon(PrivacySpent(0.0, {SampledRelease(0.5, 1, 5): 4}), 1e-5)
    simulation, _ = run(federation(rounds=1))
    assert simulation.epsilon() is None


def test_a_rule_gets_the_noised_loss() -> None:
    setup = federation(
        "adafed", privacy=private(reports="noised", noise_multiplier=0.0, clip=1e9), rounds=1
    )
    simulation = Simulation(setup)
    (result,) = list[RoundResult](simulation.rounds())
    assert result.diagnostics is not None
    reported = {client: loss for client, (_, loss) in simulation.last_reports.items()}
    assert all(0.0 <= loss <= 5.0 for loss in reported.values())
    assert len(set(reported.values())) > 1
    plain = Simulation(federation("adafed", rounds=1))
    list(plain.rounds())
    assert all(plain.last_reports[client][1] != loss for client, loss in reported.items())


@pytest.mark.parametrize(("every", "evaluations"), [(0, 0), (2, 3), (3, 2), (5, 1), (10, 1)])
def test_epsilon_counts_every_evaluation_that_a_server_would_request(
    every: int, evaluations: int
) -> None:
    simulation, _ = run(
        federation(privacy=private(reports="noised"), rounds=5, evaluate_every=every)
    )
    setup = simulation.federation
    assert setup.privacy is not None
    policy = Policy(rounds=5, evaluate_every=every)
    assert (
        sum(policy.evaluation_due(version, last=version == 5) for version in range(1, 6))
        == evaluations
    )
    cost = 5 * (setup.privacy.released_cost(setup.recipe) + setup.privacy.commit_cost)
    cost += evaluations * setup.privacy.evaluation_cost
    assert simulation.epsilon() == pytest.approx(epsilon(PrivacySpent(cost), setup.privacy.delta))


def test_an_infinite_epsilon_is_reported_and_recorded(tmp_path: Path) -> None:
    settings = {"where": "client", "clip": 0.3, "noise_multiplier": 0.0}
    record = run_experiment(
        Experiment.model_validate({"rounds": 2, "plan": {"steps": 1}, "privacy": settings})
    )
    assert record.epsilon == math.inf
    ledger = Ledger(tmp_path / "runs.jsonl")
    ledger.add(record)
    assert ledger.runs()[record.key].epsilon == math.inf
    assert "Infinity" not in json.dumps(simulate.run_json(record)).replace('"Infinity"', "")


def test_a_resumed_run_has_the_same_noise_and_epsilon(tmp_path: Path) -> None:
    setup = federation("fedfv", privacy=private(), rounds=6, codec="int8")
    uninterrupted, _ = run(setup)
    half = Simulation(setup)
    for result in half.rounds():
        if result.round == 2:
            half.done = 3
            checkpoints.save(tmp_path / "half.npz", half, {})
            break
    rest = Simulation(setup)
    assert checkpoints.restore(tmp_path / "half.npz", rest) == {}
    list(rest.rounds())
    np.testing.assert_array_equal(rest.model.parameters, uninterrupted.model.parameters)
    assert rest.epsilon() == uninterrupted.epsilon()


def test_incompatible_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match="rule 'fedfv' weights updates"):
        Experiment(rule="fedfv", privacy=private("server"))
    normed = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))
    with pytest.raises(UsageError, match=r"buffers \(1.running_mean"):
        Simulation(federation(model=lambda: normed, privacy=private()))


def test_records_of_earlier_versions_keep_their_keys_and_private_ones_have_epsilon() -> None:
    assert Experiment().key() == hashlib.sha256(b"{}").hexdigest()[:16]
    experiment = Experiment(rounds=2, privacy=private(), plan=Plan(steps=1))
    assert experiment.key() not in (
        Experiment(rounds=2, plan=Plan(steps=1)).key(),
        experiment.model_copy(update={"seed": 1}).key(),
    )
    assert (
        Experiment.model_validate_json(experiment.model_dump_json(exclude_defaults=True))
        == experiment
    )
    record = run_experiment(experiment, workers=1)
    assert record.epsilon == pytest.approx(epsilon(PrivacySpent(2 * update_cost(1.0)), 1e-5))
    plain = run_experiment(Experiment(rounds=2, plan=Plan(steps=1)), workers=1)
    assert "epsilon" not in plain.model_dump_json(exclude_defaults=True)
    assert "epsilon" not in as_json(result_rows([plain]))[0]
    both = as_json(result_rows([record, plain.model_copy(update={"setting": "plain"})]))
    assert both[0]["epsilon"] == pytest.approx(record.epsilon)
    assert both[1]["epsilon"] is None
    assert math.isfinite(both[0]["average"])


@pytest.mark.slow
@pytest.mark.parametrize(("where", "rule"), [("client", "fedlf"), ("server", "fedavg")])
def test_clipping_in_a_simulation_is_bit_identical_to_the_network(
    tmp_path: Path, where: str, rule: str
) -> None:
    """Noise is left out, because no two runs of a network have the same."""
    names, given = digits.CLIENTS[6:], UNIFORM if rule == "fedavg" else {}
    digits.write_shards(tmp_path / "data")
    task, initial = "fairfleet.lab.digits:torch_mlp", tmp_path / "initial.safetensors"
    clients = {name: {"shard": name, "data": str(tmp_path / "data")} for name in names}
    load_task(task, clients[names[0]]).initial_model().save(initial)
    settings = {
        "codec": "int8", "plan.steps": "3", "round.evaluate_every": "3", "rule.name": rule,
        "privacy.where": where, "privacy.clip": "0.2", "privacy.noise_multiplier": "0",
        **{f"rule.{key}": value for key, value in given.items()},
    }  # fmt: skip
    out = tmp_path / "out.safetensors"
    run_federation(
        LocalFederation("both", rule, tmp_path, initial, out, 3, task, clients, settings),
        display.nothing(),
    )
    shards = digits.partition(*digits.images())
    setup = Federation(
        [ClientData(name, *shards[name]) for name in names],
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, digits.CLASSES)
        ),
        recipe(rule, **given),
        Plan(steps=3),
        3,
        initial=Model.load(initial)[0],
        codec="int8",
        engine="sequential",
        workers=1,
        privacy=PrivacySettings.model_validate(
            {"where": where, "clip": 0.2, "noise_multiplier": 0.0}
        ),
    )
    simulation = Simulation(setup)
    list(simulation.rounds())
    np.testing.assert_array_equal(simulation.model.parameters, Model.load(out)[0].parameters)
