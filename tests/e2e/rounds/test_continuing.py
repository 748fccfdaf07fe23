"""A finished federation goes on, also from an earlier version, and no clock ends it too early."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, cast

import grpc
import pytest

from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.storage.files.checksummed_arrays import load_vectors
from tests.support.fleet import Fleet, free_port, until
from tests.support.processes import clocked
from tests.support.scraping import get, scrape, series

CLIENTS = ("a", "b")
MOMENTUM = {"optimizer": "{name: adam}"}  # its vectors and its count of steps are state
YEAR = 365 * 86400.0


def command(fleet: Fleet, *words: str, exit_code: int = 0) -> CompletedProcess[str]:
    done = fleet.run(*words, "--server", fleet.address)
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done


def start_clients(fleet: Fleet, task: str = "shift") -> None:
    for number, name in enumerate(CLIENTS, 1):
        fleet.start_client(name, task=task, shift=number)


def finish(fleet: Fleet, version: int) -> None:
    """Wait until the federation is finished at a version, and its clients have left."""
    until(lambda: fleet.status().phase == pb.PHASE_FINISHED, "the end")
    assert fleet.version() == version
    assert set(fleet.wait_clients().values()) == {0}


def audit(fleet: Fleet) -> list[dict[str, Any]]:
    lines = command(fleet, "audit", "--json").stdout.splitlines()
    return [json.loads(line) for line in lines]


def undone(fleet: Fleet) -> list[int]:
    rows = fleet.query("select round from rounds where undone_by is not null order by round")
    return [number for (number,) in rows]


def optimizer_of(fleet: Fleet, version: int) -> tuple[str, dict[str, bytes]]:
    """Return the state of rule and optimizer of a version: its JSON and its vectors."""
    query = f"select rule_state, vectors_file from models where version = {version}"
    ((state, file),) = fleet.query(query)
    vectors = load_vectors(fleet.state / file)
    assert vectors
    return state, {name: vector.tobytes() for name, vector in vectors.items()}


def is_intact(fleet: Fleet) -> bool:
    done = fleet.run("server", "--check", "--state-dir", str(fleet.state))
    assert done.returncode == 0, done.stderr
    return done.returncode == 0


def test_a_federation_that_ended_by_its_rounds_goes_on_in_the_running_server(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=2)
    events = fleet.watch()
    start_clients(fleet)
    finish(fleet, 2)
    refused = command(fleet, "continue", exit_code=4)
    assert "2 rounds are planned. Give --rounds with more than 2." in refused.stderr
    assert "continues at version 2 of 4" in command(fleet, "continue", "--rounds", "4").stdout
    start_clients(fleet)
    finish(fleet, 4)
    fleet.prove(4)
    continued = [event for event in events if event.HasField("federation_continued")]
    assert [event.federation_continued.rounds_planned for event in continued] == [4]
    assert [(entry["action"], bool(entry["result"])) for entry in audit(fleet)] == [
        ("continue", True),
        ("continue", False),
    ]
    assert fleet.status().rounds_planned == 4


def test_new_limits_outlive_a_restart_until_the_setting_itself_changes(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=1)
    start_clients(fleet)
    finish(fleet, 1)
    fleet.stop_server()
    fleet.start_server(rounds=1)  # a server on a finished directory serves
    assert fleet.status().phase == pb.PHASE_FINISHED
    command(fleet, "continue", "--rounds", "3")
    fleet.kill_server()
    fleet.start_server(rounds=1)
    assert (fleet.status().phase, fleet.status().rounds_planned) == (pb.PHASE_WAITING, 3)
    start_clients(fleet)
    finish(fleet, 3)
    fleet.stop_server()
    fleet.start_server(rounds=4)
    assert (fleet.status().phase, fleet.status().rounds_planned) == (pb.PHASE_WAITING, 4)
    fleet.stop_server()
    assert is_intact(fleet)


def test_a_mistaken_stop_can_be_withdrawn_before_the_round_is_over(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=2)
    fleet.start_client("a", step_seconds=0.2, steps=15)
    fleet.start_client("b")
    until(lambda: fleet.status().received == 1, "the first update")
    command(fleet, "stop", "--yes", "--reason", "a mistake")
    refused = command(fleet, "continue", "--from", "0", exit_code=4)
    assert "can be gone back to when it has finished" in refused.stderr
    command(fleet, "continue")
    finish(fleet, 2)
    fleet.prove(2)


def test_a_stopped_federation_goes_on_with_clients_that_wait(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=5)
    command(fleet, "stop", "--yes")
    assert fleet.status().finished_reason == "stopped by an operator"
    command(fleet, "continue")
    assert fleet.status().finished_reason == ""
    start_clients(fleet)
    finish(fleet, 5)
    fleet.prove(5)


def test_what_runs_anyway_is_not_continued(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=5)
    refused = command(fleet, "continue", "--rounds", "9", exit_code=4)
    assert "the federation is not finished" in refused.stderr
    assert fleet.status().rounds_planned == 5


def test_the_evaluations_before_do_not_count_towards_the_next_plateau(fleet: Fleet) -> None:
    fleet.init()
    ends = {"round__evaluate_every": 1, "end__plateau": 2}
    fleet.start_server(rounds=100, **ends)
    start_clients(fleet)  # whose accuracy never changes
    finish(fleet, 3)
    command(fleet, "continue")
    fleet.kill_server()
    fleet.start_server(rounds=100, **ends)
    start_clients(fleet)
    finish(fleet, 6)


def test_a_federation_goes_back_and_trains_on_as_if_the_rounds_had_not_been(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=5, keep_models=20, **MOMENTUM)
    start_clients(fleet)
    finish(fleet, 5)
    answer = command(fleet, "continue", "--from", "3", "--rounds", "8").stdout
    assert "continues at version 6 of 8, which has the model of version 3" in answer
    assert fleet.model(6).parameters.tobytes() == fleet.model(3).parameters.tobytes()
    assert undone(fleet) == [3, 4]
    start_clients(fleet)
    finish(fleet, 8)
    # Rounds 6 and 7 did what rounds 3 and 4 had done: with the same model, rule and optimizer.
    for again, before in ((7, 4), (8, 5)):
        assert fleet.model(again).parameters.tobytes() == fleet.model(before).parameters.tobytes()
        assert optimizer_of(fleet, again) == optimizer_of(fleet, before)
    records = [json.loads(line) for line in command(fleet, "rounds", "--json").stdout.splitlines()]
    assert [record["round"] for record in records if record["undone"]] == [3, 4]
    assert records[5]["clients"] == []
    assert "4 (undone)" in command(fleet, "rounds").stdout
    (client, _) = [
        json.loads(line) for line in command(fleet, "clients", "--json").stdout.splitlines()
    ]
    assert client["updates_counted"] in (5, "5")  # rounds 0, 1, 2, 6 and 7
    fleet.stop_server()
    assert is_intact(fleet)


def test_only_a_version_that_is_kept_can_be_gone_back_to(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=4, keep_models=1)
    start_clients(fleet)
    finish(fleet, 4)
    for version in ("2", "9"):
        words = ("continue", "--from", version, "--rounds", "9")
        assert "fairfleet models" in command(fleet, *words, exit_code=4).stderr
    with pytest.raises(grpc.RpcError) as refused:
        fleet.operator().Continue(pb.ContinueRequest(from_version=2**63), timeout=10)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert fleet.status().phase == pb.PHASE_FINISHED
    command(fleet, "continue", "--from", "0", "--rounds", "9")  # the initial one stays
    assert undone(fleet) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "point",
    [
        "transaction of a round, now waiting",
        "what Continue did, before its answer",
    ],
)
def test_a_crash_after_going_back_neither_loses_nor_repeats_it(fleet: Fleet, point: str) -> None:
    fleet.init()
    fleet.start_server(rounds=2)
    start_clients(fleet)
    finish(fleet, 2)
    fleet.stop_server()
    fleet.environment = {"FAIRFLEET_TEST_DIE_AT": point}
    fleet.start_server(rounds=2)
    fleet.environment = {}
    with pytest.raises(grpc.RpcError):
        fleet.operator().Continue(pb.ContinueRequest(from_version=1, rounds=4), timeout=20)
    assert fleet.server is not None
    assert fleet.server.wait(20) == -9
    fleet.start_server(rounds=2)
    refused = command(fleet, "continue", "--from", "1", "--rounds", "4", exit_code=4)
    assert "the federation is not finished" in refused.stderr
    assert undone(fleet) == [1]
    start_clients(fleet)
    finish(fleet, 4)
    assert fleet.model(3).parameters.tobytes() == fleet.model(1).parameters.tobytes()
    assert fleet.model(4).parameters.tobytes() == fleet.model(2).parameters.tobytes()
    entries = [(entry["action"], bool(entry["result"])) for entry in audit(fleet)]
    assert entries == [("continue", False), ("continue", True)]
    fleet.stop_server()
    assert is_intact(fleet)


def test_going_back_into_undone_rounds_lets_them_stand_again(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=4, keep_models=20)
    start_clients(fleet)
    finish(fleet, 4)
    command(fleet, "continue", "--from", "1", "--rounds", "6")
    start_clients(fleet)
    finish(fleet, 6)
    assert undone(fleet) == [1, 2, 3]
    command(fleet, "continue", "--from", "3", "--rounds", "8")
    assert undone(fleet) == [3, 4, 5]
    start_clients(fleet)
    finish(fleet, 8)
    assert fleet.model(8).parameters.tobytes() == fleet.model(4).parameters.tobytes()
    fleet.stop_server()
    assert is_intact(fleet)


def test_a_round_whose_mark_contradicts_the_journal_is_found(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=2)
    start_clients(fleet)
    finish(fleet, 2)
    command(fleet, "continue", "--from", "1", "--rounds", "4")
    fleet.stop_server()
    assert is_intact(fleet)
    fleet.change("update rounds set undone_by = null where round = 1")
    done = fleet.run("server", "--check", "--state-dir", str(fleet.state))
    assert "round 2 was undone, says the journal" in done.stderr


@pytest.mark.slow
def test_going_back_gives_no_privacy_budget_back(fleet: Fleet) -> None:
    fleet.init(task="plain")
    privacy = "{where: client, clip: 1.0, noise_multiplier: 1.0}"
    fleet.start_server(rounds=2, privacy=privacy)
    start_clients(fleet, task="plain")
    finish(fleet, 2)
    spent = fleet.status().privacy.epsilon
    assert spent > 0
    command(fleet, "continue", "--from", "0", "--rounds", "4")
    assert fleet.status().privacy.epsilon == spent
    start_clients(fleet, task="plain")
    finish(fleet, 4)
    assert fleet.status().privacy.epsilon > spent


def test_rows_of_undone_rounds_leave_the_history(fleet: Fleet) -> None:
    fleet.init()
    rule = {"rule__name": "fedmdfg", "round__clients": 2, "round__minimum_clients": 2}
    fleet.start_server(rounds=3, **rule)
    start_clients(fleet)
    finish(fleet, 3)
    rounds_of_rows = "select distinct round from history"
    assert fleet.query(rounds_of_rows) in ([(2,)], [])
    command(fleet, "continue", "--from", "2", "--rounds", "5")
    assert fleet.query(rounds_of_rows) == []
    start_clients(fleet)
    finish(fleet, 5)
    fleet.stop_server()
    assert is_intact(fleet)


# ---- clocks ------------------------------------------------------------------------------------


@pytest.fixture
def clock(fleet: Fleet) -> Path:
    """Let the fleet's processes have a wall clock that a file moves; return the file."""
    file = fleet.folder / "clock"
    file.write_text("0")
    fleet.program = [sys.executable, str(Path(clocked.__file__))]
    fleet.environment = {clocked.VARIABLE: str(file)}
    return file


