"""`fairfleet simulate`, `compare` and `reproduce`, as a person or a program starts them."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.fleet import PROGRAM, until

INTERRUPTED = 130
RESULTS = Path(__file__).parents[2] / "results"
SHORT = ("--rounds", "3", "--set", "plan.steps=2", "--set", "evaluate_every=1")


def fairfleet(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    plain = {**os.environ, "COLUMNS": "100", "TERM": "dumb"}
    return subprocess.run([*PROGRAM, *words], cwd=folder, text=True, capture_output=True, timeout=120, env=plain)


def test_simulate_shows_how_the_training_went(tmp_path: Path) -> None:
    done = fairfleet("simulate", "--rule", "fedlf", *SHORT, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "worst 5 %" in done.stdout
    assert "3 rounds in" in done.stdout


def test_simulate_gives_programs_one_json_object_and_keeps_a_record(tmp_path: Path) -> None:
    words = ("simulate", "--data", "digits", "--partition", "dirichlet:0.5", "--clients", "6", "--json", *SHORT)
    done = fairfleet(*words, "--record", "runs.jsonl", folder=tmp_path)
    found = json.loads(done.stdout)
    assert (found["rounds"], found["complete"], len(found["accuracy"])) == (3, True, 6)
    assert found["fairness"]["clients"] == 6
    kept = json.loads((tmp_path / "runs.jsonl").read_text())
    assert kept["key"] == found["key"]


def test_an_experiment_may_come_from_yaml_and_flags_change_it(tmp_path: Path) -> None:
    text = (
        "rule: fedavg\nrounds: 50\nplan: {steps: 1}\nbehaviour: {attacks: [{kind: sign_flip, clients: [rotated-0]}]}\n"
    )
    (tmp_path / "mine.yaml").write_text(text)
    done = fairfleet("simulate", "mine.yaml", "--rounds", "2", "--rule", "median", "--json", folder=tmp_path)
    found = json.loads(done.stdout)
    assert (found["rounds"], found["label"], len(found["dishonest"])) == (2, "median", 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rule", "fedfw"), "did you mean"),
        (("--data", "cifar11"), "there is no dataset"),
        (("--set", "rounds"), "path=value"),
        (("--set", "nonsense=1"), "no such setting"),
        (("--model", "mlp:0"), "whole numbers"),
        (("--data", "digits", "--partition", "iid"), "number of clients"),
    ],
)
def test_a_mistake_is_explained_and_ends_with_two(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    done = fairfleet("simulate", *words, folder=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_compare_writes_records_tables_report_and_pictures(tmp_path: Path) -> None:
    words = ("compare", "--rule", "fedavg", "--rule", "fedlf", "--seeds", "2", "--output", "out", *SHORT)
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


def test_ctrl_c_ends_a_comparison_and_keeps_what_was_done(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    words = ["compare", "sweep.yaml", "--output", "out", "--no-pictures"]
    process = subprocess.Popen(
        [*PROGRAM, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        records = tmp_path / "out" / "runs.jsonl"
        until(lambda: records.exists() and "\n" in records.read_text(), "the first run to end")
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == INTERRUPTED, said
    first = json.loads((tmp_path / "out" / "runs.jsonl").read_text().splitlines()[0])
    assert (first["label"], first["complete"]) == ("short", True)
    assert "short" in (tmp_path / "out" / "table.csv").read_text()
    assert "stopped after 1 of 2 runs; the same command goes on" in shown


def test_reproduce_lists_what_there_is_and_refuses_what_there_is_not(tmp_path: Path) -> None:
    assert "fedfv-table2" in fairfleet("reproduce", folder=tmp_path).stdout
    assert fairfleet("reproduce", "table9", folder=tmp_path).returncode == 2
    done = fairfleet("reproduce", "B", "--rule", "FedProx", folder=tmp_path)
    assert "has no rules ['FedProx']" in done.stderr.replace("\n", " ")
    done = fairfleet("reproduce", "B", "--setting", "X", folder=tmp_path)
    assert "there are none to choose from" in done.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--quick"], "which table?"),
        (["--rule", "FedAvg"], "which table?"),
        (["B", "--page", "page.md"], "leave the name"),
        (["--page", "page.md", "--json"], "leave the name"),
        (["--page", "page.md", "--seeds", "2"], "which table?"),
        (["--page", ".", "--results", str(RESULTS)], "cannot write ."),
        (["--page", "/proc/none/page.md", "--results", str(RESULTS)], "cannot write /proc"),
    ],
)
def test_wishes_that_reproduce_cannot_grant_are_refused(words: list[str], said: str, tmp_path: Path) -> None:
    done = fairfleet("reproduce", *words, folder=tmp_path)
    assert (done.returncode, said in done.stderr.replace("\n", " ")) == (2, True), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_whose_tables_cannot_be_written_is_shown_and_kept(tmp_path: Path) -> None:
    (tmp_path / "out" / "table.csv").mkdir(parents=True)
    words = ("compare", *SHORT, "--rule", "fedavg", "--seeds", "1", "--output", "out", "--no-pictures")
    done = fairfleet(*words, folder=tmp_path)
    assert done.returncode == 2
    assert "worst 5 %" in done.stdout
    assert "cannot write out/table.csv" in done.stderr.replace("\n", " ")
    assert len((tmp_path / "out" / "runs.jsonl").read_text().splitlines()) == 1


def test_a_reproduction_without_its_data_says_where_to_put_them(tmp_path: Path) -> None:
    done = fairfleet("reproduce", "A", "--quick", "--data-dir", str(tmp_path), folder=tmp_path)
    assert done.returncode == 2
    assert "cifar10" in done.stderr
