"""`fairfleet rules`: the list of rules with their parameters, and the check against test vectors."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fairfleet.server import vectors
from fairfleet.server.rules import listings

rules_app = typer.Typer(help="List the aggregation rules, or check them against test vectors.")
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@rules_app.callback(invoke_without_command=True)
def rules(context: typer.Context, as_json: Json = False) -> None:
    """List every rule with a line and its parameters."""
    if context.invoked_subcommand is not None:
        return
    if as_json:
        found = {name: {"summary": one.line(), "parameters": one.parameters()} for name, one in listings().items()}
        typer.echo(json.dumps(found, indent=2))
        return
    table = Table("rule", "what it does", "parameters and their defaults", show_lines=True)
    for name, one in listings().items():
        table.add_row(name, one.line(), ", ".join(f"{key}={value}" for key, value in one.parameters().items()))
    Console().print(table)


@rules_app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="A folder with sets.json, inputs.npz, cases.json, expected.npz.")],
    as_json: Json = False,
) -> None:
    """Run every case of a folder of test vectors; exit with 1 if one fails, 2 if the folder cannot be read."""
    try:
        verdicts = list(vectors.check(vectors.load(folder)))
    except vectors.BrokenVectors as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    summary = summarise(verdicts)
    typer.echo(json.dumps(summary, indent=2)) if as_json else show(summary)
    if summary["failed"]:
        raise typer.Exit(1)


def summarise(verdicts: list[vectors.Verdict]) -> dict[str, Any]:
    """Totals, then per rule: passed, failed, the worst relative error and the largest share of a tolerance."""
    by_rule: dict[str, list[vectors.Verdict]] = defaultdict(list)
    for verdict in verdicts:
        by_rule[verdict.rule].append(verdict)
    return {
        "cases": len(verdicts),
        "passed": sum(one.passed for one in verdicts),
        "failed": sum(not one.passed for one in verdicts),
        "rules": {rule: rule_summary(some) for rule, some in sorted(by_rule.items())},
    }


def rule_summary(verdicts: list[vectors.Verdict]) -> dict[str, Any]:
    finite = [one for one in verdicts if one.error < float("inf")]
    return {
        "passed": sum(one.passed for one in verdicts),
        "failed": sum(not one.passed for one in verdicts),
        "worst_error": max((one.error for one in finite), default=None),
        "worst_share_of_tolerance": max((one.strain for one in finite), default=None),
        "failures": {one.case: one.reason for one in verdicts if not one.passed},
    }


def show(summary: dict[str, Any]) -> None:
    table = Table("rule", "passed", "failed", "worst error", "of tolerance")
    for rule, about in summary["rules"].items():
        table.add_row(
            rule, *(shown(about[key]) for key in ("passed", "failed", "worst_error", "worst_share_of_tolerance"))
        )
    console = Console()
    console.print(table)
    for about in summary["rules"].values():
        for case, reason in list(about["failures"].items())[:5]:
            console.print(f"[red]{case}[/red]: {reason}")
    console.print(f"{summary['passed']} of {summary['cases']} cases passed, {summary['failed']} failed")


def shown(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.1e}"