@pytest.mark.parametrize("jump", [YEAR, -YEAR])
@pytest.mark.slow
def test_a_jump_of_the_wall_clock_ends_nothing(fleet: Fleet, clock: Path, jump: float) -> None:
    limits = {"end__after_seconds": 3600, "round__longest_wait_seconds": 3600}
    fleet.init()
    fleet.start_server(rounds=6, round__minimum_clients=1, **limits)
    fleet.start_client("a")
    fleet.wait_for_version(1)
    clock.write_text(str(jump))
    fleet.wait_for_version(3)
    fleet.kill_server()
    clock.write_text("0")
    fleet.start_server(rounds=6, round__minimum_clients=1, **limits)
    finish(fleet, 6)
    fleet.prove(6)
    assert fleet.status().finished_reason == "all rounds are done"
    assert "silent for" not in fleet.log("server.log")
    fleet.stop_server()
    assert is_intact(fleet)


@pytest.mark.slow
def test_time_counts_over_restarts_but_not_while_the_server_is_down(
    fleet: Fleet, clock: Path
) -> None:
    fleet.init()
    fleet.start_server(rounds=2)
    start_clients(fleet)
    finish(fleet, 2)
    fleet.stop_server()
    recorded = "select value from meta where key = 'elapsed_seconds'"
    ((before,),) = fleet.query(recorded)
    assert 0 < float(before) < 600
    clock.write_text(str(YEAR))  # for so long it was down
    fleet.start_server(rounds=3, end__after_seconds=3600)
    start_clients(fleet)
    finish(fleet, 3)
    ((after,),) = fleet.query(recorded)
    assert float(before) < float(after) < 600
    fleet.stop_server()
    fleet.change(f"update meta set value = '{YEAR}' where key = 'elapsed_seconds'")
    fleet.start_server(rounds=4, end__after_seconds=3600)
    start_clients(fleet)
    finish(fleet, 3)
    assert "3600 s were allowed" in fleet.status().finished_reason
    refused = command(fleet, "continue", exit_code=4)
    assert "Give --seconds" in refused.stderr
    command(fleet, "continue", "--seconds", "3600")
    start_clients(fleet)
    finish(fleet, 4)


