from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.fleet import PROGRAM


def imported(code: str, *names: str) -> list[str]:
    """Which of the modules a piece of code imports."""
    asked = f"import sys; {code}; print(*[name for name in {names!r} if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout.split()


def test_a_client_starts_without_the_servers_database_and_without_a_screen() -> None:
    code = "from fairfleet.common.program import program; program('client')"
    assert imported(code, "fairfleet.client.agent", "sqlalchemy", "rich.live", "sklearn", "torch") == [
        "fairfleet.client.agent"
    ]


def test_the_demo_imports_neither_torch_nor_scikit_learn_to_start() -> None:
    assert imported("import fairfleet.lab.demo", "fairfleet.lab.demo", "sklearn", "torch") == ["fairfleet.lab.demo"]


def test_without_a_command_all_are_listed_and_the_version_needs_none() -> None:
    def run(*words: str) -> str:
        return subprocess.run([*PROGRAM, *words], capture_output=True, text=True, check=True).stdout

    listed = run("--help")
    operating = ("clients", "export", "pause", "rounds", "status", "stop", "watch")
    lab = ("compare", "demo", "partition", "reproduce", "simulate")
    for command in ("client", "init", "server", *operating, *lab):
        assert f" {command} " in listed
    assert run("--version").startswith("fairfleet ")


WHEN_GRPC_IS_IMPORTED = """
import os, sys
class Seen:
    def find_spec(self, name, *_):
        if name == "grpc":
            print(os.environ.get("GRPC_VERBOSITY"))
            sys.exit()
sys.meta_path.insert(0, Seen())
import fairfleet.common.cli
"""


@pytest.mark.parametrize(
    ("begin", "verbosity"),
    [
        pytest.param("fairfleet.common.cli.main()", "ERROR", id="a client"),
        pytest.param("sys.argv[1] = 'server'; fairfleet.common.cli.main()", "None", id="the server"),
        pytest.param("import fairfleet.common.program", "None", id="a program of someone else"),
    ],
)
def test_how_much_grpc_tells_is_settled_before_it_is_imported(begin: str, verbosity: str) -> None:
    """It looks once, and then nothing changes it any more. What only imports us passes nothing on to its children."""
    clean = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    code = [sys.executable, "-c", WHEN_GRPC_IS_IMPORTED + begin, "client"]
    ran = subprocess.run(code, capture_output=True, text=True, check=True, env=clean)
    assert ran.stdout == f"{verbosity}\n"


def test_a_client_that_is_told_to_end_while_its_task_loads_ends(tmp_path: Path) -> None:
    """By a handler of its own: the first process of a container is sent no signal that it does not handle."""
    (tmp_path / "slow.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(600)\n")
    words = ("client", "--task", "slow:task", "--name", "x", "--state-dir", str(tmp_path / "state"))
    with subprocess.Popen([*PROGRAM, *words], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
