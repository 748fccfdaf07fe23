"""Records, resuming, tables and reports of comparisons."""

from __future__ import annotations

import io
import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fairfleet.common.errors import BadSettings, TaskFailed, UsageError
from fairfleet.common.settings import read_model
from fairfleet.lab import checkpoints, figures, plots, records, report, runs, tables
from fairfleet.lab.experiment import Experiment, federation
from fairfleet.lab.records import Ledger, Run
from fairfleet.lab.runs import run
from fairfleet.lab.simulation import Simulation
from fairfleet.lab.sweep import Means, Sweep, finished, run_sweep

SMALL: dict[str, Any] = {"rounds": 4, "evaluate_every": 2, "plan": {"steps": 2}}
NOBODY = None  # looks on


def sweep(**fields: Any) -> Sweep:
    known = {"base": SMALL, "rules": ["fedavg", "fedfv,alpha=0.2"], "seeds": [0, 1]}
    return Sweep.model_validate(known | fields)


def test_a_sweep_is_every_rule_with_every_seed_in_every_setting() -> None:
    settings = [{"label": "few", "clients_per_round": 3}, {"label": "all", "plan": {"batch_size": 8}}]
    planned = list(sweep(settings=settings).planned())
    assert len(planned) == 8
    assert len({one.experiment.key() for one in planned}) == 8
    last = planned[-1]
    assert (last.label, last.setting, last.experiment.seed) == ("fedfv,alpha=0.2", "all", 1)
    assert (last.experiment.plan.batch_size, last.experiment.plan.steps) == (8, 2)


def test_an_experiment_that_cannot_be_is_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="did you mean 'alpha'"):
        read_model(Sweep, None, {"rules": ["fedfv,alfa=1"]})
    with pytest.raises(BadSettings, match="no such setting"):
        read_model(Experiment, None, {"roundz": 3})
    with pytest.raises(BadSettings, match="same name"):
        read_model(Sweep, None, {"rules": ["fedavg", "fedavg"]})


def test_the_key_tells_experiments_apart_and_nothing_else() -> None:
    one = Experiment(rounds=5)
    assert one.key() == Experiment.model_validate({"rounds": 5, "seed": 0}).key()
    assert one.key() != Experiment(rounds=6).key()
    assert one.key() == Experiment.model_validate_json(one.model_dump_json(exclude_defaults=True)).key()


def test_a_seed_changes_partition_model_selection_and_batches() -> None:
    makes = [
        federation(
            Experiment(data="digits", partition="iid", clients=5, split=(0.8, 0.2), model="softmax", seed=s), None
        )
        for s in (0, 1)
    ]
    first, second = makes
    assert not np.array_equal(first.clients[0].train_x, second.clients[0].train_x)
    assert first.plan.seed != second.plan.seed
    assert not np.array_equal(first.model().state_dict()["1.weight"], second.model().state_dict()["1.weight"])


def test_what_was_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, ledger = list(sweep().planned()), Ledger(tmp_path / "runs.jsonl")
    first = run_sweep(planned[:3], ledger, Means(), NOBODY)
    started = []
    monkeypatch.setattr(
        "fairfleet.lab.sweep.run", lambda experiment, **rest: started.append(experiment) or run(experiment, **rest)
    )
    again = run_sweep(planned, ledger, Means(), NOBODY)
    assert started == [planned[3].experiment]
    assert again[:3] == first
    assert [one.experiment for one in again] == [one.experiment for one in planned]


def test_ctrl_c_keeps_what_was_done_and_the_sweep_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, ledger = list(sweep().planned()), Ledger(tmp_path / "runs.jsonl")
    rounds = iter(range(7))  # the first run, and three rounds of the second

    def take(self: runs.Recorder, *words: Any) -> None:
        if next(rounds, None) is None:
            raise KeyboardInterrupt
        original(self, *words)

    original = runs.Recorder.take
    with monkeypatch.context() as patched:
        patched.setattr(runs.Recorder, "take", take)
        with pytest.raises(KeyboardInterrupt):
            run_sweep(planned, ledger, Means(), NOBODY)
    kept = finished(planned, ledger)
    assert [(one.complete, one.rounds) for one in kept] == [(True, 4), (False, 3)]
    assert len(kept[1].points) == 1
    assert all(one.complete for one in run_sweep(planned, ledger, Means(), NOBODY))
    assert len(ledger.path.read_text().splitlines()) == 5


def test_a_line_that_was_cut_short_by_a_crash_is_passed_over(tmp_path: Path) -> None:
    planned, ledger = list(sweep().planned())[:2], Ledger(tmp_path / "runs.jsonl")
    run_sweep(planned, ledger, Means(), NOBODY)
    text = ledger.path.read_text()
    ledger.path.write_text(text[:-50])
    assert len(finished(planned, ledger)) == 1
    assert len(run_sweep(planned, ledger, Means(), NOBODY)) == len(finished(planned, ledger)) == 2
    ledger.path.write_text('{"key": 3}\n')
    with pytest.raises(UsageError, match="line 1"):
        ledger.runs()


