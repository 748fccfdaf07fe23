"""Does what a tutorial says: writes its files and runs its commands, in order.

A block that begins with the name of a file, as in `# task.py`, is written to that file. A block
that is a part of a file must be in it. Servers and clients run in the background, as in other
terminals. Where a page has several machines, a block says which one it concerns, as in
`# on machine-1`. Each is a folder here, `scp` copies between the folders, and all names of
machines in addresses are loopback.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.support.fleet import free_port, until
from tests.support.paths import ROOT

FOLDER = ROOT / "docs" / "tutorials"
PATIENCE_SECONDS = 300
MACHINES = [f"machine-{number}" for number in range(1, 6)]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"# on (.+)\n")
FILE = re.compile(r"# (?P<part>part of )?(?P<name>[\w.-]+\.(?:py|yaml))(?: on (?P<place>\S+))?\n")
# What prepared the environment of the tests, and copies of the wheel that it was made from.
INSTALLATION = re.compile(r"make |source |sudo |python3 -m venv |.*\.whl\b")
BACKGROUND = re.compile(r"fairfleet (server|client) ")
SCP = """#!/bin/sh
for target; do :; done
host=${target%%:*}
while [ $# -gt 1 ]; do cp "$1" "$MACHINES/${host#*@}/${target#*:}" || exit 1; shift; done
"""


class Block(NamedTuple):
    """A block of code of a page."""

    language: str
    text: str


def blocks(page: str) -> list[Block]:
    """Return the blocks of code of a page, in order."""
    text = (FOLDER / page).read_text("utf-8")
    return [Block(*found) for found in BLOCK.findall(text)]


def every_line(line: str) -> bool:
    """Choose all commands of a page."""
    return True


class Reader:
    """Someone who does what a page says, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._site, self._programs = folder, folder / "site", folder / "programs"
        self._programs.mkdir()
        (self._programs / "scp").write_text(SCP, "utf-8")
        (self._programs / "scp").chmod(0o755)
        self.root, self._exported = folder, defaultdict[Path, dict[str, str]](dict)
        self._ports = {port: str(free_port()) for port in ("8440", "8442")}
        self.data = "~/data"  # the folder of real data, which pages call so
        self._several = False  # whether the page is about several machines
        self._others: list[subprocess.Popen[bytes]] = []
        self._clients: list[subprocess.Popen[bytes]] = []

    def read(self, page: str, chosen: Callable[[str], bool] = every_line) -> None:
        """Do all that the page says, or only those of its commands that are chosen."""
        self._several = any(PLACE.match(block.text) for block in blocks(page))
        for language, text in blocks(page):
            place = PLACE.match(text)
            if language == "sh":
                for folder in self._folders(place[1] if place else ""):
                    self.folder = folder
                    for line in text.splitlines():
                        if not line.startswith("#") and chosen(line):
                            self._do(line)
            elif file := FILE.match(text):
                (self.folder,) = self._folders(file["place"] or "")
                self._write(file["name"], text.removeprefix(file[0]), part=bool(file["part"]))

    def _folders(self, place: str) -> list[Path]:
        """Return the folders of the machines of this name; the present one without a name."""
        if not place:
            return [self.folder]
        names = MACHINES if place == "each of the five machines" else [place]
        folders = [self.root / name for name in names]
        for folder in folders:
            folder.mkdir(exist_ok=True)
        return folders

    def _here(self, text: str) -> str:
        """Return a text with addresses of this machine in place of those of the page."""
        text = re.sub(r"(fleet\.example|computer\.local|0\.0\.0\.0)(?=[: \n])", "127.0.0.1", text)
        text = text.replace("~/data", self.data)
        return re.sub(r"(?<=:)(8440|8442)\b", lambda port: self._ports[port[1]], text)

    def _write(self, name: str, text: str, part: bool) -> None:
        if part:
            assert text in (self.folder / name).read_text("utf-8")
        else:
            (self.folder / name).write_text(self._here(text), "utf-8")

    def _do(self, line: str) -> None:
        if INSTALLATION.match(line):
            return
        if line.startswith("cd "):
            self.folder /= line.removeprefix("cd ")
        elif line.startswith("export "):
            name, _, value = line.removeprefix("export ").partition("=")
            self._exported[self.folder][name] = value
        elif background := BACKGROUND.match(line):
            self._start(self._here(line), background[1])
        else:
            done = self.attempt(line)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            print(done.stdout)
            if line.startswith("fairfleet watch"):  # it ends when the training is finished
                ends = [client.wait(PATIENCE_SECONDS) for client in self._clients]
                assert set(ends) == {0}, ends

    def _start(self, line: str, program: str) -> None:
        null = subprocess.DEVNULL
        process = subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd=self.folder,
            env=self._environment(),
            stdout=null,
            stderr=null,
        )
        self._others.append(process)
        if program == "client":
            self._clients.append(process)
        else:
            until(lambda: self._serves() or process.poll() is not None, "the server")
            assert process.poll() is None, f"{line} ended with {process.returncode}"

    def _serves(self) -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", int(self._ports["8440"]))) == 0

    def _environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("FAIRFLEET_")}
        paths = [str(self._programs), str(Path(sys.executable).parent), os.environ["PATH"]]
        environment = {
            **inherited,
            "PATH": os.pathsep.join(paths),
            "PYTHONPATH": str(self._site),
            "XDG_STATE_HOME": str(self.root / "state" / self.folder.name),
            "MACHINES": str(self.root),
            "FAIRFLEET_HTTP__PORT": "0",
            "COLUMNS": "100",
            **self._exported[self.folder],
        }
        if not self._several:  # these pages leave the address to the defaults
            address = f"127.0.0.1:{self._ports['8440']}"
            environment |= {"FAIRFLEET_LISTEN": address, "FAIRFLEET_SERVER": address}
        return environment

    def attempt(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a command of a page to its end, in the present folder."""
        words = ["bash", "-c", self._here(line)]
        if line.startswith("pip install "):  # into a folder of the test, and without a network
            offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
            target = ["--target", str(self._site)]
            what = shlex.split(line)[2:]
            words = [sys.executable, "-m", "pip", "install", *offline, *target, *what]
        return subprocess.run(
            words,
            cwd=self.folder,
            env=self._environment(),
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
