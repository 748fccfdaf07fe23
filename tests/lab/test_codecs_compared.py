"""Sweeps over codecs: pairs that differ by their codec alone, and what is recorded and said of them."""

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

from fairfleet.common.errors import BadSettings
from fairfleet.common.settings import read_model
from fairfleet.lab import paired
from fairfleet.lab.coding import Coding, compared
from fairfleet.lab.cohort import Work
from fairfleet.lab.experiment import Experiment, federation
from fairfleet.lab.federation import RoundTold, trainer_for
from fairfleet.lab.records import Ledger, Point, Run
from fairfleet.lab.runs import run
from fairfleet.lab.simulation import Simulation
from fairfleet.lab.sweep import Means, Sweep, finished, run_sweep

HOME = Path(__file__).parents[2]
SMALL: dict[str, Any] = {"rounds": 4, "evaluate_every": 2, "clients_per_round": 4, "plan": {"steps": 2}}


def test_every_codec_is_a_part_of_every_setting() -> None:
    settings = [{"label": "few", "clients_per_round": 3}, {"label": "all"}]
    sweep = Sweep.model_validate({"base": SMALL, "settings": settings, "codecs": ["raw32", "topk:0.1"], "seeds": [0]})
    planned = list(sweep.planned())
    assert len(planned) == 4 * 4
    assert {(one.setting, one.experiment.codec) for one in planned} == {
        (f"{setting}, {codec}", codec) for setting in ("few", "all") for codec in ("raw32", "topk:0.1")
    }


def test_a_codec_that_is_none_is_refused_before_anything_runs() -> None:
    with pytest.raises(BadSettings, match="unknown codec int9"):
        read_model(Sweep, None, {"codecs": ["raw32", "int9"]})
    with pytest.raises(BadSettings, match="two codecs"):
        read_model(Sweep, None, {"codecs": ["int8", "int8"]})


def test_records_of_before_keep_their_keys_and_still_load() -> None:
    for ledger in sorted((HOME / "results").glob("fed*.jsonl")):
        if ledger.stem.endswith("-authors"):  # of another program, with keys in words
            continue
        found = Ledger(ledger).runs()
        assert found
        assert all(one.experiment.key() == key for key, one in found.items())