def test_a_record_gives_back_the_run(tmp_path: Path) -> None:
    found = run(Experiment.model_validate(SMALL | {"behaviour": {"dropout": 0.2}}))
    ledger = Ledger(tmp_path / "deep" / "runs.jsonl")
    ledger.add(found)
    assert ledger.runs() == {found.key: found}


def test_a_run_that_diverges_is_recorded_as_such_and_not_repeated(tmp_path: Path) -> None:
    wild = sweep(base=SMALL | {"plan": {"steps": 3, "learning_rate": 1e30}, "model": "mlp:8"}, seeds=[0])
    planned, ledger = list(wild.planned()), Ledger(tmp_path / "runs.jsonl")
    found = run_sweep(planned, ledger, Means(), NOBODY)
    assert all("diverged" in one.failure and one.complete for one in found)
    row = tables.rows(found)[0]
    assert row.seeds == ()
    assert math.isnan(row.measures["average"].mean)


def test_attackers_do_not_count_among_those_to_be_served_well() -> None:
    attack = {"kind": "sign_flip", "clients": ["rotated-0", "upright-3"], "strength": 0.1}
    found = run(Experiment.model_validate(SMALL | {"behaviour": {"attacks": [attack]}}))
    assert len(found.accuracy) == 10
    assert len(found.honest) == found.fairness.clients == 8


def made(label: str, seed: int, accuracy: list[float], setting: str = "") -> Run:
    points = [
        records.Point(round=k, mean=0.1 * k, deviation=0.1, worst_5=0.05 * k, best_5=0.9, loss=1.0, improved=0.5,
                   conflicts=0.2, layer_conflicts=None)
        for k in (1, 2)
    ]  # fmt: skip
    experiment = Experiment(seed=seed, rounds=2)
    return Run(
        key=f"{label}{seed}", label=label, setting=setting, experiment=experiment, complete=True, rounds=2, seconds=1.0,
        training_seconds=0.5, accuracy=tuple(accuracy), losses=(1.0,), points=tuple(points),
    )  # fmt: skip


RUNS = [made("a", 0, [0.2, 0.4]), made("a", 1, [0.4, 0.6]), made("b", 0, [0.5, 0.5]), made("c", 0, [0.1, 0.9])]


def test_a_table_gives_mean_and_deviation_over_the_seeds() -> None:
    first = tables.rows(RUNS)[0]
    assert first.seeds == (0, 1)
    assert first.measures["average"] == pytest.approx((40.0, math.sqrt(200.0)))
    assert first.measures["worst_5"].mean == pytest.approx(30.0)
    assert first.measures["improved"].mean == 0.5
    line = tables.as_json([first])[0]
    assert line["average"] == pytest.approx(40.0)
    assert tables.as_csv([first]).splitlines()[0].startswith("setting,rule,seeds,seconds,failures,average,")


def test_the_pareto_front_is_made_of_those_that_none_beats_in_both() -> None:
    dots = {dot.label: dot for dot in figures.dots(RUNS)}
    assert [dot.label for dot in figures.pareto(list(dots.values()))] == ["b"]
    assert (dots["c"].average, dots["c"].worst) == pytest.approx((50.0, 10.0))
    equal = figures.dots([made("one", 0, [0.5, 0.5]), made("other", 0, [0.5, 0.5]), made("less", 0, [0.5, 0.4])])
    assert {dot.label for dot in figures.pareto(equal)} == {"one", "other"}


def test_the_report_holds_everything_and_fetches_nothing() -> None:
    page = report.page("a <b>", [*RUNS, made("a", 0, [0.1, 0.2], "other")])
    assert page.count("plotly-graph-div") == 12
    assert "<h2>other</h2>" in page
    assert "a &lt;b&gt;" in page
    own = page[: page.index("<script>")] + page[page.index("</script>") :]
    assert 'src="http' not in own
    assert "link rel" not in own


