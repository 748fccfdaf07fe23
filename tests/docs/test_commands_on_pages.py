"""Every `fairfleet` command on a page exists, with its options, and its settings are valid."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml
from typer.core import TyperCommand, TyperGroup

from fairfleet.common.cli.command_list import GROUPS
from fairfleet.common.cli.program import program
from fairfleet.common.cli.settings import read_settings
from fairfleet.server.settings import ServerSettings
from tests.support.paths import ROOT

PAGES = sorted(
    [
        ROOT / "README.md",
        *(ROOT / "docs/tutorials").glob("*.md"),
        *(ROOT / "docs/how-to").glob("*.md"),
        *(ROOT / "docs/explanation").glob("*.md"),
    ]
)
SECTIONS = {"admission", "compression", "privacy", "verification"}
COMMANDS = {summary.name for summaries in GROUPS.values() for summary in summaries}


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words after `fairfleet` of each command in the page's blocks and tables."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ").replace("\\|", "|")
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.DOTALL)
    outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    for line in [*lines, *re.findall(r"`(fairfleet [^`]+)`", outside)]:
        found = re.search(r"(?:^|[\s(/])fairfleet ([a-zA-Z-].*)", line)
        if found and not re.search("docker|kubectl", line):
            first = re.split(r" && | \| |\)$| … | 2?> ?", found[1].replace("'…'", "x"))[0]
            yield shlex.split(first, comments=True)


@cache
def command(name: str) -> TyperCommand | TyperGroup:
    """Return a command by its name."""
    assert name in COMMANDS, f"there is no command {name}"
    root = typer.main.get_command(program(name))
    assert isinstance(root, TyperGroup)
    return root.commands[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_on_the_page_exists(page: Path) -> None:
    for words in commands(page):
        if not words or words[0] in {"COMMAND", "SUBCOMMAND"} or words[0].startswith("-"):
            continue
        current, rest = command(words[0]), words[1:]
        while isinstance(current, TyperGroup) and rest and rest[0] in current.commands:
            current, rest = current.commands[rest[0]], rest[1:]
        options = {name for each in current.params for name in (*each.opts, *each.secondary_opts)}
        given = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
        assert given - {"--help"} <= options, f"fairfleet {' '.join(words)}"


def blocks_of_settings() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            first = re.match(r"(?:#.*\n)*(\w+):", block)
            if first and first[1] in SECTIONS | {"codec", "name"} and "services:" not in block:
                yield page.name, block


@pytest.mark.parametrize(("page", "block"), list(blocks_of_settings()))
def test_settings_on_the_page_are_valid(page: str, block: str) -> None:
    values = yaml.safe_load(block)
    if "base" not in values:  # a sweep has a name, too
        assert read_settings(ServerSettings, None, {"model": "m.safetensors", **values})
