"""Privacy in the lab: the same core, noise that a seed repeats, and records that stay comparable."""

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

from fairfleet.client import display
from fairfleet.client.task import load_task
from fairfleet.common.errors import UsageError
from fairfleet.common.plan import Plan
from fairfleet.common.tensors import Model
from fairfleet.lab import checkpoints, digits, simulating, tables
from fairfleet.lab.clients import ClientData
from fairfleet.lab.experiment import Experiment
from fairfleet.lab.federation import Federation, RoundTold
from fairfleet.lab.local import LocalFederation, run_federation
from fairfleet.lab.records import Ledger
from fairfleet.lab.runs import run as run_experiment
from fairfleet.lab.simulation import Simulation
from fairfleet.server.accounting import Draw, Spent, epsilon, report_cost, update_cost
from fairfleet.server.privacy import PrivacySettings
from fairfleet.server.rounds import Policy
from fairfleet.server.rules import recipe
from tests.lab.fleets import CLASSES, FEATURES, federation, run

UNIFORM = {"weighting": "uniform"}


def private(where: str = "client", **fields: Any) -> PrivacySettings:
    return PrivacySettings.model_validate({"where": where, "clip": 0.5, "noise_multiplier": 1.0} | fields)


def parameters(made: Federation) -> np.ndarray:
    return run(made)[0].model.parameters


@pytest.mark.parametrize("where", ["client", "server"])
@pytest.mark.parametrize("codec", ["raw32", "int8"])
def test_seeds_repeat_the_noise_and_every_round_and_client_has_its_own(where: str, codec: str) -> None:
    known = {"parameters": UNIFORM, "codec": codec, "clients_per_round": 3}
    one, again = (parameters(federation(privacy=private(where), seed=1, **known)) for _ in range(2))
    np.testing.assert_array_equal(one, again)
    quiet = private(where, noise_multiplier=0.0)
    other, still = (parameters(federation(privacy=wanted, seed=1, **known)) for wanted in (private(where), quiet))
    assert np.abs(other - still).max() > 0.05


def test_no_step_is_longer_than_the_bound() -> None:
    for where in ("client", "server"):
        for codec in ("raw32", "int8", "topk:0.2") if where == "server" else ("raw32",):
            wanted = private(where, clip=0.01, noise_multiplier=0.0)
            made = federation(privacy=wanted, rounds=1, codec=codec, parameters=UNIFORM)
            simulation = Simulation(made)
            before = simulation.model.parameters.copy()
            list(simulation.rounds())
            assert np.linalg.norm(simulation.model.parameters - before) <= 0.01 * (1 + 1e-4)


def test_epsilon_is_that_of_what_was_released() -> None:
    simulation, _ = run(federation("fedlf", privacy=private(), rounds=4))
    assert simulation.epsilon() == pytest.approx(epsilon(Spent(4 * update_cost(1.0)), 1e-5))
    noised = private(reports="noised", report_noise=2.0)
    simulation, _ = run(federation("fedlf", privacy=noised, rounds=4, evaluate_every=2))
    cost = 4 * update_cost(1.0) + 4 * report_cost(2.0, 1) + 2 * report_cost(2.0, 2)
    assert simulation.epsilon() == pytest.approx(epsilon(Spent(cost), 1e-5))
    drawn = private("server", amplification=True)
    simulation, _ = run(federation(privacy=drawn, rounds=4, clients_per_round=1, parameters=UNIFORM))
    assert simulation.epsilon() == epsilon(Spent(0.0, {Draw(0.5, 1, 5): 4}), 1e-5)
    simulation, _ = run(federation(rounds=1))
    assert simulation.epsilon() is None


def test_a_rule_is_told_the_noised_loss() -> None:
    made = federation("adafed", privacy=private(reports="noised", noise_multiplier=0.0, clip=1e9), rounds=1)
    simulation = Simulation(made)
    (told,) = list[RoundTold](simulation.rounds())
    assert told.diagnostics is not None
    reported = {client: loss for client, (_, loss) in simulation.last_reports.items()}
    assert all(0.0 <= loss <= 5.0 for loss in reported.values())
    assert len(set(reported.values())) > 1
    plain = Simulation(federation("adafed", rounds=1))
    list(plain.rounds())
    assert all(plain.last_reports[client][1] != loss for client, loss in reported.items())


