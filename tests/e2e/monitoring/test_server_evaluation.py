"""The server evaluates versions on test data of its own, in a process that may fail."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fairfleet.proto.v1 import operator_pb2 as pb
from tests.support.fleet import HERE, Fleet, free_port, until
from tests.support.program import ForkedProgram
from tests.support.scraping import get, scrape, series

TASK = "samples.measured_tasks:held_out"
SELECT = "select version, evaluation, failure from server_evaluations order by version"


def begin(fleet: Fleet, *, trouble: str = "none", **settings: Any) -> None:
    if not fleet.state.exists():
        fleet.init()
    trace, options = fleet.folder / "trace", {"trouble": trouble}
    options |= {"trace": str(trace), "size": str(fleet.size)}
    defaults = {"evaluation__task": TASK, "round__evaluate_every": 1, "rounds": 3}
    defaults |= {f"evaluation__options__{name}": value for name, value in options.items()}
    fleet.start_server(**defaults | settings)


def train(fleet: Fleet) -> None:
    for name in ("ann", "bob"):
        fleet.start_client(name, step_seconds=0.2)


def evaluated(fleet: Fleet) -> dict[int, tuple[dict[str, Any] | None, str]]:
    return {
        version: (json.loads(text) if text else None, failure)
        for version, text, failure in fleet.query(SELECT)
    }


def traced(fleet: Fleet) -> list[tuple[int, int]]:
    """Return process and version of each evaluation on the server's data."""
    lines = (fleet.folder / "trace").read_text().splitlines()
    return [(int(process), int(version)) for process, version in map(str.split, lines)]


def test_committed_versions_are_evaluated_on_the_servers_own_data(fleet: Fleet) -> None:
    port = free_port()
    begin(fleet, http__port=port, tensorboard=fleet.folder / "board")
    events = fleet.watch()
    train(fleet)
    until(lambda: 3 in evaluated(fleet), "the last version to be evaluated")
    measures, failure = evaluated(fleet)[3]
    assert failure == ""
    assert measures is not None
    assert abs(measures["measures"]["auc"]["value"] - 0.3) < 1e-6
    until(
        lambda: any(event.HasField("server_evaluated") and event.round == 3 for event in events),
        "the event",
    )
    name = series("fairfleet_server_evaluation_version")
    until(lambda: scrape(port).get(name) == 3, "the metrics")
    assert abs(scrape(port)[series("fairfleet_server_measure", measure="auc")] - 0.3) < 1e-6
    page = json.loads(get(f"http://127.0.0.1:{port}/api/state")[1])
    assert page["server_evaluations"][-1]["version"] == 3
    assert any((fleet.folder / "board").iterdir())
    assert any("own test data: auc 0.3000" in entry["text"] for entry in page["events"])


def test_a_restarted_server_does_not_evaluate_again_what_is_recorded(fleet: Fleet) -> None:
    begin(fleet, rounds=2)
    train(fleet)
    until(lambda: 2 in evaluated(fleet), "the last version to be evaluated")
    before = traced(fleet)
    fleet.wait_clients()  # they are told that the federation is finished
    assert fleet.stop_server() == 0
    begin(fleet, rounds=3)
    train(fleet)
    until(lambda: 3 in evaluated(fleet), "the next version to be evaluated")
    versions = [version for _, version in traced(fleet)]
    assert versions == [*(version for _, version in before), 3]


def test_a_killed_worker_is_replaced_and_no_round_waits_for_it(fleet: Fleet) -> None:
    begin(fleet, rounds=12)
    train(fleet)
    until(lambda: traced(fleet), "a first evaluation")
    victim = traced(fleet)[0][0]
    os.kill(victim, signal.SIGKILL)
    until(lambda: any(process != victim for process, _ in traced(fleet)), "another worker")
    until(lambda: fleet.status().phase == pb.PHASE_FINISHED, "the end")
    until(lambda: evaluated(fleet).get(12, (None, ""))[0], "the last version to be evaluated")


def test_a_version_that_kills_its_worker_twice_has_failed_and_training_goes_on(
    fleet: Fleet,
) -> None:
    begin(fleet, trouble="dies", evaluation__every=2, rounds=4)
    train(fleet)
    until(lambda: 4 in evaluated(fleet), "the last version to be evaluated")
    results = evaluated(fleet)
    assert results[4][0] is not None
    if 2 in results:  # else a newer version took its place
        assert results[2] == (None, "the worker process died: it ended by signal 9, 2 times")
        assert [version for _, version in traced(fleet)].count(2) == 2


