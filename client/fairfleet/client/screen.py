"""A federation on the screen: rich renderables made from a view, and nothing else.

Worst served first, since that is who the rules are there for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from fairfleet.client import words
from fairfleet.client.fleet_view import Client, Doing, Served, View
from fairfleet.common.fairness import mean
from fairfleet.proto.v1 import operator_pb2 as pb

GOOD, BAD, MEAN, FAINT = "green", "bold red", "bold cyan", "dim"
STYLES = {
    Doing.TRAINING: "yellow",
    Doing.DELIVERED: "green",
    Doing.VERIFYING: "cyan",
    Doing.EVALUATING: "magenta",
    Doing.FAILED: "red",
    Doing.LOST: "red",
    Doing.GONE: "red",
    Doing.REVOKED: "red",
}
STEPS = "▁▂▃▄▅▆▇█"
LONGEST_NAME = 24  # shown; names may have up to 64 letters
FRAME_ROWS = 14  # what `live` shows beside the clients


def live(view: View, *, now: float, rows: int) -> RenderableType:
    """The whole picture in so many rows: where the round stands, and how every client fares."""
    return Padding(Group(_title(view), _progress(view, now), _facts(view), "", bars(view, rows - FRAME_ROWS)), (1, 2))


def standing(view: View) -> RenderableType:
    """How the federation stands, with every client in full: for `fairfleet status`."""
    return Padding(Group(_title(view), _facts(view, uptime=True), "", _clients(view)), (1, 2))


def bar(share: float, style: str) -> ProgressBar:
    return ProgressBar(total=1.0, completed=share, complete_style=style, finished_style=style)


# ---- the head ----------------------------------------------------------------------------------


def _title(view: View) -> RenderableType:
    status = view.status
    line = Table.grid(Column(), Column(justify="right"), expand=True)
    about = f"{status.rule} · {words.count(status.parameters, 'parameter')} · {status.connected:,} connected"
    line.add_row(Text(status.federation, "bold"), Text(about, FAINT))
    return line


def _progress(view: View, now: float) -> RenderableType:
    status = view.status
    left = view.seconds_left(now)
    line = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), padding=(0, 2, 0, 0), expand=True)
    done = ProgressBar(total=max(1, status.rounds_planned), completed=status.version, complete_style="cyan")
    line.add_row(words.round_of(view), done, f"{words.duration(left)} left" if left is not None else "")
    return line


def _facts(view: View, uptime: bool = False) -> RenderableType:
    status = view.status
    table = Table.grid(Column(style=FAINT), Column(), padding=(0, 2, 0, 0))
    if uptime:
        table.add_row("progress", words.round_of(view))
    table.add_row("now", Text(words.phase(view), "red" if view.trouble else ""))
    if view.recent:
        newest = view.recent
        phases = {
            "training": mean([pace.training_seconds for pace in newest]),
            "aggregation": mean([pace.aggregation_seconds for pace in newest]),
            "verification": mean([pace.verification_seconds for pace in newest]),
            "commit": mean([pace.commit_seconds for pace in newest]),
        }
        phases = {name: took for name, took in phases.items() if took or name != "verification"}
        table.add_row("each round", " · ".join(f"{name} {words.duration(took)}" for name, took in phases.items()))
    if len(view.evaluations) > 1:
        table.add_row("accuracy", _trend(view.evaluations))
    if fairness := _fairness(view):
        table.add_row("fairness", fairness)
    if status.HasField("privacy"):
        table.add_row("privacy", Group(*privacy(status.privacy, long=uptime)))
    moved = f"{decimal(status.bytes_sent)} to clients · {decimal(status.bytes_received)} from them"
    table.add_row("moved", moved)
    if uptime:
        table.add_row("up for", words.duration(status.uptime_seconds))
    return table


def _fairness(view: View) -> Text | None:
    """The newest evaluation in numbers, and the newest round's conflicts."""
    parts: list[tuple[str, str]] = []
    if view.evaluations:
        served = view.evaluations[-1]
        parts += [(f"mean {100 * served.mean:.1f} %", MEAN), (f"worst 10 % {100 * served.worst_10:.1f} %", BAD)]
        parts += [(f"angle {served.angle_degrees:.1f}°", "")]
    if view.recent and view.recent[-1].conflicts is not None:
        newest = view.recent[-1]
        parts += [(f"{newest.conflicts}/{newest.clients} in conflict", BAD if newest.conflicts else "")]
    return Text(" · ").join(Text(words, style) for words, style in parts) if parts else None


