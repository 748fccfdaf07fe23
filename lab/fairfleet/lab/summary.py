"""What came out of one or more federations of the same clients: side by side, worst served first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from fairfleet.client import words
from fairfleet.client.screen import BAD, FAINT, GOOD, MEAN, bar
from fairfleet.lab.local import Result

MATTERS = 0.15


def summarise(results: Sequence[Result], remark: str) -> RenderableType:
    said = [*_findings(results), Text(remark, FAINT), *_differences(results)]
    return Padding(Group(_bars(results), "", *said, "", _facts(results)), (1, 2))


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    return {
        "federations": [
            {
                "name": result.name,
                "rule": result.rule,
                "rounds": result.rounds,
                "parameters": result.parameters,
                "seconds": round(result.seconds, 3),
                "bytes_sent": result.bytes_sent,
                "bytes_received": result.bytes_received,
                "model": str(result.output),
                "accuracy": dict(result.accuracy),
                "fairness": asdict(result.fairness),
                "evaluations": [asdict(served) for served in result.evaluations],
            }
            for result in results
        ]
    }


def served_badly(result: Result) -> list[str]:
    """Whose accuracy is below the mean by more than the standard deviation, and by enough to matter to anyone."""
    least = result.fairness.mean - max(result.fairness.standard_deviation, MATTERS)
    return [client for client, accuracy in result.accuracy.items() if accuracy < least]


def _bars(results: Sequence[Result]) -> RenderableType:
    table = Table(box=None, header_style=FAINT, padding=(0, 2, 0, 0), expand=True)
    table.add_column("client", no_wrap=True)
    for result in results:
        heading = result.rule if len(results) > 1 else "accuracy on its own test images"
        table.add_column(Text(heading), ratio=1, no_wrap=True)
        table.add_column("", justify="right", no_wrap=True, min_width=7)
    for client in results[0].accuracy:
        row: list[RenderableType] = [Text(client, BAD if client in served_badly(results[0]) else "")]
        for result in results:
            accuracy, badly = result.accuracy[client], client in served_badly(result)
            row += [bar(accuracy, BAD if badly else GOOD), Text(words.percent(accuracy), BAD if badly else "")]
        table.add_row(*row)
    middle: list[RenderableType] = [Text("mean", MEAN)]
    for result in results:
        middle += [bar(result.fairness.mean, MEAN), Text(words.percent(result.fairness.mean), MEAN)]
    table.add_row(*middle)
    return table


def _findings(results: Sequence[Result]) -> list[Text]:
    found = []
    for result in results:
        fairness, badly = result.fairness, served_badly(result)
        worst = next(iter(result.accuracy))
        found.append(
            Text.assemble(
                (result.rule, "bold"), ": mean ", (words.percent(fairness.mean), MEAN),
                f", worst {worst} ", (words.percent(fairness.min), BAD),
                f", standard deviation {100 * fairness.standard_deviation:.1f} points",
            )
        )  # fmt: skip
        if badly:
            found.append(Text.assemble("Served badly: ", (_listed(badly), BAD), "."))
    return found


def _differences(results: Sequence[Result]) -> list[Text]:
    """What every other federation did for the client that the first one served worst, and at what price."""
    first, *others = results
    said = []
    for other in others:
        worst = next(iter(first.accuracy))
        said.append(
            Text.assemble(
                "With ", (other.rule, "bold"), f" {worst} goes from ",
                (words.percent(first.accuracy[worst]), BAD), " to ",
                (words.percent(other.accuracy[worst]), GOOD), ", the mean from ",
                (words.percent(first.fairness.mean), MEAN), " to ", (words.percent(other.fairness.mean), MEAN), ".",
            )
        )  # fmt: skip
    return said


def _facts(results: Sequence[Result]) -> RenderableType:
    table = Table.grid(Column(style=FAINT), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for result in results:
        of = f" of {result.rule}" if len(results) > 1 else ""
        table.add_row(Text(f"time{of}"), f"{words.duration(result.seconds)} for {words.count(result.rounds, 'round')}")
        table.add_row(
            Text(f"moved{of}"), f"{decimal(result.bytes_sent)} to clients, {decimal(result.bytes_received)} from them"
        )
        table.add_row(Text(f"model{of}"), Text(f"{result.output} ({words.count(result.parameters, 'parameter')})"))
        table.add_row(Text(f"logs{of}"), Text(str(result.logs)))
    return table


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
