"""The live screen and the status screen, rendered without a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from fairfleet.client.operator import live_screen
from fairfleet.client.operator.fleet_view import FleetView, fold
from fairfleet.proto.v1 import operator_pb2 as pb
from tests.support.samples.events import (
    NAMES,
    began,
    committed,
    delivered,
    evaluated,
    event,
    joined,
    start,
    view_after,
)

UNDER_WAY = view_after(
    start(),
    *joined(*NAMES),
    began(0, *NAMES),
    *(committed(round_number) for round_number in range(4)),
    *evaluated(4, a=0.912, b=0.8, c=0.3),
    began(4, *NAMES),
    delivered(4, "b", 2.3, received=1, asked=2),
)


def rendered(renderable: RenderableType, columns: int = 80) -> list[str]:
    console = Console(
        width=columns, file=io.StringIO(), record=True, color_system=None, highlight=False
    )
    console.print(renderable)
    return console.export_text().splitlines()


def live(view: FleetView, rows: int = 30, columns: int = 80) -> str:
    return "\n".join(rendered(live_screen.live(view, now=1003.0, rows=rows), columns))


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_screen_fits_the_terminal(columns: int) -> None:
    assert all(len(line) <= columns for line in live(UNDER_WAY, columns=columns).splitlines())


def test_the_screen_shows_the_round_its_phase_and_the_remaining_time() -> None:
    screen = live(UNDER_WAY)
    for part in (
        "round 5 of 10",
        "6.00 s left",
        "training: received 1 of 3 updates",
        "training 0.25 s",
        "commit 10 ms",
    ):
        assert part in screen


def test_the_worst_served_client_is_first_and_marked_and_the_mean_is_last() -> None:
    lines = [
        line for line in live(UNDER_WAY).splitlines() if "%" in line and "fairness" not in line
    ]
    assert [line.split()[0] for line in lines] == ["c", "b", "a", "mean"]
    assert lines[0].rstrip().endswith("30.0 %  ◀ worst")
    assert "67.1 %" in lines[-1]


def test_the_screen_shows_fairness_and_the_conflicts_of_the_newest_step() -> None:
    (line,) = [line for line in live(UNDER_WAY).splitlines() if "fairness" in line]
    for part in ("mean 67.1 %", "worst 10 % 30.0 %", "angle 21.6°", "1/2 in conflict"):
        assert part in line


def test_before_an_evaluation_bars_show_the_loss() -> None:
    view = view_after(
        start(),
        *joined("a", "b"),
        began(0, "a", "b"),
        delivered(0, "a", 2.302, received=1, asked=1),
    )
    screen = live(view)
    assert "loss on its training data" in screen
    assert "2.302" in screen


def test_a_long_training_shows_its_steps() -> None:
    progress = pb.TrainingProgress(client="a", steps_done=30, steps_planned=500, loss=1.0)
    view = view_after(start(), *joined("a"), began(0, "a"), event(0, training_progress=progress))
    assert "30/500 steps" in live(view)


def test_a_large_fleet_shows_the_worst_that_fit() -> None:
    names = [f"client-{number:03}" for number in range(200)]
    accuracy = {name: (1 + number) / 200 for number, name in enumerate(names)}
    view = view_after(start(), *joined(*names), *evaluated(1, **accuracy))
    screen = live(view, rows=24)
    assert len(screen.splitlines()) <= 24
    assert "client-000" in screen
    assert "more, served better" in screen
    assert "50.2 %" in screen  # the mean is over all of them


def test_text_from_a_client_is_not_read_as_markup() -> None:
    record = pb.ClientJoined(client="a", device="[bold]cuda[/bold]", connected=1)
    view = fold(view_after(start()), event(0, client_joined=record))
    assert any("[bold]cuda[/bold]" in line for line in rendered(live_screen.standing(view)))


def test_status_lists_every_client_with_updates_accuracy_and_loss() -> None:
    screen = "\n".join(rendered(live_screen.standing(UNDER_WAY)))
    for part in ("fleet", "fedavg · 650 parameters", "up for", "delivered", "91.2 %", "0.700"):
        assert part in screen


def test_a_fleet_without_clients_is_shown_as_empty() -> None:
    assert "no client has joined yet" in live(view_after(start()))
    assert any(
        "no client has joined yet" in line
        for line in rendered(live_screen.standing(view_after(start())))
    )
