"""The results of federations of the same clients, side by side, worst served client first.

Several federations differ in their rule. The first one is the reference for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from fairfleet.client.operator import formatting
from fairfleet.client.operator.live_screen import BAD, FAINT, GOOD, MEAN, bar
from fairfleet.common.cli.durations import format_duration
from fairfleet.common.cli.event_text import count
from fairfleet.lab.demo.local_federation import Result

RELEVANT_GAP = 0.15  # a smaller gap to the mean accuracy does not count as bad service


def summarise(results: Sequence[Result], remark: str) -> RenderableType:
    """Return bars for every client, the findings in sentences, and the costs."""
    sentences = [*_findings(results), Text(remark, FAINT), *_differences(results)]
    return Padding(Group(_bars(results), "", *sentences, "", _costs(results)), (1, 2))


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Return the results as one object for `--json`."""
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
                "evaluations": [asdict(evaluation) for evaluation in result.evaluations],
            }
            for result in results
        ]
    }


def served_badly(result: Result) -> list[str]:
    """Return the clients whose accuracy is below the mean by a relevant gap.

    The gap must exceed the standard deviation, too.
    """
    least = result.fairness.mean - max(result.fairness.standard_deviation, RELEVANT_GAP)
    return [client for client, accuracy in result.accuracy.items() if accuracy < least]


def _bars(results: Sequence[Result]) -> RenderableType:
    table = Table(box=None, header_style=FAINT, padding=(0, 2, 0, 0), expand=True)
    table.add_column("client", no_wrap=True)
    for result in results:
        heading = result.rule if len(results) > 1 else "accuracy on its own test images"
        table.add_column(Text(heading), ratio=1, no_wrap=True)
        table.add_column("", justify="right", no_wrap=True, min_width=7)
    for client in results[0].accuracy:
        table.add_row(*_client_row(client, results))
    means: list[RenderableType] = [Text("mean", MEAN)]
    for result in results:
        mean = result.fairness.mean
        means += [bar(mean, MEAN), Text(formatting.percent(mean), MEAN)]
    table.add_row(*means)
    return table


def _client_row(client: str, results: Sequence[Result]) -> list[RenderableType]:
    row: list[RenderableType] = [Text(client, BAD if client in served_badly(results[0]) else "")]
    for result in results:
        accuracy, is_bad = result.accuracy[client], client in served_badly(result)
        percent = Text(formatting.percent(accuracy), BAD if is_bad else "")
        row += [bar(accuracy, BAD if is_bad else GOOD), percent]
    return row


def _findings(results: Sequence[Result]) -> list[Text]:
    findings = []
    for result in results:
        fairness, badly = result.fairness, served_badly(result)
        worst = next(iter(result.accuracy))
        findings.append(
            Text.assemble(
                (result.rule, "bold"), ": mean ", (formatting.percent(fairness.mean), MEAN),
                f", worst {worst} ", (formatting.percent(fairness.min), BAD),
                f", standard deviation {100 * fairness.standard_deviation:.1f} points",
            )
        )  # fmt: skip
        if badly:
            findings.append(Text.assemble("Served badly: ", (_listed(badly), BAD), "."))
    return findings


def _differences(results: Sequence[Result]) -> list[Text]:
    """Return what each further rule changes for the client that the first one serves worst."""
    first, *rest = results
    sentences = []
    for result in rest:
        worst = next(iter(first.accuracy))
        sentences.append(
            Text.assemble(
                "With ", (result.rule, "bold"), f" {worst} goes from ",
                (formatting.percent(first.accuracy[worst]), BAD), " to ",
                (formatting.percent(result.accuracy[worst]), GOOD), ", the mean from ",
                (formatting.percent(first.fairness.mean), MEAN), " to ",
                (formatting.percent(result.fairness.mean), MEAN), ".",
            )
        )  # fmt: skip
    return sentences


def _costs(results: Sequence[Result]) -> RenderableType:
    table = Table.grid(Column(style=FAINT), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for result in results:
        of = f" of {result.rule}" if len(results) > 1 else ""
        table.add_row(
            Text(f"time{of}"),
            f"{format_duration(result.seconds)} for {count(result.rounds, 'round')}",
        )
        table.add_row(
            Text(f"moved{of}"),
            f"{decimal(result.bytes_sent)} to clients, {decimal(result.bytes_received)} from them",
        )
        table.add_row(
            Text(f"model{of}"),
            Text(f"{result.output} ({count(result.parameters, 'parameter')})"),
        )
        table.add_row(Text(f"logs{of}"), Text(str(result.logs)))
    return table


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
