"""`fairfleet conformance`: check a client in any language against a server with faults."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fairfleet.common.cli import log_format as logs
from fairfleet.common.cli.program import Verbose
from fairfleet.common.errors import UsageError
from fairfleet.server.conformance.levels import LEVELS, CheckResult, check_client, levels_named

NAMES = [level.name for level in LEVELS]

Listen = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Address to listen on; port 0 takes a free one.")
]
LevelNames = Annotated[
    list[str] | None,
    typer.Option(
        "--level",
        metavar="LEVEL",
        help=f"Level to check: {', '.join(NAMES)}. May be repeated.",
        show_default="all",
    ),
]
Model = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Initial model, from `fairfleet init`; small ones are sent in a single chunk.",
        show_default="a model of 600,000 parameters",
    ),
]
Pki = Annotated[
    Path | None,
    typer.Option(
        help="Folder made by `fairfleet pki init`: check with TLS.", show_default="no TLS"
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Serve other machines without encryption.", show_default="off"),
]
Seconds = Annotated[
    float, typer.Option(help="How long to wait for each call that a check expects.", min=1.0)
]
Json = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of a table.", show_default="off")
]


def conformance(
    listen: Listen = "127.0.0.1:8450",
    level: LevelNames = None,
    model: Model = None,
    pki: Pki = None,
    insecure: Insecure = False,
    seconds: Seconds = 60.0,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Check a client in any language against a faulty server.

    Start the client once this command listens, with any name. proto/CLIENT.md describes the levels.
    The exit code is 1 if a check fails.

    Examples:

      fairfleet conformance

      fairfleet conformance --level basic --level compressed

      fairfleet conformance --json | jq .passed
    """
    if unknown := sorted(set(level or ()) - set(NAMES)):
        raise UsageError(f"there is no level {unknown[0]!r}; expected one of {', '.join(NAMES)}")
    logs.set_up(verbose)
    if not verbose:
        logging.getLogger().setLevel(logging.ERROR)  # the faults are no news
    settings: dict[str, Any] = {"listen": listen, "pki": pki, "insecure": insecure}
    if model is not None:
        settings["model"] = model
    results = asyncio.run(
        check_client(levels_named(level or ()), settings, seconds, _announce, _show)
    )
    if as_json:
        print(json.dumps(as_fields(results), indent=1))
    else:
        Console(highlight=False).print(as_table(results))
    if not passed(results):
        raise typer.Exit(1)


def _announce(address: str) -> None:
    print(f"listening on {address}; start the client now", file=sys.stderr, flush=True)


def _show(result: CheckResult) -> None:
    reason = f": {result.reason}" if result.reason else ""
    print(f"{result.level}: {result.check}: {result.result}{reason}", file=sys.stderr, flush=True)


def passed(results: Sequence[CheckResult]) -> bool:
    """Return whether no check failed."""
    return all(result.result != "fail" for result in results)


def as_fields(results: Sequence[CheckResult]) -> dict[str, Any]:
    """Return the results as values for JSON, by level."""
    levels = {
        name: [result for result in results if result.level == name]
        for name in NAMES
        if any(result.level == name for result in results)
    }
    return {
        "passed": passed(results),
        "levels": {
            name: {
                "passed": passed(of_level),
                "checks": [
                    {"check": entry.check, "result": entry.result, "reason": entry.reason}
                    for entry in of_level
                ],
            }
            for name, of_level in levels.items()
        },
    }


def as_table(results: Sequence[CheckResult]) -> Table:
    """Return the results as a table: one line for each level, and one for each of its checks."""
    table = Table("level", "check", "result", "reason", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, level in as_fields(results)["levels"].items():
        table.add_row(Text(name), Text("all"), Text("pass" if level["passed"] else "fail"), "")
        for entry in level["checks"]:
            table.add_row("", *map(Text, (entry["check"], entry["result"], entry["reason"])))
    return table