def test_time_ends_a_federation_that_waits_for_clients(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=9, end__after_seconds=1)
    until(lambda: fleet.status().phase == pb.PHASE_FINISHED, "the end")
    assert "1 s were allowed" in fleet.status().finished_reason
    command(fleet, "continue", "--seconds", "1")
    until(lambda: fleet.status().phase == pb.PHASE_FINISHED, "the second end")


def test_time_ends_a_round_that_waits_for_a_client_that_is_missing(fleet: Fleet) -> None:
    """One of two has answered, and the deadline has passed: the quorum is missed for ever."""
    fleet.init()
    waits = {"round__deadline_seconds": 1, "round__deadline": "fixed", "round__quorum": 1.0}
    fleet.start_server(rounds=9, end__after_seconds=3, **waits)
    fleet.start_client("a")
    fleet.start_client("b", step_seconds=600)
    until(lambda: fleet.status().phase == pb.PHASE_FINISHED, "the end", seconds=60)
    assert fleet.version() == 1  # the update that was there still counts
    assert "3 s were allowed" in fleet.status().finished_reason


# ---- what is shown -------------------------------------------------------------------------------


def page(port: int) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(get(f"http://127.0.0.1:{port}/api/state")[1]))


def shown_rounds(port: int) -> list[int]:
    return [entry["round"] for entry in page(port)["rounds"]]


