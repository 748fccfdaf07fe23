"""The best version stays on the server, and participants keep what the federation allows."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from fairfleet.common.tensors import Model
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1 import operator_pb2 as op
from tests.support.device import Device
from tests.support.fleet import Fleet, until

BEST = 2  # every version moves the weights by -1, and the task's accuracy is best at -2
SETTINGS: dict[str, Any] = {"rounds": 5, "round__evaluate_every": 1, "keep_models": 1}


def start(fleet: Fleet, *flags: str, **options: Any) -> None:
    """Start two clients of a federation whose best version is `BEST`; `a` has the flags."""
    fleet.start_client("a", *flags, task="peaked", target=-BEST, **options)
    fleet.start_client("b", task="peaked", target=-BEST)


def command(fleet: Fleet, *words: str) -> subprocess.CompletedProcess[str]:
    return fleet.run(*words, "--server", fleet.address)


def exported(fleet: Fleet, *words: str) -> Path:
    output = fleet.folder / "exported.safetensors"
    done = command(fleet, "export", "--output", str(output), "--force", *words)
    assert done.returncode == 0, done.stderr
    return output


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="numpy") as file:
        return dict(file.metadata())


def weight(path: Path) -> float:
    parameters = Model.load(path)[0].parameters
    assert (parameters == parameters[0]).all()
    return float(parameters[0])


def models(fleet: Fleet) -> dict[int, dict[str, Any]]:
    lines = command(fleet, "models", "--json").stdout.splitlines()
    return {record["version"]: record for record in map(json.loads, lines)}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Yield a federation that a plateau ended three evaluations after its best version."""
    fleet = Fleet(tmp_path_factory.mktemp("ended"))
    try:
        fleet.init()
        fleet.start_server(**SETTINGS | {"rounds": 50, "end__plateau": 3, "keep_models": 2})
        start(fleet, "--save-model", str(fleet.folder / "a.safetensors"), trace=fleet.folder / "a")
        assert set(fleet.wait_clients().values()) == {0}
        yield fleet
    finally:
        fleet.end()


def test_the_best_version_outlives_early_stopping(ended: Fleet) -> None:
    assert ended.version() == 5
    assert ended.status().best_version == BEST
    assert weight(exported(ended, "--best")) == -BEST
    kept = {version: record["kept_because"] for version, record in models(ended).items()}
    assert kept == {0: ["initial"], BEST: ["best"], 4: ["recent"], 5: ["newest"]}


def test_the_initial_version_stays_however_many_follow_it(ended: Fleet) -> None:
    assert weight(exported(ended, "--version", "0")) == 0
    refused = command(ended, "export", "--output", str(ended.folder / "x"), "--version", "1")
    assert refused.returncode == 4
    assert "version 1 is not kept; the newest is 5. Kept are 0, 2, 4, 5" in refused.stderr
    for version in (2**63, 2**64 - 1):  # larger than any integer of the database
        words = ("--output", str(ended.folder / "x"), "--version", str(version))
        refused = command(ended, "export", *words)
        assert refused.returncode == 4
        assert f"version {version} is not kept; the newest is 5" in refused.stderr


def test_models_lists_scores_and_sizes(ended: Fleet) -> None:
    record = models(ended)[BEST]
    scores = {score["measure"]: score for score in record["scores"]}
    assert scores["accuracy"] == {
        "measure": "accuracy",
        "direction": "higher",
        "mean": 1.0,
        "worst_10_percent": 1.0,
        "clients": 2,
    }
    assert scores["loss"]["direction"] == "lower"
    (file,) = ended.query(f"select file from models where version = {BEST}")[0]
    assert record["size_bytes"] == (ended.state / file).stat().st_size
    text = command(ended, "models").stdout
    assert "best" in text
    assert "100.0 %" in text


def test_a_participant_ends_with_the_best_version(ended: Fleet) -> None:
    saved = ended.folder / "a.safetensors"
    best, _ = Model.load(exported(ended, "--best"))
    mine, said = Model.load(saved)
    assert mine.signature == best.signature
    for name, array in mine.named().items():
        np.testing.assert_array_equal(array, best.named()[name])
    (digest,) = ended.query(f"select digest from models where version = {BEST}")[0]
    (identity,) = ended.query("select value from meta where key = 'federation_id'")[0]
    assert (said["federation"], said["federation_id"]) == ("federation", identity)
    assert (said["version"], said["digest"]) == (str(BEST), digest)
    assert said["software"].startswith("fairfleet ")