def privacy(told: pb.PrivacyStatus, *, long: bool) -> Iterator[RenderableType]:
    """What is spent; in long also from whom it protects, and what it does not cover."""
    limit = f" of {told.max_epsilon:g}" if told.HasField("max_epsilon") else ""
    spent = "∞ (clipped, but without noise)" if math.isinf(told.epsilon) else f"{told.epsilon:.3g}{limit}"
    noise = f"noise {told.noise_multiplier:g} times clip {told.clip:g} at the {told.where}"
    yield f"ε {spent} at δ {told.delta:g} · {noise}"
    if long:
        yield Text(f"protects from {told.against}", FAINT)
        yield Text(told.not_covered, "yellow")


def _trend(evaluations: Sequence[Served]) -> Text:
    newest = evaluations[-24:]
    return Text.assemble(
        ("mean ", MEAN),
        ("".join(_step(served.mean) for served in newest), MEAN),
        ("   worst ", BAD),
        ("".join(_step(served.worst) for served in newest), BAD),
    )


def _step(share: float) -> str:
    return STEPS[min(int(share * len(STEPS)), len(STEPS) - 1)]


# ---- the clients -------------------------------------------------------------------------------


def bars(view: View, rows: int) -> RenderableType:
    """One bar of accuracy per client, or of loss as long as nobody has been evaluated."""
    clients = view.by_need()
    if not clients:
        return Text("no client has come yet", FAINT)
    evaluated = [client for client in clients if client.accuracy is not None]
    table = Table(
        Column("client", no_wrap=True, overflow="ellipsis", max_width=LONGEST_NAME),
        Column("", no_wrap=True, min_width=10),
        Column(_measured(evaluated), ratio=1, no_wrap=True),
        Column("", justify="right", no_wrap=True, min_width=6),
        Column("", no_wrap=True, min_width=7),
        box=None, header_style=FAINT, padding=(0, 2, 0, 0), expand=True,
    )  # fmt: skip
    shown = clients[: max(3, rows)]
    tallest = max((client.train_loss or 0.0 for client in clients), default=0.0)
    for client in shown:
        worst = client is clients[0] and len(clients) > 1 and _value(client) is not None
        style = BAD if worst else GOOD
        table.add_row(
            Text(client.name, BAD if worst else ""),
            _doing(client),
            _bar(client, tallest, style) or "",
            Text(_value(client) or "", style if worst else ""),
            Text("◀ worst", BAD) if worst else "",
        )
    if len(shown) < len(clients):
        table.add_row(Text("…", FAINT), "", Text(f"{len(clients) - len(shown)} more, served better", FAINT))
    if evaluated:
        middle = mean([client.accuracy for client in evaluated if client.accuracy is not None])
        table.add_row(Text("mean", MEAN), "", bar(middle, MEAN), Text(words.percent(middle), MEAN), "")
    return table


def _measured(evaluated: Sequence[Client]) -> str:
    if not evaluated:
        return "loss on its training data"
    return f"accuracy after round {max(client.evaluated or 0 for client in evaluated)}"


def _value(client: Client) -> str | None:
    if client.accuracy is not None:
        return words.percent(client.accuracy)
    return f"{client.train_loss:.3f}" if client.train_loss is not None else None


def _bar(client: Client, tallest: float, style: str) -> ProgressBar | None:
    if client.accuracy is not None:
        return bar(client.accuracy, style)
    return bar(client.train_loss / tallest, style) if client.train_loss is not None and tallest > 0 else None


def _doing(client: Client) -> Text:
    if client.doing in (Doing.TRAINING, Doing.VERIFYING) and client.steps:
        done, planned = client.steps
        return Text(f"{done}/{planned} steps", STYLES[client.doing])
    return Text(client.doing.value, STYLES.get(client.doing, FAINT))


def _clients(view: View) -> RenderableType:
    name = Column("client", no_wrap=True, overflow="ellipsis", max_width=LONGEST_NAME)
    table = Table(name, "", box=box.SIMPLE_HEAD, header_style=FAINT, pad_edge=False, show_edge=False)
    for heading in ("samples", "updates", "accuracy", "loss"):
        table.add_column(heading, justify="right")
    table.add_column("device")
    for client in view.by_need():
        table.add_row(
            client.name,
            _doing(client),
            f"{client.samples:,}" if client.samples else "",
            f"{client.updates:,}",
            words.percent(client.accuracy) if client.accuracy is not None else "",
            f"{client.loss:.3f}" if client.loss is not None else "",
            Text(client.device),
        )
    return table if view.clients else Text("no client has come yet", FAINT)
