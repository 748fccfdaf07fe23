"""A federation on the screen: rich renderables made from a view.

Clients are listed worst served first, because the rules exist for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from fairfleet.client.operator import formatting
from fairfleet.client.operator.fleet_view import (
    ClientActivity,
    ClientView,
    FleetView,
    RoundTiming,
)
from fairfleet.common.cli.durations import format_duration
from fairfleet.common.cli.event_text import count, figure
from fairfleet.common.fairness import mean
from fairfleet.proto.v1 import operator_pb2 as pb

GOOD, BAD, MEAN, FAINT = "green", "bold red", "bold cyan", "dim"
STYLES = {
    ClientActivity.TRAINING: "yellow",
    ClientActivity.DELIVERED: "green",
    ClientActivity.VERIFYING: "cyan",
    ClientActivity.EVALUATING: "magenta",
    ClientActivity.FAILED: "red",
    ClientActivity.LOST: "red",
    ClientActivity.GONE: "red",
    ClientActivity.REVOKED: "red",
    ClientActivity.RETIRED: "dim",
    ClientActivity.FINISHED: "green",
}
STEPS = "▁▂▃▄▅▆▇█"
LONGEST_NAME = 24  # columns; names may have up to 64 characters
FRAME_ROWS = 14  # rows of `live` that do not show clients
EMPTY = "no client has joined yet"


def live(view: FleetView, *, now: float, rows: int) -> RenderableType:
    """Return the live screen in at most `rows` rows: the current round, and every client."""
    return Padding(
        Group(_title(view), _progress(view, now), _facts(view), "", bars(view, rows - FRAME_ROWS)),
        (1, 2),
    )


def standing(view: FleetView) -> RenderableType:
    """Return the status of the federation with every client in full, for `fairfleet status`."""
    return Padding(Group(_title(view), _facts(view, uptime=True), "", _clients(view)), (1, 2))


def bar(share: float, style: str) -> ProgressBar:
    """Return a bar that is filled to a share between 0 and 1."""
    return ProgressBar(total=1.0, completed=share, complete_style=style, finished_style=style)


# ---- the header ----------------------------------------------------------------------------------


def _title(view: FleetView) -> RenderableType:
    status = view.status
    line = Table.grid(Column(), Column(justify="right"), expand=True)
    parameters = count(status.parameters, "parameter")
    about = f"{status.rule} · {parameters} · {status.connected:,} connected"
    line.add_row(Text(status.federation, "bold"), Text(about, FAINT))
    return line


def _progress(view: FleetView, now: float) -> RenderableType:
    status = view.status
    seconds_left = view.seconds_left(now)
    line = Table.grid(
        Column(no_wrap=True),
        Column(ratio=1),
        Column(no_wrap=True),
        padding=(0, 2, 0, 0),
        expand=True,
    )
    done = ProgressBar(
        total=max(1, status.rounds_planned), completed=status.version, complete_style="cyan"
    )
    remaining = "" if seconds_left is None else f"{format_duration(seconds_left)} left"
    line.add_row(formatting.round_of(view), done, remaining)
    return line


def _facts(view: FleetView, uptime: bool = False) -> RenderableType:
    status = view.status
    table = Table.grid(Column(style=FAINT), Column(), padding=(0, 2, 0, 0))
    if uptime:
        table.add_row("progress", formatting.round_of(view))
    table.add_row("now", Text(formatting.phase(view), "red" if view.trouble else ""))
    if view.recent:
        table.add_row("each round", _phase_times(view.recent))
    if len(view.evaluations) > 1:
        table.add_row(view.measure, _trend(view))
    if fairness := _fairness(view):
        table.add_row("fairness", fairness)
    if status.HasField("privacy"):
        table.add_row("privacy", Group(*privacy(status.privacy, long=uptime)))
    moved = f"{decimal(status.bytes_sent)} to clients · {decimal(status.bytes_received)} from them"
    table.add_row("moved", moved)
    if uptime:
        table.add_row("up for", format_duration(status.uptime_seconds))
        if status.federation_id:
            table.add_row("id", status.federation_id)
        if status.software:
            table.add_row("server", status.software)
    return table


def _phase_times(rounds: Sequence[RoundTiming]) -> str:
    """Return the mean duration of each phase; verification only where it takes place."""
    phases = {
        "training": mean([timing.training_seconds for timing in rounds]),
        "aggregation": mean([timing.aggregation_seconds for timing in rounds]),
        "verification": mean([timing.verification_seconds for timing in rounds]),
        "commit": mean([timing.commit_seconds for timing in rounds]),
    }
    shown = {name: took for name, took in phases.items() if took or name != "verification"}
    return " · ".join(f"{name} {format_duration(took)}" for name, took in shown.items())


def _fairness(view: FleetView) -> Text | None:
    """Return the newest evaluation in numbers, and the newest round's conflicts."""
    parts: list[tuple[str, str]] = []
    if view.evaluations:
        newest_evaluation = view.evaluations[-1]
        measure = newest_evaluation.measure
        parts += [
            (f"mean {figure(measure, newest_evaluation.mean)}", MEAN),
            (f"worst 10 % {figure(measure, newest_evaluation.worst_10)}", BAD),
        ]
        parts += [(f"angle {newest_evaluation.angle_degrees:.1f}°", "")]
    if view.recent and view.recent[-1].conflicts is not None:
        newest = view.recent[-1]
        parts += [
            (f"{newest.conflicts}/{newest.clients} in conflict", BAD if newest.conflicts else "")
        ]
    return Text(" · ").join(Text(text, style) for text, style in parts) if parts else None


