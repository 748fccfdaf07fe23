"""How a watcher shows a federation: a live screen, plain lines, or JSON for programs.

Each display is a context manager that yields a function. That function receives every observation
with the view before and after it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.live import Live

from fairfleet.client.operator import live_screen
from fairfleet.client.operator.event_lines import lines
from fairfleet.client.operator.fleet_view import (
    Disconnected,
    FleetView,
    Observation,
    Snapshot,
    fold,
)
from fairfleet.common.cli.message_json import plain
from fairfleet.proto.v1 import operator_pb2 as pb

REFRESHES_PER_SECOND = 8

Show = Callable[[FleetView, Observation, FleetView], None]
Display = contextlib.AbstractContextManager[Show]


def follow(observations: Iterable[Observation], display: Display) -> FleetView:
    """Show every observation and return the last view."""
    view = FleetView()
    with display as show:
        for observation in observations:
            before, view = view, fold(view, observation)
            show(before, observation, view)
    return view


def for_people(console: Console, *, transient: bool = False) -> Display:
    """Return a live screen on a terminal, and plain lines elsewhere."""
    return live(console, transient=transient) if console.is_terminal else plain_lines(console)


@contextlib.contextmanager
def live(console: Console, *, transient: bool) -> Iterator[Show]:
    """Show a screen that is redrawn at its own pace, however many events arrive.

    A transient screen is erased at the end.
    """
    newest = FleetView()

    def _show(before: FleetView, observation: Observation, after: FleetView) -> None:
        nonlocal newest
        newest = after

    def _render() -> Any:
        return live_screen.live(newest, now=time.time(), rows=console.height)

    with Live(
        get_renderable=_render,
        console=console,
        refresh_per_second=REFRESHES_PER_SECOND,
        transient=transient,
    ):
        yield _show


@contextlib.contextmanager
def plain_lines(console: Console) -> Iterator[Show]:
    """Show one line of text with a time for each notable event."""

    def _show(before: FleetView, observation: Observation, after: FleetView) -> None:
        for line in lines(before, observation, after):
            console.out(time.strftime("%H:%M:%S"), line, highlight=False)

    yield _show


@contextlib.contextmanager
def json_lines() -> Iterator[Show]:
    """Print one JSON object per snapshot, event and lost connection."""

    def _show(before: FleetView, observation: Observation, after: FleetView) -> None:
        if isinstance(observation, Snapshot | pb.Event):
            print(json.dumps(as_json(observation)), flush=True)
        elif isinstance(observation, Disconnected) and not before.trouble:
            print(json.dumps({"kind": "disconnected", "reason": observation.why}), flush=True)

    yield _show


@contextlib.contextmanager
def nothing() -> Iterator[Show]:
    """Show nothing at all."""
    yield lambda before, observation, after: None


def as_json(observation: Snapshot | pb.Event) -> dict[str, Any]:
    """Return the fields of an event and its kind as one flat object.

    A snapshot has the kind `status`.
    """
    if isinstance(observation, Snapshot):
        return {
            "kind": "status",
            **plain(observation.status),
            "clients": [plain(record) for record in observation.clients],
        }
    kind = observation.WhichOneof("kind") or "unknown"
    head = {
        "kind": kind,
        "sequence": observation.sequence,
        "unix_seconds": observation.unix_seconds,
        "round": observation.round,
    }
    return head | plain(getattr(observation, kind)) if kind != "unknown" else head