def test_pictures_are_png_files_for_each_setting(tmp_path: Path) -> None:
    written = plots.draw([*RUNS, made("a", 0, [0.1, 0.2], "Dir(0.1)")], tmp_path / "images", "mine")
    assert {path.name for path in written} >= {"mine-mean.png", "mine-pareto.png", "mine-dir-0-1-clients.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_lines_are_drawn_over_the_rounds_that_all_seeds_have() -> None:
    line = figures.lines(RUNS, "mean", 100.0)[0]
    assert (line.rounds, line.middle) == ([1, 2], pytest.approx([10.0, 20.0]))
    assert figures.lines(RUNS, "layer_conflicts") == []
    early = made("a", 2, []).model_copy(update={"points": (), "failure": "diverged"})  # before its first evaluation
    assert figures.lines([*RUNS, early], "mean", 100.0)[0] == line
    assert json.dumps(line.rounds)


@pytest.mark.parametrize(
    "rule", ["fedfv,tau=3", "fedlf", "adafedadam", "afl,lr_lambda=0.5", "fedfa,gamma=0.5", "ditto"]
)
def test_a_run_that_was_killed_goes_on_from_its_checkpoint_to_the_same_bits(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"rounds": 12, "evaluate_every": 3, "plan": {"steps": 2}, "clients_per_round": 3, "judged": "average"}
    fields |= {"codec": "int8", "selection": "power_of_choice"}
    experiment, whole = Experiment.model_validate(fields | {"rule": rule}), tmp_path / "run.npz"
    simulations: list[Simulation] = []
    monkeypatch.setattr(runs, "Simulation", lambda made: simulations.append(Simulation(made)) or simulations[-1])
    expected = run(experiment)
    monkeypatch.setattr(runs, "CHECKPOINT_SECONDS", -1.0)

    def stop(done: int, planned: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment, progress=stop, checkpoint=whole)
    assert whole.exists()
    began = []
    found = run(experiment, progress=lambda done, planned: began.append(done), checkpoint=whole)
    assert began[0] == 9  # the eighth was done, and between two evaluations
    assert found.accuracy == expected.accuracy
    assert found.losses == expected.losses
    assert found.personal == expected.personal
    assert found.points == expected.points
    np.testing.assert_array_equal(simulations[-1].model.parameters, simulations[0].model.parameters)
    assert not whole.exists()


@pytest.mark.parametrize("damage", ["no archive", "no watched losses", "no buffers", "a strange method of packing"])
def test_a_checkpoint_that_cannot_be_read_is_no_checkpoint_and_leaves_nothing_behind(
    tmp_path: Path, damage: str
) -> None:
    experiment, broken = Experiment.model_validate(SMALL), tmp_path / "run.npz"
    simulation = Simulation(federation(experiment, None))
    next(rounds := simulation.rounds())
    checkpoints.save(broken, simulation, {"run": "{}", "since": "{}"})
    rounds.close()
    with np.load(broken) as file:
        arrays = dict(file)
    if damage == "no archive":
        broken.write_bytes(b"PK\x03\x04 not what it seems")
    elif damage == "no watched losses":
        facts = json.loads(str(arrays.pop("facts")))
        np.savez(broken, facts=np.array(json.dumps({key: facts[key] for key in facts if key != "watched"})), **arrays)
    elif damage == "no buffers":
        np.savez(broken, **{name: array for name, array in arrays.items() if name != "buffers"})
    else:
        content = bytearray(broken.read_bytes())
        content[content.index(b"PK\x01\x02") + 10] = 99
        broken.write_bytes(content)
    fresh = Simulation(federation(experiment, None))
    before = fresh.model.parameters.copy()
    assert checkpoints.restore(broken, fresh) is None
    np.testing.assert_array_equal(fresh.model.parameters, before)
    assert run(experiment, checkpoint=broken).complete


def test_a_run_that_cannot_be_recorded_keeps_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "CHECKPOINT_SECONDS", -1.0)

    def full(found: Run) -> None:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        run(Experiment.model_validate(SMALL), checkpoint=tmp_path / "run.npz", keep=full)
    assert (tmp_path / "run.npz").exists()


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_is_put_off_until_the_round_is_over_and_a_second_one_is_not(signals: int, tmp_path: Path) -> None:
    """A real Ctrl-C in a real process; the first leaves a checkpoint, from which the same command goes on."""
    program = f"""if True:
        import os, signal
        from pathlib import Path
        from fairfleet.lab import runs
        from fairfleet.lab.experiment import Experiment
        train, rounds = runs.Simulation._train, []
        def interrupted(self, *words):
            rounds.append(self.done)
            for _ in range({signals} if self.done == 5 and rounds[0] == 0 else 0):
                os.kill(os.getpid(), signal.SIGINT)
            return train(self, *words)
        runs.Simulation._train = interrupted
        experiment = Experiment.model_validate({{"rounds": 9, "plan": {{"steps": 1}}}})
        try:
            runs.run(experiment, checkpoint=Path("run.npz"))
        finally:
            print(rounds)
    """
    words = [sys.executable, "-c", program]
    first = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "KeyboardInterrupt" in first.stderr
    assert "stopping after this round" in first.stderr
    assert first.stdout.strip() == "[0, 1, 2, 3, 4, 5]"
    second = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    if signals == 1:
        assert second.stdout.strip() == "[6, 7, 8]"
    else:  # in the middle of a round there is nothing to keep
        assert not (tmp_path / "run.npz").exists()