def test_undone_rounds_leave_the_page_and_the_metrics_also_after_a_restart(fleet: Fleet) -> None:
    fleet.init()
    port = free_port()
    settings = {"round__evaluate_every": 1, "keep_models": 20, "http__port": port}
    fleet.start_server(rounds=5, **settings)
    start_clients(fleet)
    finish(fleet, 5)
    until(lambda: shown_rounds(port) == [0, 1, 2, 3, 4], "all rounds on the page")
    command(fleet, "continue", "--from", "3", "--rounds", "7")
    for restarted in (False, True):
        if restarted:
            fleet.stop_server()
            fleet.start_server(rounds=5, **settings)
        until(lambda: shown_rounds(port) == [0, 1, 2], "the rounds that count")
        state = page(port)
        assert [entry["version"] for entry in state["evaluations"]] == [1, 2, 3]
        for row in state["clients"]:
            assert (row["updates"], row["last_round"], row["evaluated"]) == (3, 2, 3)
        assert scrape(port)[series("fairfleet_evaluation_version")] == 3
    rows = command(fleet, "clients", "--json").stdout.splitlines()
    assert {json.loads(row)["evaluated_version"] for row in rows} <= {3, "3"}
    start_clients(fleet)
    finish(fleet, 7)
    until(lambda: shown_rounds(port) == [0, 1, 2, 6], "the new round")
    assert [entry["version"] for entry in page(port)["evaluations"]] == [1, 2, 3, 7]
    command(fleet, "continue", "--from", "5", "--rounds", "9")  # its rounds stand again
    until(lambda: shown_rounds(port) == [0, 1, 2, 3, 4], "the rounds that count again")
    assert [entry["version"] for entry in page(port)["evaluations"]] == [1, 2, 3, 4, 5]


def test_a_start_on_a_finished_or_changed_federation_says_what_to_do(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=1)
    start_clients(fleet)
    finish(fleet, 1)
    assert "other settings" not in fleet.log("server.log")
    told = command(fleet, "clients", "--json").stdout.splitlines()
    assert [json.loads(line)["state"] for line in told] == ["finished", "finished"]
    fleet.stop_server()
    port = free_port()
    fleet.start_server(rounds=1, http__port=port, plan__learning_rate=0.5)
    until(
        lambda: "has finished at version 1 (all rounds are done)" in fleet.log("server.log"), "log"
    )
    log = fleet.log("server.log")
    assert "`fairfleet continue --rounds N`" in log
    assert "plan.learning_rate was" in log
    assert "and is 0.5" in log
    assert "give another --state-dir" in log
    told = command(fleet, "clients", "--json").stdout.splitlines()
    assert {json.loads(line)["state"] for line in told} == {"finished"}
    rows = json.loads(get(f"http://127.0.0.1:{port}/api/state")[1])["clients"]
    assert {row["state"] for row in rows} == {"done"}
