"""The commands and files of the tutorials, run in order as their reader does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.docs.reader import FOLDER, MACHINES, Reader

REAL = next(
    (
        folder
        for folder in os.environ.get("FAIRFLEET_DATA", "").split(os.pathsep)
        if folder and (Path(folder) / "cifar10").is_dir()
    ),
    "",
)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    try:
        yield reader
    finally:
        reader.end()


def recognised(output: str) -> list[int]:
    """Return the percentages that the programs of a page print at its end."""
    return [int(text) for text in re.findall(r"(\d+)% of all", output)]


def test_every_tutorial_is_read_by_a_test() -> None:
    assert sorted(page.name for page in FOLDER.glob("*.md")) == [
        "compare-rules.md",
        "first-federation.md",
        "five-machines.md",
        "own-model.md",
        "own-rule.md",
        "raspberry-pi.md",
    ]


def states(output: str) -> list[str]:
    """Return the state of each client in what `fairfleet status` printed."""
    known = "idle|training|evaluating|gone|finished|revoked"
    return re.findall(rf"^  [\w-]+ +({known}) .* %", output, re.MULTILINE)


@pytest.mark.slow
def test_the_first_federation(reader: Reader, capfd: pytest.CaptureFixture[str]) -> None:
    reader.read("first-federation.md")
    output = capfd.readouterr().out
    assert "20 rounds of 20 done" in output
    assert states(output) == ["finished"] * 3
    assert recognised(output)[0] > 80


@pytest.mark.slow
@pytest.mark.torch
def test_an_own_model(reader: Reader, capfd: pytest.CaptureFixture[str]) -> None:
    reader.read("own-model.md")
    output = capfd.readouterr().out
    assert "30 rounds of 30 done" in output
    assert recognised(output)[0] > 85


@pytest.mark.slow
def test_an_own_rule(reader: Reader, capfd: pytest.CaptureFixture[str]) -> None:
    reader.read("own-rule.md")
    output = capfd.readouterr().out
    tables = re.findall(r"^my_rule +[\d.]+% +([\d.]+)%", output, re.MULTILINE)
    averaged = re.findall(r"^fedavg +[\d.]+% +([\d.]+)%", output, re.MULTILINE)
    assert len(tables) == len(averaged) == 3
    assert all(float(own) > float(plain) for own, plain in zip(tables, averaged, strict=True))
    test = [sys.executable, "-m", "unittest"]
    done = subprocess.run(test, cwd=reader.folder, capture_output=True, text=True, check=False)
    assert "FAILED (failures=2)" in done.stderr, "the page says that the test of the old rule fails"


@pytest.mark.slow
def test_five_machines(reader: Reader, capfd: pytest.CaptureFixture[str]) -> None:
    reader.read("five-machines.md")
    output = capfd.readouterr().out
    assert "40 rounds of 40 done" in output
    assert states(output)[:5] == ["finished"] * 5
    assert recognised(output)[0] > 75
    models = [load_file(reader.root / name / "trained.safetensors") for name in MACHINES]
    exported = load_file(reader.root / "fleet.example" / "trained.safetensors")
    for model in models:
        assert all((model[name] == exported[name]).all() for name in exported)
    keys = list(reader.root.glob("*/device.fleet"))
    assert len({file.read_text("utf-8") for file in keys}) == 5
    assert re.search(r"machine-5 +revoked", output)


@pytest.mark.slow
def test_a_raspberry_pi(reader: Reader, capfd: pytest.CaptureFixture[str]) -> None:
    reader.read("raspberry-pi.md")
    output = capfd.readouterr().out
    assert "20 rounds of 20 done" in output
    assert states(output) == ["finished"] * 2
    assert recognised(output)[0] > 85


def about_cifar(line: str) -> bool:
    """Tell whether a command needs CIFAR-10."""
    return "cifar10" in line


def worst_tenth(table: Path) -> dict[str, float]:
    """Return what each rule gives the tenth of the clients that is served worst, in percent."""
    return {row["rule"]: row["worst_10"] for row in json.loads(table.read_text("utf-8"))}


@pytest.mark.slow
@pytest.mark.torch
def test_compare_two_rules_on_digits(reader: Reader) -> None:
    reader.read("compare-rules.md", lambda line: not about_cifar(line))
    results = reader.root / "fairfleet-results" / "digits"
    assert (results / "report.html").exists()
    worst = worst_tenth(results / "table.json")
    assert worst["fedlf"] > worst["fedavg"] + 20


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(not REAL, reason="FAIRFLEET_DATA names no folder with cifar10")
def test_compare_two_rules_on_cifar(reader: Reader) -> None:
    """The short run of the page, on the real images; the long one takes too much time."""
    reader.data = REAL
    long_run = "fairfleet compare cifar10.yaml --data-dir ~/data"
    reader.read("compare-rules.md", lambda line: about_cifar(line) and line != long_run)
    table = reader.root / "fairfleet-results" / "cifar10-short" / "table.json"
    assert len(worst_tenth(table)) == 2