def test_the_task_gets_every_evaluated_version_and_the_result(ended: Fleet) -> None:
    versions = [1, 2, 3, 4, 5, BEST]
    expected = [f"{version} {-version}" for version in versions]
    assert (ended.folder / "a").read_text().splitlines() == expected


def test_an_exported_model_says_where_it_comes_from(ended: Fleet) -> None:
    said, stored = metadata(exported(ended, "--best")), ended.query("select value, key from meta")
    assert said["federation_id"] in {value for value, key in stored if key == "federation_id"}
    assert (said["federation"], said["version"]) == ("federation", str(BEST))
    assert json.loads(said["rule"])["name"] == "fedavg"
    assert json.loads(said["optimizer"])["name"] == "sgd"
    assert json.loads(said["plan"])["batch_size"] == 32
    assert json.loads(said["scores"])["accuracy"]["worst_10_percent"] == 1.0
    assert said["settings_digest"] == ended.status().settings_digest.hex()
    assert said["software"].startswith("fairfleet ")
    (digest,) = ended.query(f"select digest from models where version = {BEST}")[0]
    assert said["digest"] == digest


def test_a_server_that_exits_waits_until_participants_have_the_result(fleet: Fleet) -> None:
    """The result is older than the newest version, and sent in a compact form."""
    fleet.init()
    saved = fleet.folder / "saved.safetensors"
    fleet.start_server(
        **SETTINGS,
        exit_when_finished=True,
        lease_seconds=60,
        compression__model="int8",
        compression__downlink="int8",
    )
    start(fleet, "--save-model", str(saved))
    assert set(fleet.wait_clients().values()) == {0}
    assert fleet.server is not None
    assert fleet.server.wait(20) == 0
    assert metadata(saved)["version"] == str(BEST)
    model = fleet.model(BEST)
    np.testing.assert_array_equal(Model.load(saved)[0].parameters, model.parameters)


def test_a_client_saves_nothing_where_the_terms_forbid_it(fleet: Fleet) -> None:
    fleet.init()
    saved = fleet.folder / "saved.safetensors"
    fleet.start_server(**SETTINGS | {"rounds": 2}, clients_keep="none")
    start(fleet, "--save-model", str(saved), trace=fleet.folder / "a")
    assert set(fleet.wait_clients().values()) == {0}
    assert fleet.version() == 2  # it trained all the same
    assert not saved.exists()
    assert not (fleet.folder / "a").exists()
    assert f"participants may keep no model (clients_keep of its server): {saved}" in fleet.log(
        "a.log"
    )


def test_a_client_saves_only_the_result_where_the_terms_say_so(fleet: Fleet) -> None:
    fleet.init()
    saved = fleet.folder / "saved.safetensors"
    fleet.start_server(**SETTINGS, clients_keep="final")
    start(fleet, "--save-model", str(saved), trace=fleet.folder / "a", trouble="ungrateful")
    assert set(fleet.wait_clients().values()) == {0}
    assert metadata(saved)["version"] == str(BEST)
    assert (fleet.folder / "a").read_text() == f"{BEST} {-BEST}\n"
    assert "on_model failed" in fleet.log("a.log")


@pytest.mark.parametrize(
    ("path", "problem"),
    [("none/saved", "cannot be written: No such file"), (".", "is a folder"), ("taken", "exists")],
)
def test_a_file_that_cannot_be_written_is_refused_at_the_start(
    fleet: Fleet, path: str, problem: str
) -> None:
    (fleet.folder / "taken").write_text("my notes")
    fleet.start_client("a", "--save-model", str(fleet.folder / path), task="shift")
    assert fleet.clients["a"].wait(30) == 2
    assert problem in " ".join(fleet.log("a.log").split())
    assert (fleet.folder / "taken").read_text() == "my notes"


def test_without_an_evaluation_no_version_is_the_best(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=1)
    refused = command(fleet, "export", "--output", str(fleet.folder / "x"), "--best")
    assert refused.returncode == 4
    assert "round.evaluate_every is 0" in " ".join(refused.stderr.split())
    both = command(fleet, "export", "--output", str(fleet.folder / "x"), "--best", "--version=0")
    assert both.returncode == 2
    assert not fleet.status().HasField("best_version")


