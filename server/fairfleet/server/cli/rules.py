"""`fairfleet rules`: list the rules and their parameters, or check them against test vectors."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fairfleet.server.aggregation import conformance
from fairfleet.server.rules import listings

rules_app = typer.Typer(help="List the aggregation rules, or check them with test vectors.")
Json = Annotated[
    bool, typer.Option("--json", help="Print JSON instead of a table.", show_default="off")
]


@rules_app.callback(invoke_without_command=True)
def rules(context: typer.Context, as_json: Json = False) -> None:
    """List the aggregation rules, or check them with test vectors.

    Without a command, every rule is listed with one line and its parameters.

    Examples:

      fairfleet rules

      fairfleet rules --json | jq .fedfv.parameters

      fairfleet rules check my-vectors
    """
    if context.invoked_subcommand is not None:
        return
    if as_json:
        listed = {
            name: {"summary": rule.line(), "parameters": rule.parameters()}
            for name, rule in listings().items()
        }
        typer.echo(json.dumps(listed, indent=2))
        return
    table = Table("rule", "what it does", "parameters and their defaults", show_lines=True)
    for name, rule in listings().items():
        defaults = ", ".join(f"{key}={value}" for key, value in rule.parameters().items())
        table.add_row(name, rule.line(), defaults)
    Console().print(table)


@rules_app.command()
def check(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder with sets.json, inputs.npz, cases.json and expected.npz."),
    ],
    as_json: Json = False,
) -> None:
    """Run every case of a folder of test vectors.

    The exit code is 1 if a case fails and 2 if the folder cannot be read.

    Example:

      fairfleet rules check my-vectors --json
    """
    try:
        results = list(conformance.check(conformance.load(folder)))
    except conformance.BrokenVectors as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    summary = summarise(results)
    typer.echo(json.dumps(summary, indent=2)) if as_json else show(summary)
    if summary["failed"]:
        raise typer.Exit(1)


def summarise(results: list[conformance.CaseResult]) -> dict[str, Any]:
    """Return the totals, and under `rules` the same figures for each rule."""
    by_rule: dict[str, list[conformance.CaseResult]] = defaultdict(list)
    for result in results:
        by_rule[result.rule].append(result)
    return {
        "cases": len(results),
        "passed": sum(result.passed for result in results),
        "failed": sum(not result.passed for result in results),
        "rules": {rule: rule_summary(of_rule) for rule, of_rule in sorted(by_rule.items())},
    }


def rule_summary(results: list[conformance.CaseResult]) -> dict[str, Any]:
    """Return how a rule did: counts, worst relative error, largest share of a tolerance."""
    finite = [result for result in results if result.error < float("inf")]
    return {
        "passed": sum(result.passed for result in results),
        "failed": sum(not result.passed for result in results),
        "worst_error": max((result.error for result in finite), default=None),
        "worst_share_of_tolerance": max((result.strain for result in finite), default=None),
        "failures": {result.case: result.reason for result in results if not result.passed},
    }


def show(summary: dict[str, Any]) -> None:
    """Print a summary as a table, followed by the first failures of each rule."""
    table = Table("rule", "passed", "failed", "worst error", "of tolerance")
    columns = ("passed", "failed", "worst_error", "worst_share_of_tolerance")
    for rule, figures in summary["rules"].items():
        table.add_row(rule, *(_cell(figures[column]) for column in columns))
    console = Console()
    console.print(table)
    for figures in summary["rules"].values():
        for case, reason in list(figures["failures"].items())[:5]:
            console.print(f"[red]{case}[/red]: {reason}")
    console.print(
        f"{summary['passed']} of {summary['cases']} cases passed, {summary['failed']} failed"
    )


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.1e}"