def test_a_failed_or_endless_evaluation_is_recorded_with_its_reason(fleet: Fleet) -> None:
    begin(fleet, trouble="hang", evaluation__deadline_seconds=0.5, rounds=2)
    train(fleet)
    until(lambda: 2 in evaluated(fleet), "the last version to have failed")
    said = "it took longer than evaluation.deadline_seconds: 0.5 s"
    assert evaluated(fleet)[2] == (None, said)
    assert f"version 2 could not be evaluated here: {said}" in fleet.log("server.log")


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("odd", "Task.evaluate returned dict, expected Evaluation"),
        ("nan", "ValidationError"),
        ("exit", "it ended with exit code 1, 2 times"),
    ],
)
def test_what_is_no_evaluation_has_failed_with_the_reason(
    fleet: Fleet, trouble: str, said: str
) -> None:
    begin(fleet, trouble=trouble, rounds=2)
    train(fleet)
    until(lambda: 2 in evaluated(fleet), "the last version to have failed")
    result, failure = evaluated(fleet)[2]
    assert result is None
    assert said in failure


def is_running(process: int) -> bool:
    """Return whether a process runs; one that ended may not be collected by anyone here."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def begin_to_hang(fleet: Fleet) -> int:
    """Return the worker that evaluates the last version without end."""
    begin(fleet, trouble="hang", rounds=2, evaluation__every=2)
    train(fleet)
    until(lambda: traced(fleet), "the evaluation that hangs")
    return traced(fleet)[-1][0]


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_worker_that_hangs_ends_with_its_server_and_its_version_is_evaluated_later(
    fleet: Fleet, how: str
) -> None:
    worker = begin_to_hang(fleet)
    fleet.wait_clients()  # the federation is finished, and its clients know
    if how == "killed":
        fleet.kill_server()
    else:
        assert fleet.stop_server() == 0
    until(lambda: not is_running(worker), "the end of the worker")
    assert evaluated(fleet) == {}
    begin(fleet, rounds=2, evaluation__every=2)
    until(lambda: evaluated(fleet).get(2, (None, ""))[0], "the version to be evaluated")


def test_the_last_version_is_evaluated_after_a_kill_also_between_the_intervals(
    fleet: Fleet,
) -> None:
    begin(fleet, trouble="hang", rounds=2, evaluation__every=5)
    train(fleet)
    until(lambda: traced(fleet), "the evaluation that hangs")
    fleet.wait_clients()
    fleet.kill_server()
    begin(fleet, rounds=2, evaluation__every=5)
    until(lambda: evaluated(fleet).get(2, (None, ""))[0], "the version to be evaluated")


def test_a_server_can_be_stopped_while_its_test_data_are_loaded(fleet: Fleet) -> None:
    model, trace = fleet.init(), fleet.folder / "trace"
    words = ["server", "--listen", fleet.address, "--model", str(model), "--set", "http.port=0"]
    words += ["--state-dir", str(fleet.state), "--evaluate-task", TASK]
    for option in (f"trace={trace}", "trouble=loads"):
        words += ["--evaluate-option", option]
    server = ForkedProgram(words, HERE, os.environ, open(fleet.folder / "server.log", "a"))  # noqa: SIM115
    until(lambda: trace.exists() and trace.read_text(), "the worker to load")
    worker = traced(fleet)[0][0]
    server.send_signal(signal.SIGTERM)
    assert server.wait(20) == 0
    until(lambda: not is_running(worker), "the end of the worker")
    assert "Traceback" not in fleet.log("server.log")


def test_a_federation_that_is_continued_during_the_last_evaluation_does_not_exit(
    fleet: Fleet,
) -> None:
    begin(fleet, trouble="slow", rounds=2, evaluation__every=2, exit_when_finished="true")
    train(fleet)
    until(lambda: traced(fleet), "the last evaluation")
    fleet.wait_clients()
    assert fleet.run("continue", "--rounds", "4", "--server", fleet.address).returncode == 0
    until(lambda: 2 in evaluated(fleet), "the end of the evaluation")
    train(fleet)
    assert fleet.server is not None
    assert fleet.server.wait(30) == 0
    assert fleet.version() == 4


def test_a_mistake_in_the_task_is_told_before_the_server_serves(fleet: Fleet) -> None:
    model = fleet.init()
    words = ["server", "--listen", fleet.address, "--model", str(model), "--set", "http.port=0"]
    for task, options, said in (
        (
            "samples.measured_tasks:broken",
            [],
            "needs no_such_module, which is not installed",
        ),
        ("no_such_tasks:task", [], "--evaluate-task no_such_tasks:task: no module"),
        (
            "samples.measured_tasks",
            [],
            "--evaluate-task 'samples.measured_tasks' is not of the form module:name",
        ),
        ("samples.measured_tasks:measured", ["size=7"], "has another model than the federation"),
        ("samples.measured_tasks:measured", ["tested=0"], "has no test data"),
        (
            "samples.measured_tasks:measured",
            ["nonsense=1"],
            "options are given as --evaluate-option",
        ),
    ):
        state = fleet.folder / f"state-{abs(hash((task, *options)))}"
        flags = [word for option in options for word in ("--evaluate-option", option)]
        done = fleet.run(*words, "--state-dir", str(state), "--evaluate-task", task, *flags)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr
        assert "serving on" not in done.stdout
