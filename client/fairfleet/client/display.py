"""How a watcher shows what it sees: a live screen on a terminal, plain lines elsewhere, JSON for programs."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.live import Live

from fairfleet.client import screen
from fairfleet.client.fleet_view import Disconnected, Observation, Snapshot, View, fold
from fairfleet.client.lines import lines
from fairfleet.common.plain import plain
from fairfleet.proto.v1 import operator_pb2 as pb

REFRESHES_PER_SECOND = 8

Show = Callable[[View, Observation, View], None]
Display = contextlib.AbstractContextManager[Show]


def follow(observations: Iterable[Observation], display: Display) -> View:
    """Shows everything observed; the view at the end."""
    view = View()
    with display as show:
        for seen in observations:
            before, view = view, fold(view, seen)
            show(before, seen, view)
    return view


def for_people(console: Console, *, transient: bool = False) -> Display:
    return live(console, transient=transient) if console.is_terminal else plain_lines(console)


@contextlib.contextmanager
def live(console: Console, *, transient: bool) -> Iterator[Show]:
    """Refreshed at its own pace, however many events there are; `transient`: nothing of it remains at the end."""
    newest = View()

    def show(before: View, seen: Observation, after: View) -> None:
        nonlocal newest
        newest = after

    def picture() -> Any:
        return screen.live(newest, now=time.time(), rows=console.height)

    with Live(get_renderable=picture, console=console, refresh_per_second=REFRESHES_PER_SECOND, transient=transient):
        yield show


@contextlib.contextmanager
def plain_lines(console: Console) -> Iterator[Show]:
    def show(before: View, seen: Observation, after: View) -> None:
        for line in lines(before, seen, after):
            console.out(time.strftime("%H:%M:%S"), line, highlight=False)

    yield show


@contextlib.contextmanager
def json_lines() -> Iterator[Show]:
    def show(before: View, seen: Observation, after: View) -> None:
        if isinstance(seen, Snapshot | pb.Event):
            print(json.dumps(as_json(seen)), flush=True)
        elif isinstance(seen, Disconnected) and not before.trouble:
            print(json.dumps({"kind": "disconnected", "reason": seen.why}), flush=True)

    yield show


@contextlib.contextmanager
def nothing() -> Iterator[Show]:
    yield lambda before, seen, after: None


def as_json(seen: Snapshot | pb.Event) -> dict[str, Any]:
    """An event flat, under the name of its kind; a snapshot is of kind `status`."""
    if isinstance(seen, Snapshot):
        return {"kind": "status", **plain(seen.status), "clients": [plain(record) for record in seen.clients]}
    kind = seen.WhichOneof("kind") or "unknown"
    head = {"kind": kind, "sequence": seen.sequence, "unix_seconds": seen.unix_seconds, "round": seen.round}
    return head | plain(getattr(seen, kind)) if kind != "unknown" else head
