from __future__ import annotations

import subprocess
import sys

from tests.e2e.fleet import PROGRAM


def imported(code: str, *names: str) -> list[str]:
    """Which of the modules a piece of code imports."""
    asked = f"import sys; {code}; print(*[name for name in {names!r} if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout.split()


def test_a_client_starts_without_the_servers_database_and_without_a_screen() -> None:
    code = "from fairfleet.common.cli import program; program('client')"
    assert imported(code, "fairfleet.client.agent", "sqlalchemy", "rich.live", "sklearn", "torch") == [
        "fairfleet.client.agent"
    ]


def test_the_demo_imports_neither_torch_nor_scikit_learn_to_start() -> None:
    assert imported("import fairfleet.lab.demo", "fairfleet.lab.demo", "sklearn", "torch") == ["fairfleet.lab.demo"]


def test_without_a_command_all_are_listed_and_the_version_needs_none() -> None:
    def run(*words: str) -> str:
        return subprocess.run([*PROGRAM, *words], capture_output=True, text=True, check=True).stdout

    listed = run("--help")
    for command in (
        "client",
        "clients",
        "demo",
        "export",
        "pause",
        "init",
        "rounds",
        "server",
        "status",
        "stop",
        "watch",
    ):
        assert f" {command} " in listed
    assert run("--version").startswith("fairfleet ")
