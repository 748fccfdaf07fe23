"""Tests of sweeps over codecs: paired runs, what they record, and how they are compared."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fairfleet.common.cli.settings import read_model
from fairfleet.common.errors import BadSettings
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.experiments.federation_builder import build_federation
from fairfleet.lab.experiments.run_log import Ledger, Point, Run
from fairfleet.lab.experiments.runner import run
from fairfleet.lab.experiments.sweep import Sweep
from fairfleet.lab.experiments.sweep_runner import RunResources, recorded_runs, run_sweep
from fairfleet.lab.reports import codec_tables
from fairfleet.lab.reports.codec_comparison import codec_rows
from fairfleet.lab.simulation.compression import UpdateCoder, compare_products
from fairfleet.lab.simulation.federation import RoundResult, trainer_for
from fairfleet.lab.simulation.simulation import Simulation
from fairfleet.lab.simulation.trainer import Work
from tests.support.paths import ROOT
from tests.support.samples.sweeps import keys_of

SMALL: dict[str, Any] = {
    "rounds": 4,
    "evaluate_every": 2,
    "clients_per_round": 4,
    "plan": {"steps": 2},
}


def test_every_codec_is_run_in_every_setting() -> None:
    settings = [{"label": "few", "clients_per_round": 3}, {"label": "all"}]
    sweep = Sweep.model_validate(
        {"base": SMALL, "settings": settings, "codecs": ["raw32", "topk:0.1"], "seeds": [0]}
    )
    planned = list(sweep.planned())
    assert len(planned) == 4 * 4
    assert {(run.setting, run.experiment.codec) for run in planned} == {
        (f"{setting}, {codec}", codec)
        for setting in ("few", "all")
        for codec in ("raw32", "topk:0.1")
    }


def test_an_unknown_or_repeated_codec_is_refused_before_anything_runs() -> None:
    with pytest.raises(BadSettings, match="unknown codec int9"):
        read_model(Sweep, None, {"codecs": ["raw32", "int9"]})
    with pytest.raises(BadSettings, match="two codecs"):
        read_model(Sweep, None, {"codecs": ["int8", "int8"]})


def test_committed_records_still_load_and_keep_their_keys() -> None:
    for ledger in sorted((ROOT / "results").glob("fed*.jsonl")):
        if ledger.stem.endswith("-authors"):  # from another program, whose keys are words
            continue
        runs = Ledger(ledger).runs()
        assert runs
        assert all(key in keys_of(run) for key, run in runs.items())


@pytest.mark.parametrize("codec", ["int8", "topk:0.01", "sign"])
def test_runs_that_differ_in_their_codec_have_the_same_data_clients_and_batches(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They also share the first model, the dropouts, and how long stragglers train."""
    behaviour = {"dropout": 0.3, "stragglers": {"share": 0.5, "epochs": [1, 3]}}
    fields = SMALL | {
        "rounds": 6,
        "plan": {"epochs": 1, "batch_size": 16},
        "behaviour": behaviour,
        "seed": 3,
    }
    raw, coded = (
        observe(Experiment.model_validate(fields | {"codec": name}), monkeypatch)
        for name in ("raw32", codec)
    )
    assert raw.work == coded.work
    assert len(raw.work) == 6
    assert [result.clients for result in raw.rounds] == [result.clients for result in coded.rounds]
    assert raw.rounds[0].loss == coded.rounds[0].loss
    assert raw.rounds[-1].loss != coded.rounds[-1].loss
    samples = zip(raw.simulation.data.train.x, coded.simulation.data.train.x, strict=True)
    for raw_samples, coded_samples in samples:
        np.testing.assert_array_equal(raw_samples, coded_samples)


class ObservedSimulation:
    """A simulation and the work of every round: each client and its plan with the seed."""

    def __init__(self) -> None:
        self.work: list[list[Work]] = []
        self.rounds: list[RoundResult] = []