@pytest.mark.parametrize(("every", "evaluations"), [(0, 0), (2, 3), (3, 2), (5, 1), (10, 1)])
def test_epsilon_counts_every_evaluation_that_a_server_would_ask_for(every: int, evaluations: int) -> None:
    simulation, _ = run(federation(privacy=private(reports="noised"), rounds=5, evaluate_every=every))
    known = simulation.federation
    assert known.privacy is not None
    policy = Policy(rounds=5, evaluate_every=every)
    assert sum(policy.evaluation_due(version, last=version == 5) for version in range(1, 6)) == evaluations
    cost = 5 * (known.privacy.released_cost(known.recipe) + known.privacy.commit_cost)
    cost += evaluations * known.privacy.evaluation_cost
    assert simulation.epsilon() == pytest.approx(epsilon(Spent(cost), known.privacy.delta))


def test_an_infinite_epsilon_is_told_as_such_and_kept(tmp_path: Path) -> None:
    settings = {"where": "client", "clip": 0.3, "noise_multiplier": 0.0}
    found = run_experiment(Experiment.model_validate({"rounds": 2, "plan": {"steps": 1}, "privacy": settings}))
    assert found.epsilon == math.inf
    ledger = Ledger(tmp_path / "runs.jsonl")
    ledger.add(found)
    assert ledger.runs()[found.key].epsilon == math.inf
    assert "Infinity" not in json.dumps(simulating.told(found)).replace('"Infinity"', "")


def test_a_run_that_is_taken_up_again_has_the_same_noise_and_epsilon(tmp_path: Path) -> None:
    made = federation("fedfv", privacy=private(), rounds=6, codec="int8")
    whole, _ = run(made)
    half = Simulation(made)
    for told in half.rounds():
        if told.round == 2:
            half.done = 3
            checkpoints.save(tmp_path / "half.npz", half, {})
            break
    rest = Simulation(made)
    assert checkpoints.restore(tmp_path / "half.npz", rest) == {}
    list(rest.rounds())
    np.testing.assert_array_equal(rest.model.parameters, whole.model.parameters)
    assert rest.epsilon() == whole.epsilon()


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValidationError, match="rule 'fedfv' weighs updates"):
        Experiment(rule="fedfv", privacy=private("server"))
    normed = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))
    with pytest.raises(UsageError, match=r"buffers \(1.running_mean"):
        Simulation(federation(model=lambda: normed, privacy=private()))


def test_records_of_earlier_versions_keep_their_keys_and_private_ones_tell_epsilon() -> None:
    assert Experiment().key() == hashlib.sha256(b"{}").hexdigest()[:16]
    one = Experiment(rounds=2, privacy=private(), plan=Plan(steps=1))
    assert one.key() not in (Experiment(rounds=2, plan=Plan(steps=1)).key(), one.model_copy(update={"seed": 1}).key())
    assert Experiment.model_validate_json(one.model_dump_json(exclude_defaults=True)) == one
    found = run_experiment(one, workers=1)
    assert found.epsilon == pytest.approx(epsilon(Spent(2 * update_cost(1.0)), 1e-5))
    plain = run_experiment(Experiment(rounds=2, plan=Plan(steps=1)), workers=1)
    assert "epsilon" not in plain.model_dump_json(exclude_defaults=True)
    assert "epsilon" not in tables.as_json(tables.rows([plain]))[0]
    both = tables.as_json(tables.rows([found, plain.model_copy(update={"setting": "plain"})]))
    assert both[0]["epsilon"] == pytest.approx(found.epsilon)
    assert both[1]["epsilon"] is None
    assert math.isfinite(both[0]["average"])


@pytest.mark.slow
@pytest.mark.parametrize(("where", "rule"), [("client", "fedlf"), ("server", "fedavg")])
def test_clipping_in_a_simulation_is_the_networks_bit_for_bit(tmp_path: Path, where: str, rule: str) -> None:
    """With the noise left out, which no two runs of a network share."""
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
    run_federation(LocalFederation("both", rule, tmp_path, initial, out, 3, task, clients, settings), display.nothing())
    shards = digits.partition(*digits.images())
    made = Federation(
        [ClientData(name, *shards[name]) for name in names],
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, digits.CLASSES)),
        recipe(rule, **given),
        Plan(steps=3),
        3,
        initial=Model.load(initial)[0],
        codec="int8",
        engine="sequential",
        workers=1,
        privacy=PrivacySettings.model_validate({"where": where, "clip": 0.2, "noise_multiplier": 0.0}),
    )
    simulation = Simulation(made)
    list(simulation.rounds())
    np.testing.assert_array_equal(simulation.model.parameters, Model.load(out)[0].parameters)