def test_a_crash_between_an_evaluation_and_the_next_commit_keeps_the_best(fleet: Fleet) -> None:
    """The server dies after every commit, and after every first report of an evaluation."""
    fleet.init()
    start(fleet)
    deaths = 0
    while not deaths or fleet.version() < 4:
        fleet.start_server(die_at="transaction of a round, now evaluating", **SETTINGS)
        assert fleet.server is not None
        assert fleet.server.wait(60) == -9
        deaths += 1
        assert deaths < 20
    assert deaths > 4
    fleet.start_server(**SETTINGS)
    assert set(fleet.wait_clients().values()) == {0}
    assert sorted(models(fleet)) == [0, BEST, 5]
    assert weight(exported(fleet, "--best")) == -BEST
    fleet.stop_server()
    checked = fleet.run("server", "--check", "--state-dir", str(fleet.state))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert len(list((fleet.state / "models").glob("0*.safetensors"))) == 3


def test_an_initial_version_that_an_earlier_server_deleted_is_explained(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(**SETTINGS | {"rounds": 2})
    start(fleet)
    fleet.wait_clients()
    fleet.stop_server()
    fleet.change("update models set file = null where version = 0")
    fleet.start_server(**SETTINGS | {"rounds": 2})
    refused = command(fleet, "export", "--output", str(fleet.folder / "x"), "--version", "0")
    assert refused.returncode == 4
    assert "an earlier version of the server deleted it" in " ".join(refused.stderr.split())


def test_a_finished_client_that_never_leaves_does_not_keep_the_server(fleet: Fleet) -> None:
    """It may fetch the result while its lease lasts. An older client ends its session by Leave."""
    fleet.init()
    fleet.start_server(rounds=5, exit_when_finished=True, lease_seconds=2)
    device = Device(fleet.address, "device")
    device.join()
    fleet.operator().Stop(op.StopRequest(reason="enough"))
    finished = device.next_task().finished
    assert (finished.reason, finished.model.version) == ("enough", 0)
    (record,) = fleet.operator().Clients(op.ClientsRequest())
    assert record.state == op.CLIENT_STATE_FINISHED
    request = pb.FetchModelRequest(session=device.session, version=0)
    assert sum(len(chunk.data) for chunk in device.stub.FetchModel(request)) == (
        finished.model.size_bytes
    )
    assert fleet.server is not None
    until(lambda: fleet.server and fleet.server.poll() == 0, "the server to end", 20)


def test_a_restarted_server_still_has_the_result_and_the_newest_where_its_file_is_damaged(
    fleet: Fleet,
) -> None:
    fleet.init()
    fleet.start_server(**SETTINGS)
    start(fleet)
    fleet.wait_clients()
    for damage, version in ((False, BEST), (True, 5)):
        fleet.stop_server()
        if damage:
            (file,) = fleet.query(f"select file from models where version = {BEST}")[0]
            data = bytearray((fleet.state / file).read_bytes())
            data[-8] ^= 1
            (fleet.state / file).write_bytes(data)
        fleet.start_server(**SETTINGS)
        device = Device(fleet.address, "device")
        device.join()
        assert device.next_task().finished.model.version == version
        device.leave()
    assert "participants get version 5 as the result" in fleet.log("server.log")


@pytest.mark.parametrize("version", [2**63, 2**64 - 1, 2**64])
def test_a_version_that_no_server_can_have_is_refused_like_any_other(
    ended: Fleet, version: int
) -> None:
    words = ("--output", str(ended.folder / "x"), "--version", str(version))
    refused = command(ended, "export", *words)
    told = " ".join(refused.stderr.split())
    if version < 2**64:
        assert (refused.returncode, "is not kept; the newest is 5" in told) == (4, True)
    else:
        assert (refused.returncode, "give a smaller number" in told) == (2, True)
    assert "a call failed because of an error in the server" not in ended.log("server.log")


def test_an_output_that_no_file_can_have_as_its_name_is_refused(ended: Fleet) -> None:
    refused = command(ended, "export", "--output", str(ended.folder / ("x" * 300)))
    assert refused.returncode == 2
    assert "File name too long" in refused.stderr


def test_an_operator_learns_which_file_of_a_version_is_missing_or_damaged(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server()
    words = ("export", "--output", str(fleet.folder / "x"))
    file = fleet.state / "models" / "00000000.safetensors"
    data = file.read_bytes()
    for size in (4, 40):
        file.write_bytes(data[:size])
        refused = command(fleet, *words)
        assert refused.returncode == 4
        assert f"{file} is damaged" in refused.stderr.replace("\n", "")
    file.unlink()
    refused = command(fleet, *words)
    assert refused.returncode == 4
    told = refused.stderr.replace("\n", "")
    assert f"the file of version 0 is missing: {file}. Restore it" in told
    assert not (fleet.folder / "x").exists()
