"""Admission in the lab: the demo's minority is left alone, attackers are not, and simulations are those of before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fairfleet.lab import checkpoints
from fairfleet.lab.experiment import Experiment, federation
from fairfleet.lab.records import Ledger
from fairfleet.lab.runs import run
from fairfleet.lab.simulation import Simulation
from fairfleet.server.admission import Admission

RECOMMENDED = Admission(norm="clip", loss="winsorise", samples="cap")
STRICT = Admission(norm="reject", loss="reject", samples="cap")
RULES = ["fedavg", "fedfv", "fedlf", "adafed", "qfedavg", "afl", "term", "fedmgda_plus"]
LIAR = {"attacks": [{"kind": "loss_scaling", "clients": ["upright-0"], "strength": 10}]}
RESULTS = Path(__file__).resolve().parents[2] / "results"


@pytest.mark.parametrize("rule", RULES)
def test_the_demos_two_turned_clients_are_neither_clipped_nor_winsorised_nor_rejected(rule: str) -> None:
    """Nor is anybody else; and since strict settings draw the same limits, they would not be rejected either."""
    experiment = Experiment(rule=rule, rounds=100, evaluate_every=100, admission=RECOMMENDED)
    simulation = Simulation(federation(experiment, None, workers=1))
    told = list(simulation.rounds())
    assert len(told) == 100
    assert [one for round in told for one in round.findings] == []


def test_an_attacker_is_found_in_every_round_and_counted_apart_from_honest_clients() -> None:
    found = {}
    for admission in (Admission(), RECOMMENDED, STRICT):
        told = run(Experiment(rule="afl", rounds=20, behaviour=LIAR, admission=admission), workers=1)
        found[admission.loss] = told.admission
    assert found["winsorise"] == {"loss winsorised": (0, 20)}
    assert found["reject"] == {"loss rejected": (0, 20)}
    honest, lies = found["observe"].pop("loss observed")
    assert found["observe"] == {}
    assert honest == 0 < lies < 20  # it steers: once the model is its own, ten times its loss is no longer unheard of


def test_a_run_that_was_taken_up_again_judges_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    behaviour = {"attacks": [{"kind": "loss_scaling", "clients": ["upright-0"], "strength": 10, "since_round": 5}]}
    made = federation(Experiment(rule="term", rounds=10, behaviour=behaviour, admission=RECOMMENDED), None, workers=1)
    whole, first, second = Simulation(made), Simulation(made), Simulation(made)
    expected = [told.findings for told in whole.rounds()]
    rounds = first.rounds()
    before = [next(rounds).findings for _ in range(6)]
    checkpoints.save(tmp_path / "one.npz", first, {"run": "told"})
    assert checkpoints.restore(tmp_path / "one.npz", second) == {"run": "told"}
    assert before + [told.findings for told in second.rounds()] == expected
    assert sum(map(len, expected)) == 5
    np.testing.assert_array_equal(second.model.parameters, whole.model.parameters)


def test_experiments_that_were_recorded_before_there_was_admission_keep_their_keys() -> None:
    for name in ("fedfv-table2", "fedfv-table3"):
        runs = Ledger(RESULTS / f"{name}.jsonl").runs()
        assert runs
        assert all(key == one.experiment.key() for key, one in runs.items())
    assert Experiment().key() == Experiment(admission=Admission()).key() != Experiment(admission=RECOMMENDED).key()
