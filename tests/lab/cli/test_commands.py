"""Tests of `fairfleet simulate`, `compare` and `reproduce` by the program's entry point."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fairfleet.lab.cli import options
from fairfleet.lab.experiments.experiment import Experiment
from tests.support.fleet import PROGRAM, until
from tests.support.paths import ROOT
from tests.support.program import run_in_process

INTERRUPTED = 130
RESULTS = ROOT / "results"
SHORT = ("--rounds", "3", "--set", "plan.steps=2", "--set", "evaluate_every=1")


def fairfleet(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the program in a folder, with a plain terminal of 100 columns."""
    return run_in_process(*words, folder=folder)


def test_the_commands_run_as_programs(tmp_path: Path) -> None:
    command = [*PROGRAM, "simulate", *SHORT, "--json"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 3


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        (options.Data, "data"),
        (options.PartitionSpec, "partition"),
        (options.PerRound, "clients_per_round"),
        (options.ModelName, "model"),
        (options.Rounds, "rounds"),
    ],
)
def test_the_defaults_in_the_help_are_those_of_an_experiment(flag: Any, field: str) -> None:
    [option] = flag.__metadata__
    assert option.show_default == str(Experiment.model_fields[field].default)


def test_simulate_shows_the_learning_curve_and_the_result(tmp_path: Path) -> None:
    done = fairfleet("simulate", "--rule", "fedlf", *SHORT, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "worst 5 %" in done.stdout
    assert "3 rounds in" in done.stdout


def test_simulate_prints_one_json_object_and_records_the_run(tmp_path: Path) -> None:
    words = (
        "simulate",
        "--data",
        "digits",
        "--partition",
        "dirichlet:0.5",
        "--clients",
        "6",
        "--json",
        *SHORT,
    )
    done = fairfleet(*words, "--record", "runs.jsonl", folder=tmp_path)
    printed = json.loads(done.stdout)
    assert (printed["rounds"], printed["complete"], len(printed["accuracy"])) == (3, True, 6)
    assert printed["fairness"]["clients"] == 6
    recorded = json.loads((tmp_path / "runs.jsonl").read_text())
    assert recorded["key"] == printed["key"]


def test_flags_override_the_experiment_of_a_yaml_file(tmp_path: Path) -> None:
    text = "rule: fedavg\nrounds: 50\nplan: {steps: 1}\n"
    text += "behaviour: {attacks: [{kind: sign_flip, clients: [rotated-0]}]}\n"
    (tmp_path / "mine.yaml").write_text(text)
    done = fairfleet(
        "simulate", "mine.yaml", "--rounds", "2", "--rule", "median", "--json", folder=tmp_path
    )
    printed = json.loads(done.stdout)
    assert (printed["rounds"], printed["label"], len(printed["dishonest"])) == (2, "median", 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rule", "fedfw"), "did you mean"),
        (("--data", "cifar11"), "there is no dataset"),
        (("--set", "rounds"), "path=value"),
        (("--set", "nonsense=1"), "no such setting"),
        (("--model", "mlp:0"), "whole numbers"),
        (("--data", "digits", "--partition", "iid"), "number of clients"),
    ],
)
def test_a_mistake_is_explained_and_exits_with_code_2(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    done = fairfleet("simulate", *words, folder=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_compare_writes_records_tables_report_and_charts(tmp_path: Path) -> None:
    words = (
        "compare",
        "--rule",
        "fedavg",
        "--rule",
        "fedlf",
        "--seeds",
        "2",
        "--output",
        "out",
        *SHORT,
    )
    done = fairfleet(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fedlf" in done.stdout
    out = tmp_path / "out"
    assert len((out / "runs.jsonl").read_text().splitlines()) == 4
    lines = list(csv.DictReader((out / "table.csv").read_text().splitlines()))
    assert [line["rule"] for line in lines] == ["fedavg", "fedlf"]
    assert "plotly" in (out / "report.html").read_text()
    assert len(list(out.glob("*.png"))) == 5
    again = fairfleet(*words, "--json", folder=tmp_path)
    assert [row["seeds"] for row in json.loads(again.stdout)["rows"]] == [[0, 1], [0, 1]]
    assert len((out / "runs.jsonl").read_text().splitlines()) == 4


SWEEP = """
base: {evaluate_every: 1, plan: {steps: 1}}
seeds: [0]
rules:
  - {label: short, rule: fedavg, rounds: 2}
  - {label: endless, rule: fedavg, rounds: 10000000}
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_comparison_and_keeps_finished_runs(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    words = ["compare", "sweep.yaml", "--output", "out", "--no-pictures"]
    process = subprocess.Popen(
        [*PROGRAM, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        records = tmp_path / "out" / "runs.jsonl"
        until(lambda: records.exists() and "\n" in records.read_text(), "the first run to end")
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == INTERRUPTED, errors
    first = json.loads((tmp_path / "out" / "runs.jsonl").read_text().splitlines()[0])
    assert (first["label"], first["complete"]) == ("short", True)
    assert "short" in (tmp_path / "out" / "table.csv").read_text()
    assert "stopped after 1 of 2 runs; the same command continues" in shown


def test_reproduce_lists_its_tables_and_refuses_unknown_names(tmp_path: Path) -> None:
    assert "fedfv-table2" in fairfleet("reproduce", folder=tmp_path).stdout
    assert fairfleet("reproduce", "table9", folder=tmp_path).returncode == 2
    done = fairfleet("reproduce", "B", "--rule", "FedProx", folder=tmp_path)
    assert "has no rules ['FedProx']" in done.stderr.replace("\n", " ")
    done = fairfleet("reproduce", "B", "--setting", "X", folder=tmp_path)
    assert "there are none to choose from" in done.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quick"], "name the table"),
        (["--rule", "FedAvg"], "name the table"),
        (["B", "--page", "page.md"], "remove the table name"),
        (["--page", "page.md", "--json"], "remove the table name"),
        (["--page", "page.md", "--seeds", "2"], "name the table"),
        (["--page", ".", "--results", str(RESULTS)], "cannot write ."),
        (["--page", "/proc/none/page.md", "--results", str(RESULTS)], "cannot write /proc"),
    ],
)
def test_reproduce_refuses_flags_that_contradict_each_other(
    words: list[str], message: str, tmp_path: Path
) -> None:
    done = fairfleet("reproduce", *words, folder=tmp_path)
    assert (done.returncode, message in done.stderr.replace("\n", " ")) == (2, True), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_is_shown_and_recorded_even_if_its_tables_cannot_be_written(
    tmp_path: Path,
) -> None:
    (tmp_path / "out" / "table.csv").mkdir(parents=True)
    words = (
        "compare",
        *SHORT,
        "--rule",
        "fedavg",
        "--seeds",
        "1",
        "--output",
        "out",
        "--no-pictures",
    )
    done = fairfleet(*words, folder=tmp_path)
    assert done.returncode == 2
    assert "worst 5 %" in done.stdout
    assert "cannot write out/table.csv" in done.stderr.replace("\n", " ")
    assert len((tmp_path / "out" / "runs.jsonl").read_text().splitlines()) == 1


def test_a_reproduction_without_its_data_names_the_dataset(tmp_path: Path) -> None:
    done = fairfleet("reproduce", "A", "--quick", "--data-dir", str(tmp_path), folder=tmp_path)
    assert done.returncode == 2
    assert "cifar10" in done.stderr