@pytest.mark.parametrize("codec", ["int8", "topk:0.01", "sign"])
def test_runs_that_differ_by_their_codec_have_the_same_data_clients_and_batches(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the first model, and what does not depend on later ones: who drops out, and how long stragglers train."""
    behaviour = {"dropout": 0.3, "stragglers": {"share": 0.5, "epochs": [1, 3]}}
    fields = SMALL | {"rounds": 6, "plan": {"epochs": 1, "batch_size": 16}, "behaviour": behaviour, "seed": 3}
    raw, coded = (watched(Experiment.model_validate(fields | {"codec": one}), monkeypatch) for one in ("raw32", codec))
    assert raw.work == coded.work
    assert len(raw.work) == 6
    assert [told.clients for told in raw.rounds] == [told.clients for told in coded.rounds]
    assert raw.rounds[0].loss == coded.rounds[0].loss
    assert raw.rounds[-1].loss != coded.rounds[-1].loss
    for one, other in zip(raw.simulation.data.train.x, coded.simulation.data.train.x, strict=True):
        np.testing.assert_array_equal(one, other)


class Watched:
    """A simulation, with the work of every round: client, and plan with its seed."""

    def __init__(self) -> None:
        self.work: list[list[Work]] = []
        self.rounds: list[RoundTold] = []


def watched(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> Any:
    seen: Any = Watched()

    def watching(*words: Any) -> Any:
        trainer = trainer_for(*words)
        train = trainer.train

        def noting(model: Any, work: Any, *rest: Any) -> Any:
            seen.work.append(list(work))
            return train(model, work, *rest)

        monkeypatch.setattr(trainer, "train", noting)
        return trainer

    monkeypatch.setattr("fairfleet.lab.simulation.trainer_for", watching)
    seen.simulation = Simulation(federation(experiment, None))
    seen.rounds = list(seen.simulation.rounds())
    return seen


def test_what_the_gram_matrix_loses_is_measured_against_the_updates_as_trained() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((4, 1000)).astype(np.float32)
    coding = Coding("topk:0.1", error_feedback=True)
    for _ in range(2):  # in the second round a residual goes along, which is no part of what was trained
        sent = rows.copy()
        told = coding.send(list("abcd"), sent, [1, 2, 3, 4])
        truth, decoded = rows.astype(np.float64) @ rows.T, sent.astype(np.float64) @ sent.T
        assert told is not None
        assert told.gram_error == pytest.approx(np.linalg.norm(decoded - truth) / np.linalg.norm(truth), rel=1e-4)
        above = np.triu_indices(4, 1)
        assert told.flipped == pytest.approx(np.mean((truth[above] < 0) != (decoded[above] < 0)))
    assert told.update_bytes < 0.1 * 4 * 1000
    assert compared(np.ones((1, 1), np.float32), np.ones((1, 1), np.float32)) == (0.0, None)


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


def made(codec: str, seed: int, accuracy: list[float], rule: str = "fedavg", failure: str = "") -> Run:
    experiment = Experiment(seed=seed, rounds=2, rule=rule, codec=codec)
    return Run(
        key=experiment.key(), label=rule, setting=codec, experiment=experiment, complete=True, rounds=2, seconds=1.0,
        training_seconds=0.5, accuracy=tuple(accuracy), parameters=100, failure=failure,
    )  # fmt: skip


def test_codecs_are_judged_by_the_mean_of_the_differences_seed_by_seed() -> None:
    runs = [made("raw32", 0, [0.5] * 10), made("raw32", 1, [0.9] * 10)]
    runs += [made("int8", 0, [0.49] * 10), made("int8", 1, [0.905] * 10), made("int8", 2, [0.1] * 10)]  # 2: no partner
    runs += [made("topk:0.1", 0, [0.5] * 9 + [0.3]), made("sign", 0, [0.1] * 10), made("sign", 1, [], failure="NaN")]
    raw, int8, topk, sign = paired.rows(runs)
    assert int8.seeds == (0, 1)
    assert int8.average_difference == pytest.approx((-0.25, 0.75))  # of -1 and +0.5
    assert int8.verdict == "within 0.5 / 1.5"
    assert topk.worst_difference.mean == pytest.approx(-20.0)
    assert topk.verdict == "worse than 2 / 2"
    assert math.isnan(topk.average_difference.error)
    assert sign.verdict == "1 diverged"
    assert (raw.verdict, raw.ratio, raw.round_bytes) == ("", 1.0, 4000.0)
    better = paired.rows([made("raw32", 0, [0.5] * 10), made("int8", 0, [0.6] * 10)])[1]
    assert better.verdict == "better by more than 0.5 / 1.5"


def test_the_table_has_a_line_for_every_rule_and_codec() -> None:
    runs = [made(codec, 0, [0.5] * 10, rule) for rule in ("fedavg", "fedlf") for codec in ("raw32", "int8")]
    lines = list(paired.markdown(paired.rows(runs)))
    assert len(lines) == 2 + 4 + 1
    assert lines[3].startswith("| fedavg | int8 | 1 |")
    assert lines[3].endswith("| within 0.5 / 1.5 |")


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_codecs_table_fits_the_terminal_whole(width: int) -> None:
    runs = [
        made(codec, seed, [0.5, 0.4], rule)
        for rule in ("afl", "fedlf")
        for codec in ("raw32", "int8")
        for seed in (0, 1)
    ]
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(paired.table(paired.rows(runs), width))
    shown = console.export_text()
    assert "…" not in shown
    assert all(heading in shown for heading in paired.HEADINGS if heading not in paired.ABOVE)
    assert "within 0.5 / 1.5" in shown


def test_pieces_of_a_sweep_are_the_sweep(tmp_path: Path) -> None:
    """Run rule by rule in folders of their own, their records together make the table."""
    whole = {"base": SMALL, "rules": ["fedavg", "fedlf"], "codecs": ["raw32", "int8"], "seeds": [0]}
    pieces = [Ledger(tmp_path / rule / "runs.jsonl") for rule in ("fedavg", "fedlf")]
    for ledger in pieces:
        piece = Sweep.model_validate(whole | {"rules": [ledger.path.parent.name]})
        run_sweep(list(piece.planned()), ledger, Means(), None)
    both = tmp_path / "both.jsonl"
    both.write_text("".join(ledger.path.read_text() for ledger in pieces))
    found = paired.rows(finished(list(Sweep.model_validate(whole).planned()), Ledger(both)))
    assert {(row.label, row.codec) for row in found} == {(r, c) for r in ("fedavg", "fedlf") for c in whole["codecs"]}
    assert all(row.seeds == (0,) for row in found)


@pytest.mark.parametrize("name", ["compression-fmnist", "compression-cifar10"])
def test_the_sweeps_of_the_compression_page_can_be(name: str) -> None:
    sweep = read_model(Sweep, HOME / "lab" / "sweeps" / f"{name}.yaml", {})
    assert sweep.name == name
    assert sweep.base["rounds"] == 300
    assert {"raw32", "int8", "topk:0.1", "topk:0.01"} <= set(sweep.codecs)


def test_the_tables_of_the_compression_page_are_made_from_the_records() -> None:
    script = HOME / "docs" / "compression_tables.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], text=True, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_swings_from_round_to_round_is_also_compared_over_the_last_third() -> None:
    def point(round: int, mean: float) -> Point:
        named = dict.fromkeys(("deviation", "worst_5", "best_5"), 0.0)
        nothing = dict.fromkeys(("loss", "improved", "conflicts", "layer_conflicts"), None)
        return Point(round=round, mean=mean, worst_10=mean / 2, **named, **nothing)

    def swinging(codec: str, *means: float) -> Run:
        points = tuple(point(3 * at, mean) for at, mean in enumerate(means, start=1))
        one = made(codec, 0, [means[-1]] * 10)
        return one.model_copy(update={"points": points, "rounds": 18})

    raw = swinging("raw32", 0.1, 0.1, 0.1, 0.1, 0.8, 0.6)
    row = paired.rows([raw, swinging("int8", 0.9, 0.9, 0.9, 0.9, 0.6, 0.8)])[1]
    assert row.average_difference.mean == pytest.approx(20.0)
    assert row.late_average_difference.mean == pytest.approx(0.0, abs=1e-9)
    assert row.late_worst_difference.mean == pytest.approx(0.0, abs=1e-9)
    assert not math.isfinite(
        paired.rows([made("raw32", 0, [0.5]), made("int8", 0, [0.5])])[1].late_worst_difference.mean
    )