def observe(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a simulation and return it with everything that its trainer was given."""
    observed: Any = ObservedSimulation()

    def observed_trainer(*arguments: Any) -> Any:
        trainer = trainer_for(*arguments)
        train = trainer.train

        def record_and_train(model: Any, work: Any, *rest: Any) -> Any:
            observed.work.append(list(work))
            return train(model, work, *rest)

        monkeypatch.setattr(trainer, "train", record_and_train)
        return trainer

    monkeypatch.setattr("fairfleet.lab.simulation.simulation.trainer_for", observed_trainer)
    observed.simulation = Simulation(build_federation(experiment, None))
    observed.rounds = list(observed.simulation.rounds())
    return observed


def test_the_gram_error_is_measured_against_the_updates_as_trained() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((4, 1000)).astype(np.float32)
    coding = UpdateCoder("topk:0.1", error_feedback=True)
    # In the second round a residual is added, which is not part of what was trained.
    for _ in range(2):
        sent = rows.copy()
        loss = coding.send(list("abcd"), sent, [1, 2, 3, 4])
        truth, decoded = rows.astype(np.float64) @ rows.T, sent.astype(np.float64) @ sent.T
        assert loss is not None
        assert loss.gram_error == pytest.approx(
            np.linalg.norm(decoded - truth) / np.linalg.norm(truth), rel=1e-4
        )
        above = np.triu_indices(4, 1)
        assert loss.flipped == pytest.approx(np.mean((truth[above] < 0) != (decoded[above] < 0)))
    assert loss.update_bytes < 0.1 * 4 * 1000
    assert compare_products(np.ones((1, 1), np.float32), np.ones((1, 1), np.float32)) == (0.0, None)


def test_a_lossy_run_records_bytes_and_errors_and_an_exact_one_does_not(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "runs.jsonl")
    for codec in ("raw32", "int8", "topk:0.01"):
        ledger.add(run(Experiment.model_validate(SMALL | {"codec": codec})))
    exact, fine, coarse = ledger.runs().values()
    assert exact.parameters == 650
    assert math.isnan(exact.over_points("gram_error"))
    assert math.isnan(exact.over_points("update_bytes"))
    assert fine.over_points("update_bytes") == 650 + 4 * 3  # a scale for each block of 256
    assert 0 < fine.over_points("gram_error") < 0.05 < coarse.over_points("gram_error")
    assert fine.over_points("flipped") <= coarse.over_points("flipped")


def make_run(
    codec: str, seed: int, accuracy: list[float], rule: str = "fedavg", failure: str = ""
) -> Run:
    """Return a complete run with these final accuracies that was never trained."""
    experiment = Experiment(seed=seed, rounds=2, rule=rule, codec=codec)
    return Run(
        key=experiment.key(),
        label=rule,
        setting=codec,
        experiment=experiment,
        complete=True,
        rounds=2,
        seconds=1.0,
        training_seconds=0.5,
        accuracy=tuple(accuracy),
        parameters=100,
        failure=failure,
    )


def test_codecs_are_judged_by_the_mean_of_the_differences_seed_by_seed() -> None:
    runs = [make_run("raw32", 0, [0.5] * 10), make_run("raw32", 1, [0.9] * 10)]
    runs += [
        make_run("int8", 0, [0.49] * 10),
        make_run("int8", 1, [0.905] * 10),
        make_run("int8", 2, [0.1] * 10),
    ]  # Seed 2 has no partner.
    runs += [
        make_run("topk:0.1", 0, [0.5] * 9 + [0.3]),
        make_run("sign", 0, [0.1] * 10),
        make_run("sign", 1, [], failure="NaN"),
    ]
    raw, int8, topk, sign = codec_rows(runs)
    assert int8.seeds == (0, 1)
    assert int8.average_difference == pytest.approx((-0.25, 0.75))  # of -1 and +0.5
    assert int8.verdict == "within 0.5 / 1.5"
    assert topk.worst_difference.mean == pytest.approx(-20.0)
    assert topk.verdict == "worse than 2 / 2"
    assert math.isnan(topk.average_difference.error)
    assert sign.verdict == "1 diverged"
    assert (raw.verdict, raw.ratio, raw.round_bytes) == ("", 1.0, 4000.0)
    better = codec_rows([make_run("raw32", 0, [0.5] * 10), make_run("int8", 0, [0.6] * 10)])[1]
    assert better.verdict == "better by more than 0.5 / 1.5"


def test_the_markdown_table_has_a_line_for_every_rule_and_codec() -> None:
    runs = [
        make_run(codec, 0, [0.5] * 10, rule)
        for rule in ("fedavg", "fedlf")
        for codec in ("raw32", "int8")
    ]
    lines = list(codec_tables.markdown(codec_rows(runs)))
    assert len(lines) == 2 + 4 + 1
    assert lines[3].startswith("| fedavg | int8 | 1 |")
    assert lines[3].endswith("| within 0.5 / 1.5 |")


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_codec_table_fits_the_terminal_without_cutting_text(width: int) -> None:
    runs = [
        make_run(codec, seed, [0.5, 0.4], rule)
        for rule in ("afl", "fedlf")
        for codec in ("raw32", "int8")
        for seed in (0, 1)
    ]
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(codec_tables.table(codec_rows(runs), width))
    shown = console.export_text()
    assert "…" not in shown
    assert all(
        heading in shown
        for heading in codec_tables.HEADINGS
        if heading not in codec_tables.NOT_IN_TERMINAL
    )
    assert "within 0.5 / 1.5" in shown


def test_records_of_parts_of_a_sweep_make_its_whole_table(tmp_path: Path) -> None:
    """Run rule by rule in separate folders; the joined records give the table of the sweep."""
    fields = {
        "base": SMALL,
        "rules": ["fedavg", "fedlf"],
        "codecs": ["raw32", "int8"],
        "seeds": [0],
    }
    pieces = [Ledger(tmp_path / rule / "runs.jsonl") for rule in ("fedavg", "fedlf")]
    for ledger in pieces:
        piece = Sweep.model_validate(fields | {"rules": [ledger.path.parent.name]})
        run_sweep(list(piece.planned()), ledger, RunResources(), None)
    both = tmp_path / "both.jsonl"
    both.write_text("".join(ledger.path.read_text() for ledger in pieces))
    planned = list(Sweep.model_validate(fields).planned())
    rows = codec_rows(recorded_runs(planned, Ledger(both)))
    assert {(row.label, row.codec) for row in rows} == {
        (rule, codec) for rule in ("fedavg", "fedlf") for codec in fields["codecs"]
    }
    assert all(row.seeds == (0,) for row in rows)


@pytest.mark.parametrize("name", ["compression-fmnist", "compression-cifar10"])
def test_the_sweeps_of_the_compression_page_are_valid(name: str) -> None:
    sweep = read_model(Sweep, ROOT / "lab" / "sweeps" / f"{name}.yaml", {})
    assert sweep.name == name
    assert sweep.base["rounds"] == 300
    assert {"raw32", "int8", "topk:0.1", "topk:0.01"} <= set(sweep.codecs)


@pytest.mark.slow
def test_the_tables_of_the_compression_page_match_the_records() -> None:
    script = ROOT / "docs" / "compression_tables.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"],
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_codecs_are_also_compared_over_the_last_third_of_the_rounds() -> None:
    def point(round_number: int, mean: float) -> Point:
        named = dict.fromkeys(("deviation", "worst_5", "best_5"), 0.0)
        nothing = dict.fromkeys(("loss", "improved", "conflicts", "layer_conflicts"), None)
        return Point(round=round_number, mean=mean, worst_10=mean / 2, **named, **nothing)

    def swinging(codec: str, *means: float) -> Run:
        points = tuple(point(3 * number, mean) for number, mean in enumerate(means, start=1))
        record = make_run(codec, 0, [means[-1]] * 10)
        return record.model_copy(update={"points": points, "rounds": 18})

    raw = swinging("raw32", 0.1, 0.1, 0.1, 0.1, 0.8, 0.6)
    row = codec_rows([raw, swinging("int8", 0.9, 0.9, 0.9, 0.9, 0.6, 0.8)])[1]
    assert row.average_difference.mean == pytest.approx(20.0)
    assert row.late_average_difference.mean == pytest.approx(0.0, abs=1e-9)
    assert row.late_worst_difference.mean == pytest.approx(0.0, abs=1e-9)
    without_points = codec_rows([make_run("raw32", 0, [0.5]), make_run("int8", 0, [0.5])])[1]
    assert not math.isfinite(without_points.late_worst_difference.mean)