def test_a_signal_in_a_round_that_fails_ends_the_sweep_after_the_failure_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Simulation, *words: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        raise TaskFailed("it diverged")

    monkeypatch.setattr(Simulation, "_train", interrupted)
    planned, ledger = list(sweep().planned()), Ledger(tmp_path / "runs.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run_sweep(planned, ledger, Means(), NOBODY)
    assert [one.failure for one in finished(planned, ledger)] == ["it diverged"]


def test_a_line_that_was_cut_inside_a_character_is_passed_over(tmp_path: Path) -> None:
    ledger, found = Ledger(tmp_path / "runs.jsonl"), made("FedFV τ=10", 0, [0.5, 0.6])
    ledger.add(found.model_copy(update={"key": "whole"}))
    ledger.add(found.model_copy(update={"key": "cut"}))
    content = ledger.path.read_bytes()
    ledger.path.write_bytes(content[: content.rindex("τ".encode()) + 1])
    assert list(ledger.runs()) == ["whole"]


@pytest.mark.parametrize("label", ["two\u2028lines", "next\x85line", "a\x0bb"])
def test_a_label_may_hold_what_some_take_for_the_end_of_a_line(label: str, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "runs.jsonl")
    ledger.add(made(label, 0, [0.5, 0.6]))
    assert [one.label for one in ledger.runs().values()] == [label]


def test_an_experiment_with_two_names_is_run_once(tmp_path: Path) -> None:
    twice = sweep(rules=[{"label": "one", "rule": "fedavg"}, {"label": "two", "rule": "fedavg"}], seeds=[0])
    ledger = Ledger(tmp_path / "runs.jsonl")
    found = run_sweep(list(twice.planned()), ledger, Means(), NOBODY)
    assert [one.label for one in found] == ["one", "two"]
    assert len(ledger.path.read_text().splitlines()) == 1


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_table_fits_the_terminal_whole(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    lost = [made("lost", seed, []).model_copy(update={"failure": "diverged"} if seed else {}) for seed in range(11)]
    long = made("a rule of many words", 0, [0.1, 0.2], "other")
    console.print(tables.table(tables.rows([*RUNS, *lost, long]), width))
    shown = console.export_text()
    assert "…" not in shown
    assert all(shown.count(measure.heading) >= 2 for measure in tables.MEASURES)


def test_a_short_name_takes_as_much_room_as_its_heading() -> None:
    for width in range(60, 140):
        console = Console(width=width, file=io.StringIO(), record=True)
        console.print(tables.table(tables.rows(RUNS), width))
        assert "…" not in console.export_text()


def test_seeds_that_failed_are_told_beside_a_mean_of_those_that_are_left() -> None:
    failed = [made("a", seed, [0.1, 0.1]).model_copy(update={"failure": "it diverged"}) for seed in (2, 3)]
    row = tables.rows([*RUNS, *failed])[0]
    assert row.seeds_words == "2 of 4"
    assert tables.failures([*RUNS, *failed]) == ["a, seed 2: it diverged", "a, seed 3: it diverged"]
    page = report.page("mine", [*RUNS, *failed])
    assert "2 of 4" in page
    assert "failed: a, seed 3: it diverged" in page


def test_one_seed_has_no_spread() -> None:
    assert tables.as_json(tables.rows(RUNS))[1]["average_over_seeds"] is None
    assert tables.spread([math.nan, 1.0, math.nan]).words(2) == "1.00"
    assert tables.spread([1.0, 1.0]).words(2) == "1.00 ± 0.00"


def test_a_file_of_another_kind_is_not_written_to(tmp_path: Path) -> None:
    for content in (b"eggs\nmilk\n", b"\x89PNG\r\n\x1a\n\xff"):
        (tmp_path / "list.txt").write_bytes(content)
        with pytest.raises(UsageError, match="line 1, is not a run"):
            run_sweep(list(sweep().planned()), Ledger(tmp_path / "list.txt"), Means(), NOBODY)
        assert (tmp_path / "list.txt").read_bytes() == content


def test_settings_and_rules_of_any_name_are_drawn(tmp_path: Path) -> None:
    """Formulas that are none, names that differ in marks alone, and one that matplotlib would leave out."""
    labels = [(r"$\nope$", "lr+1"), ("_mine", "lr-1"), ("plain", r"$\q$"), ("plain", "!!")]
    drawn = [made(label, seed, [0.2, 0.4], setting) for label, setting in labels for seed in (0, 1)]
    written = plots.draw(drawn, tmp_path, "mine")
    assert len(set(written)) == len(list(tmp_path.iterdir())) == 4 * len(plots.KINDS)
    axes = plots.plt.figure().add_subplot()
    plots.curve(axes, drawn[2:4], "mean", "")
    assert [text.get_text().strip() for text in axes.get_legend().get_texts()] == ["_mine"]