def privacy(status: pb.PrivacyStatus, *, long: bool) -> Iterator[RenderableType]:
    """Return the spent privacy budget; if long, also whom it protects from and its limits."""
    limit = f" of {status.max_epsilon:g}" if status.HasField("max_epsilon") else ""
    spent = f"{status.epsilon:.3g}{limit}"
    if math.isinf(status.epsilon):
        spent = "∞ (clipped, but without noise)"
    noise = f"noise {status.noise_multiplier:g} times clip {status.clip:g} at the {status.where}"
    yield f"ε {spent} at δ {status.delta:g} · {noise}"
    if long:
        yield Text(f"protects from {status.against}", FAINT)
        yield Text(status.not_covered, "yellow")


def _trend(view: FleetView) -> Text:
    newest = [entry for entry in view.evaluations if entry.measure == view.measure][-24:]
    values = [value for entry in newest for value in (entry.mean, entry.worst)]
    # An accuracy is shown on its own scale, another measure between its extremes.
    is_share = view.measure == "accuracy" or not values
    low, high = (0.0, 1.0) if is_share else (min(values), max(values))
    room = (high - low) or 1.0
    return Text.assemble(
        ("mean ", MEAN),
        ("".join(_step((entry.mean - low) / room) for entry in newest), MEAN),
        ("   worst ", BAD),
        ("".join(_step((entry.worst - low) / room) for entry in newest), BAD),
    )


def _step(share: float) -> str:
    return STEPS[min(int(share * len(STEPS)), len(STEPS) - 1)]


# ---- the clients -------------------------------------------------------------------------------


def bars(view: FleetView, rows: int) -> RenderableType:
    """Return one bar per client: its measure, or its loss until a client was evaluated."""
    clients = view.by_need()
    if not clients:
        return Text(EMPTY, FAINT)
    scale = BarScale.of(view)
    evaluated = [client for client in clients if client.figure(view.measure) is not None]
    table = _bars_table(_bars_heading(view.measure, evaluated))
    shown = clients[: max(3, rows)]
    for client in shown:
        is_worst = client is clients[0] and len(clients) > 1 and scale.value(client) is not None
        table.add_row(*_bars_row(client, scale, is_worst))
    if len(shown) < len(clients):
        more = f"{len(clients) - len(shown)} more, served better"
        table.add_row(Text("…", FAINT), "", Text(more, FAINT))
    if evaluated:
        middle = mean([client.figure(view.measure) or 0.0 for client in evaluated])
        text = Text(figure(view.measure, middle), MEAN)
        table.add_row(Text("mean", MEAN), "", bar(scale.share(middle), MEAN), text, "")
    return table


