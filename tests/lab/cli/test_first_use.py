"""Tests of a first use of the lab: partial plans, own data, bad paths, Ctrl-C and mistakes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairfleet.common.cli.settings import read_model
from fairfleet.common.errors import UsageError
from fairfleet.common.training_plan import Plan
from fairfleet.lab.cli import options, simulate
from fairfleet.lab.cli.compare import check_flags
from fairfleet.lab.cli.reproduce import select_runs
from fairfleet.lab.experiments import runner
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.experiments.federation_builder import build_federation
from fairfleet.lab.experiments.run_log import Ledger, Run
from fairfleet.lab.experiments.runner import run
from fairfleet.lab.experiments.sweep import PlannedRun, Sweep
from fairfleet.lab.experiments.sweep_runner import RunResources, run_sweep
from fairfleet.lab.reproductions import reproduction
from fairfleet.lab.reproductions.base import above
from fairfleet.lab.reproductions.results_page import write_page
from tests.support.samples.sweeps import SMALL, made


@pytest.mark.parametrize(
    ("given", "epochs", "steps"),
    [
        ({"learning_rate": 0.1}, 0, 10),
        ({"batch_size": 0}, 0, 10),
        ({"epochs": 2}, 2, 0),
        ({"steps": 3}, 0, 3),
        ({"epochs": 0, "steps": 1}, 0, 1),
        ({"steps": 0}, 1, 0),
        ({"epochs": 0}, 1, 0),
    ],
)
def test_a_partial_plan_keeps_the_other_defaults(
    given: dict[str, Any], epochs: int, steps: int
) -> None:
    experiment = Experiment.model_validate({"plan": given})
    assert (experiment.plan.epochs, experiment.plan.steps) == (epochs, steps)
    assert experiment.plan.model_dump(include=set(given) - {"epochs", "steps"}) == {
        name: value for name, value in given.items() if name not in ("epochs", "steps")
    }
    text = experiment.model_dump_json(exclude_defaults=True)
    assert Experiment.model_validate_json(text) == experiment


def test_a_plan_from_python_without_a_length_is_one_epoch_also_after_json() -> None:
    experiment = Experiment(plan=Plan(learning_rate=0.05))
    assert experiment.plan.epochs == 1
    text = experiment.model_dump_json(exclude_defaults=True)
    assert Experiment.model_validate_json(text) == experiment


def test_a_flag_for_the_data_keeps_the_model_and_split_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: mlp:32\nsplit: [0.7, 0.3]\n")
    flags = options.experiment_flags("digits", "iid", 4, None, None, None, None)
    experiment = read_model(Experiment, tmp_path / "mine.yaml", flags)
    assert (experiment.data, experiment.model, experiment.split) == ("digits", "mlp:32", (0.7, 0.3))


def test_data_without_a_published_test_part_are_split_80_to_20() -> None:
    """An explicit request for the published split is refused."""
    experiment = Experiment(data="digits", partition="iid", clients=4)
    clients = build_federation(experiment, None).clients
    shares = [len(client.test_y) / (len(client.test_y) + len(client.train_y)) for client in clients]
    assert shares == pytest.approx([0.2] * 4, abs=0.01)
    with pytest.raises(UsageError, match="no published test part"):
        build_federation(experiment.model_copy(update={"split": "published"}), None)


def test_only_natural_clients_use_the_published_split_by_default(tmp_path: Path) -> None:
    labels = np.arange(90) % 3
    np.savez(
        tmp_path / "mine.npz", x=np.zeros((90, 2), np.float32), y=labels, user=labels, train_size=60
    )
    for partition, clients, tested in (("user", None, [10, 10, 10]), ("shards:1", 3, [6, 6, 6])):
        experiment = Experiment(
            data=str(tmp_path / "mine.npz"), partition=partition, clients=clients
        )
        assert [
            len(client.test_y) for client in build_federation(experiment, None).clients
        ] == tested


def own_data(path: Path, seed: int) -> Path:
    """Write 60 random samples with 3 classes to an .npz file."""
    drawn = np.random.default_rng(seed)
    np.savez(path, x=drawn.normal(size=(60, 5)).astype(np.float32), y=drawn.integers(0, 3, 60))
    return path


def test_a_run_on_your_own_file_is_repeated_when_the_file_has_changed(tmp_path: Path) -> None:
    path, ledger = own_data(tmp_path / "mine.npz", 0), Ledger(tmp_path / "runs.jsonl")
    experiment = Experiment.model_validate(
        SMALL | {"data": str(path), "partition": "iid", "clients": 3}
    )
    planned = [PlannedRun("mine", "", experiment)]
    [first] = run_sweep(planned, ledger, RunResources(), None)
    assert run_sweep(planned, ledger, RunResources(), None) == [first]
    own_data(path, 1)
    os.utime(path, ns=(1, 1))
    [second] = run_sweep(planned, ledger, RunResources(), None)
    assert second.key != first.key
    assert second.losses != first.losses


def test_a_run_is_recorded_under_the_key_of_the_data_it_started_with(tmp_path: Path) -> None:
    path = own_data(tmp_path / "mine.npz", 0)
    experiment = Experiment.model_validate(
        SMALL | {"data": str(path), "partition": "iid", "clients": 3}
    )
    key = experiment.key()
    record = run(experiment, progress=lambda done, planned: own_data(path, 1) and None)
    assert record.key == key != experiment.key()


def test_records_in_the_folder_of_your_own_images_are_not_part_of_the_data(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for label in "ab":
        (tmp_path / label).mkdir()
        for number in range(6):
            image.new("L", (4, 4), 20 * number).save(tmp_path / label / f"{number}.png")
    experiment = Experiment.model_validate(
        SMALL | {"data": str(tmp_path), "partition": "iid", "clients": 2}
    )
    planned, ledger = [PlannedRun("mine", "", experiment)], Ledger(tmp_path / "runs.jsonl")
    [record] = run_sweep(planned, ledger, RunResources(), None)
    assert run_sweep(planned, ledger, RunResources(), None) == [record]
    image.new("L", (4, 4), 7).save(tmp_path / "a" / "more.png")
    assert experiment.key() != record.key


def test_a_model_that_cannot_process_the_data_is_refused_with_a_remedy() -> None:
    with pytest.raises(UsageError, match="preprocessing=plain"):
        build_federation(
            Experiment(model="char-lstm:95", data="digits", partition="iid", clients=4), None
        )


def test_a_token_outside_the_models_alphabet_is_refused_before_training(
    tmp_path: Path,
) -> None:
    tokens = np.zeros((40, 8), np.int64)
    tokens[39, 7] = 5
    np.savez(tmp_path / "tokens.npz", x=tokens, y=np.arange(40) % 2)
    fields = {
        "data": str(tmp_path / "tokens.npz"),
        "partition": "iid",
        "clients": 4,
        "preprocessing": "plain",
    }
    assert build_federation(
        Experiment.model_validate(fields | {"model": "char-lstm:6"}), None
    ).clients
    with pytest.raises(UsageError, match="cannot process the samples"):
        build_federation(Experiment.model_validate(fields | {"model": "char-lstm:5"}), None)


@pytest.mark.parametrize(
    ("values", "message"), [([1e39, 0.0], "float32 cannot represent"), ([True, False], "x of bool")]
)
def test_values_that_no_model_can_process_are_refused(
    tmp_path: Path, values: list[Any], message: str
) -> None:
    np.savez(tmp_path / "odd.npz", x=np.array(values)[:, None], y=np.array([0, 1]))
    with pytest.raises(UsageError, match=message):
        build_federation(
            Experiment(data=str(tmp_path / "odd.npz"), partition="iid", clients=2), None
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"data": "digits", "partition": "iid", "clients": 4, "split": [1.0, 0.0]},
            "no client has test samples",
        ),
        (
            {"behaviour": {"attacks": [{"kind": "sign_flip", "clients": 1}]}},
            "none of the 10 clients is honest",
        ),
    ],
)
def test_a_run_without_honest_test_samples_is_refused_before_it_starts(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        run(Experiment.model_validate(SMALL | fields))


def test_a_model_that_diverges_in_the_last_round_is_a_failure() -> None:
    record = run(
        Experiment.model_validate(
            {"rounds": 1, "plan": {"steps": 10, "learning_rate": 1e38}, "model": "mlp:8"}
        )
    )
    assert "diverged" in record.failure


def test_a_log_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(
        "fairfleet.lab.experiments.sweep_runner.run",
        lambda *words, **named: pytest.fail("it was run"),
    )
    planned = [PlannedRun("fedavg", "", Experiment.model_validate(SMALL))]
    for path in (tmp_path / "file" / "runs.jsonl", tmp_path):
        with pytest.raises(UsageError, match="choose another path"):
            run_sweep(planned, Ledger(path), RunResources(), None)


@pytest.mark.parametrize("record", [None, "runs.jsonl"])
def test_ctrl_c_shows_the_curve_so_far_and_how_to_continue(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    record: str | None,
) -> None:
    original, rounds = runner.Recorder.add_round, iter(range(3))

    def add_round(self: runner.Recorder, result: Any) -> None:
        if next(rounds, None) is None:
            raise KeyboardInterrupt
        original(self, result)

    monkeypatch.setattr(runner.Recorder, "add_round", add_round)
    # The signal handlers belong to pytest.
    monkeypatch.setattr(options, "end_on_signals", lambda: None)
    monkeypatch.chdir(tmp_path)
    flags = {"rounds": 9, "evaluate_every": 1, "plan": {"steps": 1}}
    with pytest.raises(KeyboardInterrupt):
        simulate.simulate(None, flags, Path(record) if record else None, None, 1, as_json=False)
    shown = capsys.readouterr().out
    assert "worst 5 %" in shown
    assert "stopped after 3 of 9 rounds" in shown
    hint = "the same command continues it" if record else "use --record FILE"
    assert hint in " ".join(shown.split())


def test_a_flag_without_effect_is_refused() -> None:
    settings = [
        {
            "label": "few",
            "partition": "iid",
            "clients": 3,
            "data": "digits",
            "plan": {"batch_size": 8},
        }
    ]
    sweep = Sweep.model_validate({"base": SMALL, "rules": "fedavg", "settings": settings})
    assert [rule.label for rule in sweep.rules] == ["fedavg"]
    check_flags(sweep, ["rounds", "plan.learning_rate"])
    for path in ("partition", "plan.batch_size", "plan"):
        with pytest.raises(UsageError, match=f"{path} is given"):
            check_flags(sweep, [path])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base.seed": 77}, "base: seed has no effect"),
        ({"base.rule": "fedlf", "rules": ["fedavg"]}, "base: rule has no effect"),
        ({"settings": [{"label": "a", "seed": 5}]}, "settings, 'a': seed has no effect"),
        ({"settings": [{"label": "a", "rule": "fedlf"}]}, "settings, 'a': rule has no effect"),
        (
            {"rules": [{"label": "b", "rule": "fedlf", "codec": "int8"}], "codecs": ["raw32"]},
            "codec has no effect",
        ),
        ({"base.codec": "int8", "codecs": ["raw32"]}, "codec has no effect"),
        ({"rules": {"fedavg": 1}}, "expected a list"),
        ({"seeds": []}, "seeds"),
        ({"settings": []}, "settings"),
        ({"name": ".."}, "name"),
        ({"rules": ["fedfv,alpha=0.1,alpha=0.9"]}, "alpha more than once"),
    ],
)
def test_a_sweep_with_contradictory_fields_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_model(Sweep, None, fields)


def test_more_seeds_than_the_sweep_has_are_refused() -> None:
    published = reproduction("fedmgda-adult")
    assert {planned.experiment.seed for planned in select_runs(published, False, None, [], [])} == {
        0,
        1,
    }
    with pytest.raises(UsageError, match="has 3 seeds, not 4"):
        select_runs(published, False, 4, [], [])


def test_a_page_of_results_is_not_overwritten_if_there_are_no_records(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text("much work")
    with pytest.raises(UsageError, match="no records"):
        write_page(page, tmp_path)
    assert page.read_text() == "much work"


def test_rules_are_compared_over_the_seeds_that_both_have() -> None:
    published = reproduction("fedfv-table2")
    runs: list[Run] = [made("FedAvg", 0, [0.5, 0.5])]
    runs += [made("FedFV τ=0", seed, [accuracy] * 2) for seed, accuracy in enumerate((0.6, 0.1))]
    verdict = above("FedFV τ=0", "FedAvg", "mean")(
        {line.name: line for line in published.lines(runs)}
    )
    assert verdict is not None
    assert verdict.holds
    assert "mean +10.00 (1 seed)" in verdict.words


def test_an_invalid_split_is_refused_before_a_sweep_starts() -> None:
    for split in ([1.0], [0.5, 0.6], [0.5, float("nan")]):
        with pytest.raises(UsageError, match="add up to 1"):
            Experiment.model_validate({"split": split})
