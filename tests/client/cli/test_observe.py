"""`status`, `watch` and `export` against real servers."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from fairfleet.common.tensors import Model
from tests.support.fleet import PROGRAM, Fleet, free_port


class WatchedFederation(NamedTuple):
    """A federation of two clients and three rounds, watched from its start to its end."""

    fleet: Fleet
    events: list[dict[str, Any]]
    lines: list[str]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedFederation]:
    fleet = Fleet(tmp_path_factory.mktemp("watched"))
    try:
        fleet.init()
        fleet.start_server(rounds=3, round__evaluate_every=2)
        watchers = [watch(fleet, "--json"), watch(fleet)]
        assert watchers[0].stdout is not None
        assert watchers[1].stdout is not None
        # After their first line, both watchers have seen the start.
        firsts = [watcher.stdout.readline() for watcher in watchers if watcher.stdout]
        for name in ("a", "b"):
            fleet.start_client(name, shift=2)
        texts = [
            first + watcher.communicate(timeout=60)[0]
            for first, watcher in zip(firsts, watchers, strict=True)
        ]
        assert [watcher.returncode for watcher in watchers] == [0, 0]
        yield WatchedFederation(
            fleet, [json.loads(line) for line in texts[0].splitlines()], texts[1].splitlines()
        )
    finally:
        fleet.end()


def watch(fleet: Fleet, *words: str) -> subprocess.Popen[str]:
    command = [*PROGRAM, "watch", "--server", fleet.address, *words]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_watch_reports_all_events_in_order(watched: WatchedFederation) -> None:
    kinds = [event["kind"] for event in watched.events]
    assert kinds[0] == kinds[-1] == "status"
    assert sorted(kinds[1:3]) == ["client_joined", "client_joined"]
    a_round = [
        "round_started",
        "update_received",
        "update_received",
        "aggregation_started",
        "round_committed",
    ]
    # From the second round on, its reports measure what the step before it did.
    later = [*a_round[:-1], "step_measured", a_round[-1]]
    evaluation = [
        "evaluation_started",
        "evaluation_reported",
        "evaluation_reported",
        "evaluation_finished",
    ]
    assert kinds[3:-1] == [
        *a_round,
        *later,
        *evaluation,
        *later,
        *evaluation,
        "federation_finished",
    ]
    assert [event["round"] for event in watched.events if event["kind"] == "round_committed"] == [
        0,
        1,
        2,
    ]
    sequence = [event["sequence"] for event in watched.events if "sequence" in event]
    assert sequence == list(range(1, len(sequence) + 1))


def test_watch_prints_plain_lines_without_a_terminal(watched: WatchedFederation) -> None:
    shown = [line.partition(" ")[2] for line in watched.lines]
    assert shown[0].endswith("waiting for 2 more clients")
    assert shown[-1] == "finished after 3 rounds: all rounds are done"
    assert sum(line.startswith("round ") for line in shown) == 3
    assert sum(line.startswith("evaluation after round ") for line in shown) == 2
    assert not any("\x1b" in line for line in shown)


def test_watch_of_a_finished_federation_shows_it_on_a_terminal_and_ends(
    watched: WatchedFederation,
) -> None:
    ours, theirs = pty.openpty()
    command = [*PROGRAM, "watch", "--server", watched.fleet.address]
    watching = subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"}
    )
    os.close(theirs)
    assert watching.wait(30) == 0
    screen = os.read(ours, 1 << 16).decode()
    assert "3 rounds of 3 done" in screen
    assert "\x1b[" in screen


def test_status_is_a_screen_for_people_and_json_for_programs(watched: WatchedFederation) -> None:
    screen = watched.fleet.run("status", "--server", watched.fleet.address).stdout
    for part in ("federation", "fedavg", "3 rounds of 3 done", "finished", "50.0 %"):
        assert part in screen
    status = json.loads(
        watched.fleet.run("status", "--server", watched.fleet.address, "--json").stdout
    )
    assert (status["version"], status["phase"], status["parameters"]) == (3, "finished", 1003)
    assert [(client["client"], client["updates_counted"]) for client in status["clients"]] == [
        ("a", 3),
        ("b", 3),
    ]


def test_export_saves_the_committed_model_and_replaces_a_file_only_with_force(
    watched: WatchedFederation, tmp_path: Path
) -> None:
    output = tmp_path / "out.safetensors"

    def export(*words: str) -> subprocess.CompletedProcess[str]:
        return watched.fleet.run(
            "export", "--server", watched.fleet.address, "--output", str(output), *words
        )

    done = export("--json")
    assert json.loads(done.stdout) == {
        "output": str(output),
        "version": 3,
        "size_bytes": output.stat().st_size,
    }
    np.testing.assert_array_equal(
        Model.load(output)[0].parameters, watched.fleet.model(3).parameters
    )
    refused = export("--version", "1")
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    assert export("--version", "1", "--force").returncode == 0
    np.testing.assert_array_equal(
        Model.load(output)[0].parameters, watched.fleet.model(1).parameters
    )
    missing = export("--version", "99", "--force")
    assert missing.returncode == 4
    assert "version 99 is not kept; the newest is 3" in missing.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]


def test_export_says_how_to_load_the_model(watched: WatchedFederation, tmp_path: Path) -> None:
    output = tmp_path / "it's a model.safetensors"
    done = watched.fleet.run("export", "--server", watched.fleet.address, "--output", str(output))
    _, for_torch, for_numpy = done.stdout.splitlines()
    names: dict[str, Any] = {}
    exec(for_numpy.removeprefix("numpy:").strip(), names)  # what we printed
    assert names["tensors"].keys() == watched.fleet.model(3).named().keys()
    assert "model.load_state_dict(load_file(" in for_torch


def test_export_into_a_missing_folder_is_reported(
    watched: WatchedFederation, tmp_path: Path
) -> None:
    output = tmp_path / "nowhere" / "out.safetensors"
    refused = watched.fleet.run(
        "export", "--server", watched.fleet.address, "--output", str(output)
    )
    assert refused.returncode == 2
    assert f"cannot write {output}: No such file or directory" in " ".join(refused.stderr.split())


def test_watch_waits_for_a_server_that_restarts_and_ends_cleanly_at_ctrl_c(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server()
    watcher = watch(fleet, "--json")
    assert watcher.stdout is not None
    kinds = [json.loads(watcher.stdout.readline())["kind"]]
    fleet.kill_server()
    kinds.append(json.loads(watcher.stdout.readline())["kind"])
    fleet.start_server()
    kinds.append(json.loads(watcher.stdout.readline())["kind"])
    assert kinds == ["status", "disconnected", "status"]
    watcher.send_signal(signal.SIGINT)
    _, errors = watcher.communicate(timeout=20)
    assert (watcher.returncode, errors) == (130, "")


@pytest.mark.parametrize(
    "command", [["status"], ["watch"], ["export", "--output", "never.safetensors"]]
)
def test_a_missing_server_is_reported_with_what_to_do(command: list[str], tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    environment = os.environ | {"FAIRFLEET_SERVER": address}
    done = subprocess.run(
        [*PROGRAM, *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 6
    assert done.stderr.startswith(
        f"error: no FairFleet server answers at {address} (Connection refused"
    )
    assert "--server host:port" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_address_without_a_port_is_a_usage_error() -> None:
    done = subprocess.run(
        [*PROGRAM, "status", "--server", "here"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "host:port" in done.stderr
