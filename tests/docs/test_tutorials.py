"""The commands and files of the tutorials, run in order as their reader does.

A block that begins with the name of a file, as in `# task.py`, is written to that file. A block
that is a part of a file must be in it. Servers and clients run in the background, as in other
terminals.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.fleet import free_port, until
from tests.support.paths import ROOT

FOLDER = ROOT / "docs" / "tutorials"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (part of )?([\w.]+\.(?:py|yaml))\n")
INSTALLATION = ("make ", "source ")  # what prepared the environment of the tests
PATIENCE_SECONDS = 300


class Block(NamedTuple):
    """A block of code of a page."""

    language: str
    text: str


def blocks(page: str) -> list[Block]:
    text = (FOLDER / page).read_text("utf-8")
    return [Block(*found) for found in BLOCK.findall(text)]


class Reader:
    """Someone who does what a page says, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._site = folder, folder / "site"
        address = f"127.0.0.1:{free_port()}"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("FAIRFLEET_")}
        programs = Path(sys.executable).parent
        self._environment: Mapping[str, str] = {
            **inherited,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self._site),
            "XDG_STATE_HOME": str(folder / "state"),
            "FAIRFLEET_LISTEN": address,
            "FAIRFLEET_SERVER": address,
            "FAIRFLEET_HTTP__PORT": "0",
            "COLUMNS": "100",
        }
        self._others: list[subprocess.Popen[bytes]] = []

    def read(self, page: str) -> None:
        """Do all that the page says."""
        for language, text in blocks(page):
            if language == "sh":
                for line in text.splitlines():
                    self._do(line)
            elif file := FILE.match(text):
                self._write(file[2], text.removeprefix(file[0]), part=bool(file[1]))

    def _write(self, name: str, text: str, part: bool) -> None:
        if part:
            assert text in (self.folder / name).read_text("utf-8")
        else:
            (self.folder / name).write_text(text, "utf-8")

    def _do(self, line: str) -> None:
        words = shlex.split(line)
        if line.startswith(INSTALLATION):
            return
        if words[0] == "cd":
            self.folder /= words[1]
        elif words[:2] in (["fairfleet", "server"], ["fairfleet", "client"]):
            self._others.append(self._start(words))
            if words[1] == "server":
                until(lambda: self._attempt(["fairfleet", "status"]).returncode == 0, "the server")
        else:
            done = self._attempt(words)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            print(done.stdout)

    def _start(self, words: list[str]) -> subprocess.Popen[bytes]:
        null = subprocess.DEVNULL
        return subprocess.Popen(
            words, cwd=self.folder, env=self._environment, stdout=null, stderr=null
        )

    def _attempt(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        if words[:2] == ["pip", "install"]:  # into a folder of the test, and without a network
            offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
            target = ["--target", str(self._site)]
            words = [sys.executable, "-m", "pip", "install", *offline, *target, *words[2:]]
        return subprocess.run(
            words,
            cwd=self.folder,
            env=self._environment,
            text=True,
            capture_output=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )

    def end(self) -> None:
        """End the servers and clients that still run."""
        for process in self._others:
            process.kill()
            process.wait()


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
        "first-federation.md",
        "own-model.md",
        "own-rule.md",
    ]


@pytest.mark.slow
def test_the_first_federation(reader: Reader, capfd: pytest.CaptureFixture[str]) -> None:
    reader.read("first-federation.md")
    output = capfd.readouterr().out
    assert "20 rounds of 20 done" in output
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
