"""Tests of single runs: checkpoints, signals and what a record contains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from fairfleet.lab.experiments import runner
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.experiments.federation_builder import build_federation
from fairfleet.lab.experiments.run_log import Run
from fairfleet.lab.experiments.runner import run
from fairfleet.lab.simulation import checkpoints
from fairfleet.lab.simulation.simulation import Simulation
from tests.support.samples.sweeps import SMALL


def test_attackers_do_not_count_in_fairness() -> None:
    attack = {"kind": "sign_flip", "clients": ["rotated-0", "upright-3"], "strength": 0.1}
    record = run(Experiment.model_validate(SMALL | {"behaviour": {"attacks": [attack]}}))
    assert len(record.accuracy) == 10
    assert len(record.honest) == record.fairness.clients == 8


def test_a_decay_of_the_experiment_is_that_of_its_plan() -> None:
    """Recorded experiments have it beside the plan; their keys stay."""
    beside = Experiment(learning_rate_decay=0.999)
    within = Experiment.model_validate({"plan": {"learning_rate_decay": 0.999}})
    assert within.plan.learning_rate_decay == 0.999
    assert build_federation(beside, None).plan == build_federation(within, None).plan
    assert beside.model_dump(exclude_defaults=True) == {"learning_rate_decay": 0.999}
    with pytest.raises(ValidationError, match=r"plan\.learning_rate_decay is 0\.9; give one"):
        Experiment.model_validate(
            {"learning_rate_decay": 0.999, "plan": {"learning_rate_decay": 0.9}}
        )


@pytest.mark.parametrize(
    "rule", ["fedfv,tau=3", "fedlf", "adafedadam", "afl,lr_lambda=0.5", "fedfa,gamma=0.5", "ditto"]
)
def test_a_killed_run_resumes_from_its_checkpoint_to_the_same_bits(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {
        "rounds": 12,
        "evaluate_every": 3,
        "plan": {"steps": 2},
        "clients_per_round": 3,
        "judged": "average",
    }
    fields |= {"codec": "int8", "selection": "power_of_choice"}
    experiment = Experiment.model_validate(fields | {"rule": rule})
    checkpoint = tmp_path / "run.npz"
    simulations: list[Simulation] = []
    monkeypatch.setattr(
        runner,
        "Simulation",
        lambda federation: simulations.append(Simulation(federation)) or simulations[-1],
    )
    expected = run(experiment)
    monkeypatch.setattr(runner, "CHECKPOINT_SECONDS", -1.0)

    def stop(done: int, planned: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment, progress=stop, checkpoint=checkpoint)
    assert checkpoint.exists()
    rounds_done: list[int] = []
    resumed = run(
        experiment,
        progress=lambda done, planned: rounds_done.append(done),
        checkpoint=checkpoint,
    )
    assert rounds_done[0] == 9  # It stopped after round 8, between two evaluations.
    assert resumed.accuracy == expected.accuracy
    assert resumed.losses == expected.losses
    assert resumed.personal == expected.personal
    assert resumed.points == expected.points
    np.testing.assert_array_equal(simulations[-1].model.parameters, simulations[0].model.parameters)
    assert not checkpoint.exists()


@pytest.mark.parametrize(
    "damage", ["no archive", "no watched losses", "no buffers", "unknown compression method"]
)
def test_an_unreadable_checkpoint_is_ignored_and_changes_nothing(
    tmp_path: Path, damage: str
) -> None:
    experiment, broken = Experiment.model_validate(SMALL), tmp_path / "run.npz"
    simulation = Simulation(build_federation(experiment, None))
    next(rounds := simulation.rounds())
    checkpoints.save(broken, simulation, {"run": "{}", "since": "{}"})
    rounds.close()
    with np.load(broken) as file:
        arrays = dict(file)
    if damage == "no archive":
        broken.write_bytes(b"PK\x03\x04 not what it seems")
    elif damage == "no watched losses":
        facts = json.loads(str(arrays.pop("facts")))
        np.savez(
            broken,
            facts=np.array(json.dumps({key: facts[key] for key in facts if key != "watched"})),
            **arrays,
        )
    elif damage == "no buffers":
        np.savez(broken, **{name: array for name, array in arrays.items() if name != "buffers"})
    else:
        content = bytearray(broken.read_bytes())
        content[content.index(b"PK\x01\x02") + 10] = 99
        broken.write_bytes(content)
    fresh = Simulation(build_federation(experiment, None))
    before = fresh.model.parameters.copy()
    assert checkpoints.restore(broken, fresh) is None
    np.testing.assert_array_equal(fresh.model.parameters, before)
    assert run(experiment, checkpoint=broken).complete


def test_a_run_that_cannot_be_recorded_keeps_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "CHECKPOINT_SECONDS", -1.0)

    def fail_to_write(record: Run) -> None:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        run(Experiment.model_validate(SMALL), checkpoint=tmp_path / "run.npz", keep=fail_to_write)
    assert (tmp_path / "run.npz").exists()


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_first_signal_waits_for_the_end_of_the_round_and_a_second_does_not(
    signals: int, tmp_path: Path
) -> None:
    """Send a real Ctrl-C to a real process; the first one leaves a checkpoint for the next run."""
    program = f"""if True:
        import os, signal
        from pathlib import Path
        from fairfleet.lab.experiments import runner
        from fairfleet.lab.experiments.experiment import Experiment
        train, rounds = runner.Simulation._train, []
        def interrupted(self, *words):
            rounds.append(self.done)
            for _ in range({signals} if self.done == 5 and rounds[0] == 0 else 0):
                os.kill(os.getpid(), signal.SIGINT)
            return train(self, *words)
        runner.Simulation._train = interrupted
        experiment = Experiment.model_validate({{"rounds": 9, "plan": {{"steps": 1}}}})
        try:
            runner.run(experiment, checkpoint=Path("run.npz"))
        finally:
            print(rounds)
    """
    command = [sys.executable, "-c", program]
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "KeyboardInterrupt" in first.stderr
    assert "stopping after this round" in first.stderr
    assert first.stdout.strip() == "[0, 1, 2, 3, 4, 5]"
    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    if signals == 1:
        assert second.stdout.strip() == "[6, 7, 8]"
    else:  # A checkpoint is impossible in the middle of a round.
        assert not (tmp_path / "run.npz").exists()
