"""The program as a whole: what it imports, what its help shows, how it handles signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fairfleet.common.cli.command_list import GROUPS
from fairfleet.common.cli.program import GROUP, overview, program
from tests.support.fleet import PROGRAM


def imported(code: str, *names: str) -> list[str]:
    """Return which of the named modules a piece of code imports."""
    script = f"import sys; {code}; print(*[name for name in {names!r} if name in sys.modules])"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()


def test_a_client_imports_neither_the_database_nor_the_screen_nor_torch() -> None:
    code = "from fairfleet.common.cli.program import program; program('client')"
    assert imported(
        code, "fairfleet.client.agent.agent", "sqlalchemy", "rich.live", "sklearn", "torch"
    ) == ["fairfleet.client.agent.agent"]


def test_the_demo_imports_neither_torch_nor_scikit_learn_to_start() -> None:
    assert imported(
        "import fairfleet.lab.demo.command", "fairfleet.lab.demo.command", "sklearn", "torch"
    ) == ["fairfleet.lab.demo.command"]


def test_the_overview_imports_no_command() -> None:
    code = "from fairfleet.common.cli.program import overview; overview()"
    assert imported(code, "numpy", "sqlalchemy", "torch", "ray", "sklearn", "rich.live") == []


def shown(*words: str, columns: int = 80) -> str:
    return subprocess.run(
        [*PROGRAM, *words],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": str(columns)},
    ).stdout


def test_help_lists_every_command_in_its_group_and_the_version_needs_none() -> None:
    text = shown("--help")
    groups = [text.index(f"─ {group} ─") for group in GROUPS]
    assert groups == sorted(groups)
    for start, end, commands in zip(groups, [*groups[1:], None], GROUPS.values(), strict=True):
        for command in commands:
            assert f" {command.name} " in text[start:end]
            assert command.text in text, "each summary fits on one line of 80 columns"
    assert shown("--version").startswith("fairfleet ")


def test_the_overview_lists_exactly_the_commands_that_are_installed() -> None:
    listed = {command.name for commands in GROUPS.values() for command in commands}
    assert listed == {entry.name for entry in entry_points(group=GROUP)}


def test_a_command_whose_extra_is_missing_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fairfleet.common.cli.program.find_spec",
        lambda name: None if name == "sqlalchemy" else object(),
    )
    names = {command.name for command in overview().registered_commands}
    assert "server" not in names
    assert {"client", "health", "demo"} <= names


def subcommands(app: typer.Typer) -> Iterator[tuple[str, Any]]:
    """Return every command and group of the program, with its words and its click command."""

    def below(words: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield words, command
        for name, child in getattr(command, "commands", {}).items():
            yield from below(f"{words} {name}", child)

    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        yield from below(name, command)


ALL = dict(subcommands(program()))


def test_the_overview_and_the_command_have_the_same_summary() -> None:
    summaries = {command.name: command.text for group in GROUPS.values() for command in group}
    own = {name: ALL[name].help.partition("\n\n")[0].strip("\b") for name in summaries}
    assert own == summaries


@pytest.mark.parametrize("words", ALL)
def test_every_command_has_an_example_that_help_does_not_wrap(words: str) -> None:
    if words == "pki":  # a group, whose commands have examples
        return
    examples = [line for line in ALL[words].help.splitlines() if line.startswith("  ")]
    assert any("fairfleet" in line for line in examples)
    lines = (
        CliRunner()
        .invoke(program(words.split()[0]), [*words.split(), "--help"], env={"COLUMNS": "80"})
        .output
    )
    for example in examples:
        assert f" {example}" in [line.rstrip() for line in lines.splitlines()]


@pytest.mark.parametrize("words", ALL)
def test_help_on_80_columns_shows_every_option_name_in_full(words: str) -> None:
    arguments = [*words.split(), "--help"]
    output = CliRunner().invoke(program(arguments[0]), arguments, env={"COLUMNS": "80"}).output
    for parameter in ALL[words].params:
        for name in (*parameter.opts, *parameter.secondary_opts):
            assert parameter.param_type_name == "argument" or name in output


@pytest.mark.parametrize("words", ALL)
def test_every_option_has_help_and_shows_its_default(words: str) -> None:
    for parameter in ALL[words].params:
        if parameter.param_type_name != "option" or parameter.name == "help":
            continue
        assert parameter.help, f"{words} {parameter.opts}"
        has_default = parameter.required or parameter.show_default
        assert has_default, f"{words} {parameter.opts} does not show its default"
        is_shown = isinstance(parameter.show_default, str) or parameter.default not in (None, "")
        assert parameter.required or is_shown, (
            f"{words} {parameter.opts}: default None is not shown"
        )


WHEN_GRPC_IS_IMPORTED = """
import os, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "grpc":
            print(os.environ.get("GRPC_VERBOSITY"))
            sys.exit()
sys.meta_path.insert(0, Finder())
import fairfleet.common.cli.main
"""


@pytest.mark.parametrize(
    ("begin", "verbosity"),
    [
        pytest.param("fairfleet.common.cli.main.main()", "ERROR", id="a client"),
        pytest.param(
            "sys.argv[1] = 'server'; fairfleet.common.cli.main.main()", "None", id="the server"
        ),
        pytest.param("import fairfleet.common.cli.program", "None", id="another program"),
    ],
)
def test_the_verbosity_of_grpc_is_set_before_it_is_imported(begin: str, verbosity: str) -> None:
    """gRPC reads the variable once. A program that only imports FairFleet is not affected."""
    clean = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    code = [sys.executable, "-c", WHEN_GRPC_IS_IMPORTED + begin, "client"]
    ran = subprocess.run(code, capture_output=True, text=True, check=True, env=clean)
    assert ran.stdout == f"{verbosity}\n"


def test_sigterm_ends_a_client_while_its_task_loads(tmp_path: Path) -> None:
    """The client must have a handler: the kernel drops SIGTERM for a container's first process."""
    (tmp_path / "slow.py").write_text(
        "import time\nprint('loading', flush=True)\ntime.sleep(600)\n"
    )
    words = ("client", "--task", "slow:task", "--name", "x", "--state-dir", str(tmp_path / "state"))
    with subprocess.Popen(
        [*PROGRAM, *words], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM


def test_an_error_quotes_what_it_found_and_no_symbol_in_its_place() -> None:
    words = [*PROGRAM, "server", "--set", "measure=a:b:[red]"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "(found 'a:b:[red]')" in done.stderr
