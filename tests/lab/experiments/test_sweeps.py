"""Tests of sweeps: planning, records, and resuming after an interruption."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairfleet.common.cli.settings import read_model
from fairfleet.common.errors import BadSettings, TaskFailed, UsageError
from fairfleet.lab.experiments import runner
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.experiments.federation_builder import build_federation
from fairfleet.lab.experiments.run_log import Ledger, Run
from fairfleet.lab.experiments.runner import run
from fairfleet.lab.experiments.sweep import Sweep
from fairfleet.lab.experiments.sweep_runner import RunResources, recorded_runs, run_sweep
from fairfleet.lab.reports.result_rows import result_rows
from fairfleet.lab.simulation.simulation import Simulation
from tests.support.paths import ROOT
from tests.support.samples.sweeps import SMALL, made

NO_CONSOLE = None


def make_sweep(**fields: Any) -> Sweep:
    """Return a small sweep of two rules and two seeds, with these fields replaced."""
    defaults = {"base": SMALL, "rules": ["fedavg", "fedfv,alpha=0.2"], "seeds": [0, 1]}
    return Sweep.model_validate(defaults | fields)


def test_a_sweep_is_every_rule_with_every_seed_in_every_setting() -> None:
    settings = [
        {"label": "few", "clients_per_round": 3},
        {"label": "all", "plan": {"batch_size": 8}},
    ]
    planned = list(make_sweep(settings=settings).planned())
    assert len(planned) == 8
    assert len({run.experiment.key() for run in planned}) == 8
    last = planned[-1]
    assert (last.label, last.setting, last.experiment.seed) == ("fedfv,alpha=0.2", "all", 1)
    assert (last.experiment.plan.batch_size, last.experiment.plan.steps) == (8, 2)


def test_an_invalid_experiment_is_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="did you mean 'alpha'"):
        read_model(Sweep, None, {"rules": ["fedfv,alfa=1"]})
    with pytest.raises(BadSettings, match="no such setting"):
        read_model(Experiment, None, {"roundz": 3})
    with pytest.raises(BadSettings, match="same name"):
        read_model(Sweep, None, {"rules": ["fedavg", "fedavg"]})


def test_equal_experiments_have_equal_keys_and_others_have_not() -> None:
    experiment = Experiment(rounds=5)
    assert experiment.key() == Experiment.model_validate({"rounds": 5, "seed": 0}).key()
    assert experiment.key() != Experiment(rounds=6).key()
    text = experiment.model_dump_json(exclude_defaults=True)
    assert Experiment.model_validate_json(text).key() == experiment.key()


def test_a_seed_changes_partition_model_selection_and_batches() -> None:
    first, second = (
        build_federation(
            Experiment(
                data="digits", partition="iid", clients=5, split=(0.8, 0.2), model="softmax", seed=s
            ),
            None,
        )
        for s in (0, 1)
    )
    assert not np.array_equal(first.clients[0].train_x, second.clients[0].train_x)
    assert first.plan.seed != second.plan.seed
    assert not np.array_equal(
        first.model().state_dict()["1.weight"], second.model().state_dict()["1.weight"]
    )


def test_a_recorded_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, ledger = list(make_sweep().planned()), Ledger(tmp_path / "runs.jsonl")
    first = run_sweep(planned[:3], ledger, RunResources(), NO_CONSOLE)
    started = []
    monkeypatch.setattr(
        "fairfleet.lab.experiments.sweep_runner.run",
        lambda experiment, **rest: started.append(experiment) or run(experiment, **rest),
    )
    again = run_sweep(planned, ledger, RunResources(), NO_CONSOLE)
    assert started == [planned[3].experiment]
    assert again[:3] == first
    assert [run.experiment for run in again] == [plan.experiment for plan in planned]


def test_ctrl_c_keeps_finished_rounds_and_the_sweep_can_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, ledger = list(make_sweep().planned()), Ledger(tmp_path / "runs.jsonl")
    rounds = iter(range(7))  # the first run, and three rounds of the second

    def add_round(self: runner.Recorder, result: Any) -> None:
        if next(rounds, None) is None:
            raise KeyboardInterrupt
        original(self, result)

    original = runner.Recorder.add_round
    with monkeypatch.context() as patched:
        patched.setattr(runner.Recorder, "add_round", add_round)
        with pytest.raises(KeyboardInterrupt):
            run_sweep(planned, ledger, RunResources(), NO_CONSOLE)
    recorded = recorded_runs(planned, ledger)
    assert [(run.complete, run.rounds) for run in recorded] == [(True, 4), (False, 3)]
    assert len(recorded[1].points) == 1
    assert all(run.complete for run in run_sweep(planned, ledger, RunResources(), NO_CONSOLE))
    assert len(ledger.path.read_text().splitlines()) == 5


def test_a_line_that_a_crash_cut_short_is_skipped(tmp_path: Path) -> None:
    planned, ledger = list(make_sweep().planned())[:2], Ledger(tmp_path / "runs.jsonl")
    run_sweep(planned, ledger, RunResources(), NO_CONSOLE)
    text = ledger.path.read_text()
    ledger.path.write_text(text[:-50])
    assert len(recorded_runs(planned, ledger)) == 1
    assert (
        len(run_sweep(planned, ledger, RunResources(), NO_CONSOLE))
        == len(recorded_runs(planned, ledger))
        == 2
    )
    ledger.path.write_text('{"key": 3}\n')
    with pytest.raises(UsageError, match="line 1"):
        ledger.runs()


def test_a_recorded_run_is_read_back_unchanged(tmp_path: Path) -> None:
    record = run(Experiment.model_validate(SMALL | {"behaviour": {"dropout": 0.2}}))
    ledger = Ledger(tmp_path / "deep" / "runs.jsonl")
    ledger.add(record)
    assert ledger.runs() == {record.key: record}


def test_a_diverged_run_is_recorded_as_failed_and_has_no_result(tmp_path: Path) -> None:
    diverging = make_sweep(
        base=SMALL | {"plan": {"steps": 3, "learning_rate": 1e30}, "model": "mlp:8"}, seeds=[0]
    )
    planned, ledger = list(diverging.planned()), Ledger(tmp_path / "runs.jsonl")
    runs = run_sweep(planned, ledger, RunResources(), NO_CONSOLE)
    assert all("diverged" in run.failure and run.complete for run in runs)
    assert run_sweep(planned, ledger, RunResources(), NO_CONSOLE) == runs
    row = result_rows(runs)[0]
    assert row.seeds == ()
    assert math.isnan(row.measures["average"].mean)


def test_a_signal_in_a_failing_round_ends_the_sweep_after_the_failure_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Simulation, *words: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        raise TaskFailed("it diverged")

    monkeypatch.setattr(Simulation, "_train", interrupted)
    planned, ledger = list(make_sweep().planned()), Ledger(tmp_path / "runs.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run_sweep(planned, ledger, RunResources(), NO_CONSOLE)
    assert [run.failure for run in recorded_runs(planned, ledger)] == ["it diverged"]


def test_a_line_that_was_cut_inside_a_character_is_skipped(tmp_path: Path) -> None:
    ledger, record = Ledger(tmp_path / "runs.jsonl"), made("FedFV τ=10", 0, [0.5, 0.6])
    ledger.add(record.model_copy(update={"key": "intact"}))
    ledger.add(record.model_copy(update={"key": "cut"}))
    content = ledger.path.read_bytes()
    ledger.path.write_bytes(content[: content.rindex("τ".encode()) + 1])
    assert list(ledger.runs()) == ["intact"]


@pytest.mark.parametrize("label", ["two\u2028lines", "next\x85line", "a\x0bb"])
def test_a_label_may_contain_unicode_line_separators(label: str, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "runs.jsonl")
    ledger.add(made(label, 0, [0.5, 0.6]))
    assert [run.label for run in ledger.runs().values()] == [label]


def test_an_experiment_with_two_labels_is_run_once(tmp_path: Path) -> None:
    twice = make_sweep(
        rules=[{"label": "one", "rule": "fedavg"}, {"label": "two", "rule": "fedavg"}], seeds=[0]
    )
    ledger = Ledger(tmp_path / "runs.jsonl")
    runs = run_sweep(list(twice.planned()), ledger, RunResources(), NO_CONSOLE)
    assert [run.label for run in runs] == ["one", "two"]
    assert len(ledger.path.read_text().splitlines()) == 1


def test_a_file_that_is_no_log_of_runs_is_not_written_to(tmp_path: Path) -> None:
    for content in (b"eggs\nmilk\n", b"\x89PNG\r\n\x1a\n\xff"):
        (tmp_path / "list.txt").write_bytes(content)
        with pytest.raises(UsageError, match="line 1, is not a run"):
            run_sweep(
                list(make_sweep().planned()),
                Ledger(tmp_path / "list.txt"),
                RunResources(),
                NO_CONSOLE,
            )
        assert (tmp_path / "list.txt").read_bytes() == content


def test_an_experiment_has_error_feedback_for_biased_codecs_unless_it_says_otherwise() -> None:
    feedback = {
        codec: Experiment(codec=codec).error_feedback for codec in ("raw32", "int8", "topk:0.1")
    }
    assert feedback == {"raw32": True, "int8": False, "topk:0.1": True}
    auto = Experiment.model_validate({"codec": "int8", "error_feedback": "auto"})
    assert auto.key() == Experiment(codec="int8").key()
    assert Experiment(codec="int8", error_feedback=True).key() != auto.key()


def test_a_record_of_int8_from_before_the_automatic_choice_had_error_feedback() -> None:
    """Records leave error feedback out where it is on; a new one without it says so."""
    path = ROOT / "results" / "compression-fmnist.jsonl"
    recorded_all = Ledger(path).runs().values()
    runs = [recorded for recorded in recorded_all if recorded.experiment.codec == "int8"]
    assert runs
    assert all(recorded.experiment.error_feedback for recorded in runs)
    # The meaning of other rules was revised since.
    plain = [recorded for recorded in runs if recorded.label == "fedavg"]
    assert plain
    assert all(recorded.experiment.key() == recorded.key for recorded in plain)
    without = runs[0].model_copy(update={"experiment": Experiment(codec="int8")})
    again = Run.model_validate_json(without.model_dump_json(exclude_defaults=True))
    assert not again.experiment.error_feedback
