"""What someone meets who uses the lab for the first time: partial plans, own data, bad places, Ctrl-C, odd wishes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fairfleet.common.errors import UsageError
from fairfleet.common.plan import Plan
from fairfleet.common.settings import read_model
from fairfleet.lab import options, runs, simulating
from fairfleet.lab.comparing import check_flags
from fairfleet.lab.experiment import Experiment, federation
from fairfleet.lab.records import Ledger, Run
from fairfleet.lab.reproducing import selected
from fairfleet.lab.reproductions import reproduction
from fairfleet.lab.reproductions.base import above
from fairfleet.lab.results_page import write_page
from fairfleet.lab.runs import run
from fairfleet.lab.sweep import Means, Planned, Sweep, run_sweep
from tests.lab.test_sweeps import SMALL, made


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
def test_a_plan_that_says_one_thing_leaves_the_others_as_they_are(
    given: dict[str, Any], epochs: int, steps: int
) -> None:
    made_of = Experiment.model_validate({"plan": given})
    assert (made_of.plan.epochs, made_of.plan.steps) == (epochs, steps)
    assert made_of.plan.model_dump(include=set(given) - {"epochs", "steps"}) == {
        name: value for name, value in given.items() if name not in ("epochs", "steps")
    }
    assert Experiment.model_validate_json(made_of.model_dump_json(exclude_defaults=True)) == made_of


def test_a_plan_from_python_without_a_length_is_one_epoch_also_when_it_is_read_again() -> None:
    one = Experiment(plan=Plan(learning_rate=0.05))
    assert one.plan.epochs == 1
    assert Experiment.model_validate_json(one.model_dump_json(exclude_defaults=True)) == one


def test_a_flag_for_the_data_leaves_the_files_model_and_split_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: mlp:32\nsplit: [0.7, 0.3]\n")
    flags = options.experiment_flags("digits", "iid", 4, None, None, None, None)
    found = read_model(Experiment, tmp_path / "mine.yaml", flags)
    assert (found.data, found.model, found.split) == ("digits", "mlp:32", (0.7, 0.3))


def test_data_without_a_published_test_part_are_split_80_to_20_unless_the_published_split_is_asked_for() -> None:
    wanted = Experiment(data="digits", partition="iid", clients=4)
    clients = federation(wanted, None).clients
    shares = [len(one.test_y) / (len(one.test_y) + len(one.train_y)) for one in clients]
    assert shares == pytest.approx([0.2] * 4, abs=0.01)
    with pytest.raises(UsageError, match="no published test part"):
        federation(wanted.model_copy(update={"split": "published"}), None)


def test_only_natural_clients_are_split_as_published_unless_it_is_asked_for(tmp_path: Path) -> None:
    labels = np.arange(90) % 3
    np.savez(tmp_path / "mine.npz", x=np.zeros((90, 2), np.float32), y=labels, user=labels, train_size=60)
    for partition, clients, tested in (("user", None, [10, 10, 10]), ("shards:1", 3, [6, 6, 6])):
        wanted = Experiment(data=str(tmp_path / "mine.npz"), partition=partition, clients=clients)
        assert [len(one.test_y) for one in federation(wanted, None).clients] == tested


def own_data(path: Path, seed: int) -> Path:
    drawn = np.random.default_rng(seed)
    np.savez(path, x=drawn.normal(size=(60, 5)).astype(np.float32), y=drawn.integers(0, 3, 60))
    return path


def test_a_run_on_ones_own_file_is_run_again_once_the_file_has_changed(tmp_path: Path) -> None:
    path, ledger = own_data(tmp_path / "mine.npz", 0), Ledger(tmp_path / "runs.jsonl")
    wanted = Experiment.model_validate(SMALL | {"data": str(path), "partition": "iid", "clients": 3})
    planned = [Planned("mine", "", wanted)]
    [first] = run_sweep(planned, ledger, Means(), None)
    assert run_sweep(planned, ledger, Means(), None) == [first]
    own_data(path, 1)
    os.utime(path, ns=(1, 1))
    [second] = run_sweep(planned, ledger, Means(), None)
    assert second.key != first.key
    assert second.losses != first.losses


def test_a_run_is_recorded_for_the_data_that_it_began_with(tmp_path: Path) -> None:
    path = own_data(tmp_path / "mine.npz", 0)
    wanted = Experiment.model_validate(SMALL | {"data": str(path), "partition": "iid", "clients": 3})
    key = wanted.key()
    found = run(wanted, progress=lambda done, planned: own_data(path, 1) and None)
    assert found.key == key != wanted.key()


def test_records_beside_ones_own_images_are_no_part_of_the_data(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for label in "ab":
        (tmp_path / label).mkdir()
        for number in range(6):
            image.new("L", (4, 4), 20 * number).save(tmp_path / label / f"{number}.png")
    wanted = Experiment.model_validate(SMALL | {"data": str(tmp_path), "partition": "iid", "clients": 2})
    planned, ledger = [Planned("mine", "", wanted)], Ledger(tmp_path / "runs.jsonl")
    [found] = run_sweep(planned, ledger, Means(), None)
    assert run_sweep(planned, ledger, Means(), None) == [found]
    image.new("L", (4, 4), 7).save(tmp_path / "a" / "more.png")
    assert wanted.key() != found.key


def test_a_model_that_cannot_take_the_data_is_refused_with_the_mend() -> None:
    with pytest.raises(UsageError, match="preprocessing=plain"):
        federation(Experiment(model="char-lstm:95", data="digits", partition="iid", clients=4), None)


def test_a_token_beyond_the_models_alphabet_is_found_before_training_wherever_it_is(tmp_path: Path) -> None:
    tokens = np.zeros((40, 8), np.int64)
    tokens[39, 7] = 5
    np.savez(tmp_path / "tokens.npz", x=tokens, y=np.arange(40) % 2)
    fields = {"data": str(tmp_path / "tokens.npz"), "partition": "iid", "clients": 4, "preprocessing": "plain"}
    assert federation(Experiment.model_validate(fields | {"model": "char-lstm:6"}), None).clients
    with pytest.raises(UsageError, match="cannot take the samples"):
        federation(Experiment.model_validate(fields | {"model": "char-lstm:5"}), None)


@pytest.mark.parametrize(("values", "said"), [([1e39, 0.0], "float32 cannot hold"), ([True, False], "x of bool")])
def test_values_that_no_model_can_take_are_named(tmp_path: Path, values: list[Any], said: str) -> None:
    np.savez(tmp_path / "odd.npz", x=np.array(values)[:, None], y=np.array([0, 1]))
    with pytest.raises(UsageError, match=said):
        federation(Experiment(data=str(tmp_path / "odd.npz"), partition="iid", clients=2), None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"data": "digits", "partition": "iid", "clients": 4, "split": [1.0, 0.0]}, "no client has test samples"),
        ({"behaviour": {"attacks": [{"kind": "sign_flip", "clients": 1}]}}, "no honest one .* is left"),
    ],
)
def test_a_run_that_nobody_could_judge_is_refused_before_it_begins(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(Experiment.model_validate(SMALL | fields))


def test_a_model_that_diverges_in_the_last_round_is_no_success() -> None:
    found = run(
        Experiment.model_validate({"rounds": 1, "plan": {"steps": 10, "learning_rate": 1e38}, "model": "mlp:8"})
    )
    assert "diverged" in found.failure


def test_a_place_where_nothing_can_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("fairfleet.lab.sweep.run", lambda *words, **named: pytest.fail("it was run"))
    planned = [Planned("fedavg", "", Experiment.model_validate(SMALL))]
    for place in (tmp_path / "file" / "runs.jsonl", tmp_path):
        with pytest.raises(UsageError, match="choose another place"):
            run_sweep(planned, Ledger(place), Means(), None)


@pytest.mark.parametrize("record", [None, "runs.jsonl"])
def test_ctrl_c_shows_the_curve_so_far_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], record: str | None
) -> None:
    original, rounds = runs.Recorder.take, iter(range(3))

    def take(self: runs.Recorder, *words: Any) -> None:
        if next(rounds, None) is None:
            raise KeyboardInterrupt
        original(self, *words)

    monkeypatch.setattr(runs.Recorder, "take", take)
    monkeypatch.setattr(options, "end_on_signals", lambda: None)  # they are the test runner's
    monkeypatch.chdir(tmp_path)
    flags = {"rounds": 9, "evaluate_every": 1, "plan": {"steps": 1}}
    with pytest.raises(KeyboardInterrupt):
        simulating.simulate(None, flags, Path(record) if record else None, None, 1, as_json=False)
    shown = capsys.readouterr().out
    assert "worst 5 %" in shown
    assert "stopped after 3 of 9 rounds" in shown
    assert ("the same command runs it" if record else "--record FILE would keep it") in shown.replace("\n", " ")


def test_a_flag_that_would_do_nothing_is_refused() -> None:
    settings = [{"label": "few", "partition": "iid", "clients": 3, "data": "digits", "plan": {"batch_size": 8}}]
    sweep = Sweep.model_validate({"base": SMALL, "rules": "fedavg", "settings": settings})
    assert [one.label for one in sweep.rules] == ["fedavg"]
    check_flags(sweep, ["rounds", "plan.learning_rate"])
    for path in ("partition", "plan.batch_size", "plan"):
        with pytest.raises(UsageError, match=f"{path} is given"):
            check_flags(sweep, [path])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"base.seed": 77}, "base: seed has no effect"),
        ({"base.rule": "fedlf", "rules": ["fedavg"]}, "base: rule has no effect"),
        ({"settings": [{"label": "a", "seed": 5}]}, "settings, 'a': seed has no effect"),
        ({"settings": [{"label": "a", "rule": "fedlf"}]}, "settings, 'a': rule has no effect"),
        ({"rules": [{"label": "b", "rule": "fedlf", "codec": "int8"}], "codecs": ["raw32"]}, "codec has no effect"),
        ({"base.codec": "int8", "codecs": ["raw32"]}, "codec has no effect"),
        ({"rules": {"fedavg": 1}}, "expected a list"),
        ({"seeds": []}, "seeds"),
        ({"settings": []}, "settings"),
        ({"name": ".."}, "name"),
        ({"rules": ["fedfv,alpha=0.1,alpha=0.9"]}, "alpha more than once"),
    ],
)
def test_a_sweep_that_says_what_cannot_be_done_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_model(Sweep, None, fields)


def test_more_seeds_than_there_are_is_told() -> None:
    one = reproduction("fedmgda-adult")
    assert {planned.experiment.seed for planned in selected(one, False, None, [], [])} == {0, 1}
    with pytest.raises(UsageError, match="has 3 seeds, not 4"):
        selected(one, False, 4, [], [])


def test_a_page_of_results_is_not_overwritten_by_one_without_any(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text("much work")
    with pytest.raises(UsageError, match="no records"):
        write_page(page, tmp_path)
    assert page.read_text() == "much work"


def test_rules_are_compared_over_the_seeds_that_both_have() -> None:
    one = reproduction("fedfv-table2")
    runs_of: list[Run] = [made("FedAvg", 0, [0.5, 0.5])]
    runs_of += [made("FedFV τ=0", seed, [accuracy] * 2) for seed, accuracy in enumerate((0.6, 0.1))]
    verdict = above("FedFV τ=0", "FedAvg", "mean")({line.name: line for line in one.lines(runs_of)})
    assert verdict is not None
    assert verdict.holds
    assert "mean +10.00 (1 seed)" in verdict.words


def test_a_split_that_cannot_be_is_refused_before_a_sweep_begins() -> None:
    for split in ([1.0], [0.5, 0.6], [0.5, float("nan")]):
        with pytest.raises(UsageError, match="add up to 1"):
            Experiment.model_validate({"split": split})
