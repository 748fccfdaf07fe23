"""Clients that train only while conditions hold: real processes whose conditions change."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, until

OFTEN = {"FAIRFLEET_WHEN_SECONDS": "0.1"}


def contributors(fleet: Fleet) -> set[str]:
    return {c["client"] for c in fleet.records()[-1]["contributions"]} if fleet.version() else set()


def battery(folder: Path, status: str) -> None:
    (folder / "BAT0").mkdir(parents=True, exist_ok=True)
    (folder / "BAT0" / "type").write_text("Battery\n")
    (folder / "BAT0" / "status").write_text(f"{status}\n")


@pytest.mark.slow
def test_an_unplugged_laptop_abandons_its_training_and_the_round_does_not_wait(
    fleet: Fleet,
) -> None:
    supplies = fleet.folder / "power_supply"
    battery(supplies, "Charging")
    fleet.environment = OFTEN
    fleet.init()
    # No deadline or lease ends this wait. Without the laptop's message the round would take 1 h.
    fleet.start_server(
        rounds=10_000, round__quorum=0.6, round__deadline_seconds=3600, lease_seconds=3600
    )
    fleet.start_client("a", step_seconds=0.05)
    fleet.start_client("b", step_seconds=0.05)
    laptop = fleet.start_client(
        "laptop", "--when", f"mains={supplies}", steps=100_000, step_seconds=0.05
    )
    events = fleet.watch()
    until(lambda: any(e.training_progress.client == "laptop" for e in events), "it to train")
    stuck_at = fleet.version()  # the round waits for the laptop, for up to an hour
    battery(supplies, "Discharging")
    fleet.wait_for_version(stuck_at + 2)
    assert "not now: on battery (discharging)" in fleet.log("laptop.log")
    assert "was abandoned: this client gave it up" in fleet.log("laptop.log")
    gone = [event.client_gone for event in events if event.HasField("client_gone")]
    assert [(departure.client, departure.reason) for departure in gone] == [
        ("laptop", "not now")
    ]  # the reason stays on the device
    assert "laptop" not in contributors(fleet)
    laptop.send_signal(signal.SIGTERM)
    assert laptop.wait(20) == 0


@pytest.mark.slow
def test_a_client_may_leave_and_rejoin_with_its_condition_any_number_of_times(fleet: Fleet) -> None:
    allowed = fleet.folder / "allowed"
    fleet.environment = OFTEN
    fleet.init()
    fleet.start_server(
        rounds=10_000, round__minimum_clients=1, round__quorum=0.5, lease_seconds=3600
    )
    fleet.start_client("a", step_seconds=0.02)
    fleet.start_client("shy", "--when", f"run=test -e {allowed}", step_seconds=0.02)
    until(lambda: "not now" in fleet.log("shy.log"), "it to stay away")
    fleet.wait_for_version(2)
    assert contributors(fleet) == {"a"}
    assert "joined" not in fleet.log("shy.log")  # it never joined, so no round waited for it
    for _ in range(3):
        allowed.touch()
        until(lambda: "shy" in contributors(fleet), "it to take part")
        allowed.unlink()
        until(lambda: "shy" not in contributors(fleet), "it to be gone")
        went_at = fleet.version()
        fleet.wait_for_version(went_at + 2)
    assert fleet.log("shy.log").count("taking part again") == 3
    fleet.kill_server()
    fleet.prove(fleet.version())  # nothing was lost or counted twice


@pytest.mark.slow
def test_idle_mains_and_an_unmetered_network_together(fleet: Fleet) -> None:
    """The three conditions as a device would have them; only `busctl` is replaced."""
    supplies, programs = fleet.folder / "power_supply", fleet.folder / "bin"
    battery(supplies, "Full")
    programs.mkdir()
    (programs / "busctl").write_text(f"#!/bin/sh\ncat {fleet.folder}/metered\n")
    (programs / "busctl").chmod(0o755)
    (fleet.folder / "metered").write_text("u 1\n")
    fleet.environment = {**OFTEN, "PATH": f"{programs}:/usr/bin:/bin"}
    fleet.init()
    fleet.start_server(rounds=10_000, round__minimum_clients=1)
    # The load of the test machine must not matter, so the limit is the whole machine.
    flags = [
        word
        for condition in ("idle=100", f"mains={supplies}", "unmetered")
        for word in ("--when", condition)
    ]
    fleet.start_client("device", *flags)
    until(lambda: "not now: the network is metered" in fleet.log("device.log"), "it to stay away")
    (fleet.folder / "metered").write_text("u 4\n")
    fleet.wait_for_version(1)
    battery(supplies, "Discharging")
    until(lambda: "not now: on battery" in fleet.log("device.log"), "it to go")
