"""Admission in the lab: the demo's minority is not judged unusual, attackers are.

Simulations without admission are unchanged.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.experiments.federation_builder import build_federation
from fairfleet.lab.experiments.run_log import Ledger
from fairfleet.lab.experiments.runner import run
from fairfleet.lab.simulation import checkpoints
from fairfleet.lab.simulation.simulation import Simulation
from fairfleet.server.aggregation.admission import AdmissionSettings
from tests.support.paths import ROOT
from tests.support.samples.sweeps import keys_of

pytestmark = pytest.mark.slow

RECOMMENDED = AdmissionSettings(norm="clip", loss="winsorise", samples="cap")
STRICT = AdmissionSettings(norm="reject", loss="reject", samples="cap")
RULES = ["fedavg", "fedfv", "fedlf", "adafed", "qfedavg", "afl", "term", "fedmgda_plus"]
LIAR = {"attacks": [{"kind": "loss_scaling", "clients": ["upright-0"], "strength": 10}]}
RESULTS = ROOT / "results"


@pytest.mark.parametrize("rule", RULES)
def test_the_rotated_clients_of_the_demo_are_not_judged_unusual(
    rule: str,
) -> None:
    """No other client is either. Strict settings have the same limits and would reject none."""
    experiment = Experiment(rule=rule, rounds=100, evaluate_every=100, admission=RECOMMENDED)
    simulation = Simulation(build_federation(experiment, None, workers=1))
    results = list(simulation.rounds())
    assert len(results) == 100
    assert [finding for round_number in results for finding in round_number.findings] == []


def test_an_attacker_is_found_in_every_round_and_counted_separately() -> None:
    records = {}
    for admission in (AdmissionSettings(), RECOMMENDED, STRICT):
        run_record = run(
            Experiment(rule="afl", rounds=20, behaviour=LIAR, admission=admission), workers=1
        )
        records[admission.loss] = run_record.admission
    assert records["winsorise"] == {"loss winsorised": (0, 20)}
    assert records["reject"] == {"loss rejected": (0, 20)}
    honest, lies = records["observe"].pop("loss observed")
    assert records["observe"] == {}
    assert (
        honest == 0 < lies < 20
    )  # it controls the model: then ten times its loss is no longer unusual


def test_a_resumed_run_judges_like_an_uninterrupted_one(tmp_path: Path) -> None:
    behaviour = {
        "attacks": [
            {"kind": "loss_scaling", "clients": ["upright-0"], "strength": 10, "since_round": 5}
        ]
    }
    setup = build_federation(
        Experiment(rule="term", rounds=10, behaviour=behaviour, admission=RECOMMENDED),
        None,
        workers=1,
    )
    uninterrupted, first, second = Simulation(setup), Simulation(setup), Simulation(setup)
    expected = [result.findings for result in uninterrupted.rounds()]
    rounds = first.rounds()
    before = [next(rounds).findings for _ in range(6)]
    checkpoints.save(tmp_path / "one.npz", first, {"run": "told"})
    assert checkpoints.restore(tmp_path / "one.npz", second) == {"run": "told"}
    assert before + [result.findings for result in second.rounds()] == expected
    assert sum(map(len, expected)) == 5
    np.testing.assert_array_equal(second.model.parameters, uninterrupted.model.parameters)


def test_experiments_recorded_before_admission_keep_their_keys() -> None:
    for name in ("fedfv-table2", "fedfv-table3"):
        runs = Ledger(RESULTS / f"{name}.jsonl").runs()
        assert runs
        assert all(key in keys_of(recorded_run) for key, recorded_run in runs.items())
    assert (
        Experiment().key()
        == Experiment(admission=AdmissionSettings()).key()
        != Experiment(admission=RECOMMENDED).key()
    )