def _bars_table(heading: str) -> Table:
    return Table(
        Column("client", no_wrap=True, overflow="ellipsis", max_width=LONGEST_NAME),
        Column("", no_wrap=True, min_width=10),
        Column(heading, ratio=1, no_wrap=True),
        Column("", justify="right", no_wrap=True, min_width=6),
        Column("", no_wrap=True, min_width=7),
        box=None,
        header_style=FAINT,
        padding=(0, 2, 0, 0),
        expand=True,
    )


def _bars_row(client: ClientView, scale: BarScale, is_worst: bool) -> list[RenderableType]:
    return [
        Text(client.name, BAD if is_worst else ""),
        _activity(client),
        scale.bar(client, BAD if is_worst else GOOD) or "",
        Text(scale.value(client) or "", BAD if is_worst else ""),
        Text("◀ worst", BAD) if is_worst else "",
    ]


def _bars_heading(measure: str, evaluated: Sequence[ClientView]) -> str:
    if not evaluated:
        return "loss on its training data"
    return f"{measure} after round {max(client.evaluated or 0 for client in evaluated)}"


class BarScale(NamedTuple):
    """The values of the bars: the measure's, or training losses of clients without it."""

    measure: str
    lowest: float  # of the measure: an empty bar
    highest: float
    highest_loss: float

    @classmethod
    def of(cls, view: FleetView) -> BarScale:
        """Return the scale of a fleet: an accuracy's is 0 to 1, another's begins at 0 or below."""
        clients = view.clients.values()
        known = (client.figure(view.measure) for client in clients)
        values = [0.0, *(value for value in known if value is not None)]
        highest = 1.0 if view.measure == "accuracy" else max(values)
        loss = max((client.train_loss or 0.0 for client in clients), default=0.0)
        return cls(view.measure, min(values), highest, loss)

    def share(self, value: float) -> float:
        """Return how much of a bar a value of the measure fills."""
        room = self.highest - self.lowest
        return (value - self.lowest) / room if room > 0 else 0.0

    def value(self, client: ClientView) -> str | None:
        """Return a client's value as text; None if nothing is known of it."""
        value = client.figure(self.measure)
        if value is not None:
            return figure(self.measure, value)
        return f"{client.train_loss:.3f}" if client.train_loss is not None else None

    def bar(self, client: ClientView, style: str) -> ProgressBar | None:
        """Return a client's bar; None if nothing is known of it."""
        value = client.figure(self.measure)
        if value is not None:
            return bar(self.share(value), style)
        if client.train_loss is None or self.highest_loss <= 0:
            return None
        return bar(client.train_loss / self.highest_loss, style)


def _activity(client: ClientView) -> Text:
    if client.doing in (ClientActivity.TRAINING, ClientActivity.VERIFYING) and client.steps:
        done, planned = client.steps
        return Text(f"{done}/{planned} steps", STYLES[client.doing])
    return Text(client.doing.value, STYLES.get(client.doing, FAINT))


def _figure_columns(view: FleetView) -> dict[str, Callable[[ClientView], str]]:
    """Return the columns of measures: accuracy and loss, and before them the chosen one."""

    def text(measure: str) -> Callable[[ClientView], str]:
        def cell(client: ClientView) -> str:
            value = client.figure(measure)
            if value is None:
                return ""
            return f"{value:.3f}" if measure == "loss" else figure(measure, value)

        return cell

    return {name: text(name) for name in dict.fromkeys((view.measure, "accuracy", "loss"))}


def _clients(view: FleetView) -> RenderableType:
    name = Column("client", no_wrap=True, overflow="ellipsis", max_width=LONGEST_NAME)
    table = Table(
        name, "", box=box.SIMPLE_HEAD, header_style=FAINT, pad_edge=False, show_edge=False
    )
    figures = _figure_columns(view)
    for heading in ("samples", "updates", *figures):
        table.add_column(heading, justify="right")
    table.add_column("device")
    for client in view.by_need():
        table.add_row(
            client.name,
            _activity(client),
            f"{client.samples:,}" if client.samples else "",
            f"{client.updates:,}",
            *(cell(client) for cell in figures.values()),
            Text(client.device),
        )
    return table if view.clients else Text(EMPTY, FAINT)
