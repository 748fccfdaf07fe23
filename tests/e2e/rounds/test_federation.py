"""Federations of real processes, without faults and with them."""

from __future__ import annotations

import signal
import time

import pytest

from fairfleet.proto.v1 import operator_pb2 as pb
from tests.support.fleet import Fleet, until
from tests.support.postgresql import PostgreSQL

FINISHED = {"exit_when_finished": True}


def test_ten_clients_train_and_the_model_agrees_with_the_records(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=4, round__minimum_clients=10, round__evaluate_every=2, **FINISHED)
    for k in range(10):
        fleet.start_client(f"client-{k}", shift=k, samples=10 + k)
    assert set(fleet.wait_clients().values()) == {0}
    assert fleet.server is not None
    assert fleet.server.wait(20) == 0
    fleet.prove(4)
    assert all(len(record["contributions"]) == 10 for record in fleet.records())
    evaluated = fleet.query(
        "select version, count(*) from evaluations where evaluation is not null group by version"
    )
    assert evaluated == [(2, 10), (4, 10)]


def test_fp16_updates_arrive_at_half_the_size(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=2, codec="fp16", **FINISHED)
    for name in ("a", "b"):
        fleet.start_client(name, shift=2)
    fleet.wait_clients()
    fleet.prove(2)
    sizes = {size for (size,) in fleet.query("select size_bytes from updates")}
    assert sizes == {2 * 1003 + 4 * 2 + 8}


def test_a_client_killed_in_mid_training_does_not_stop_the_round(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(
        rounds=3, round__minimum_clients=3, round__quorum=0.5, lease_seconds=2, **FINISHED
    )
    for name in ("a", "b"):
        fleet.start_client(name)
    fleet.start_client("c", steps=100, step_seconds=0.1)
    until(lambda: fleet.status().asked == 1, "c to be the last one training")
    fleet.kill_client("c")
    fleet.wait_for_version(1)
    assert fleet.records()[0]["dropped"] == ["c"]
    fleet.start_client("c")  # the minimum is three, so the client is needed again
    fleet.wait_for_version(3)
    fleet.prove(3)
    assert {c["client"] for c in fleet.records()[2]["contributions"]} == {"a", "b", "c"}


def test_a_client_killed_in_mid_upload_resumes_at_the_servers_offset(fleet: Fleet) -> None:
    size = 20_000_000
    fleet.init(size)
    fleet.start_server(rounds=1, round__minimum_clients=1, lease_seconds=20)
    fleet.start_client("a")
    uploads = fleet.state / "uploads"

    def partly_there() -> bool:
        return any(0 < path.stat().st_size < 3 * size for path in uploads.glob("00000000-*"))

    until(partly_there, "a part of the upload")
    fleet.kill_client("a")
    assert 0 < fleet.status().bytes_received < 4 * size
    assert fleet.version() == 0
    fleet.start_client("a")
    assert fleet.clients["a"].wait(60) == 0
    fleet.prove(1)
    (total,) = fleet.query("select size_bytes from updates")[0]
    assert total == 4 * (size + 3) + 4 * 2 + 8
    sent_again = fleet.status().bytes_received - total
    assert sent_again < 3 * (1 << 20), "more was sent again than the bytes in flight"


@pytest.mark.slow
def test_a_client_that_never_answers_is_dropped_at_the_deadline(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(
        rounds=2, round__minimum_clients=3, round__deadline_seconds=1.5, round__quorum=0.6
    )
    for name in ("a", "b"):
        fleet.start_client(name)
    fleet.start_client("sleeper", trouble="hang")
    fleet.wait_for_version(2)
    fleet.prove(2)
    assert [record["dropped"] for record in fleet.records()] == [["sleeper"], ["sleeper"]]


def test_a_failing_task_costs_the_round_only_its_own_client(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=3, round__minimum_clients=4, round__quorum=0.5)
    for name, trouble in (("a", ""), ("b", ""), ("broken", "fail"), ("diverged", "nan")):
        fleet.start_client(name, trouble=trouble)
    fleet.wait_for_version(3)
    fleet.prove(3)
    assert {c["client"] for record in fleet.records() for c in record["contributions"]} == {
        "a",
        "b",
    }
    assert fleet.clients["broken"].wait(20) == 1
    assert "RuntimeError: this task always fails" in fleet.log("broken.log")
    assert "RuntimeError" in fleet.log("server.log")
    assert "this task always fails" not in fleet.log(
        "server.log"
    )  # the text of an error may quote data
    assert "element 0 of tensor weight is nan, not a finite number" in fleet.log("diverged.log")


def test_a_failed_evaluation_is_recorded_as_failed(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(
        rounds=1, round__evaluate_every=1, **FINISHED | {"round__minimum_clients": 3}
    )
    fleet.start_client("a")
    fleet.start_client("b", trouble="blind")
    fleet.start_client("open", "--send-error-text", trouble="blind")
    fleet.wait_clients()
    rows = dict(fleet.query("select client, failure from evaluations where version = 1"))
    assert rows == {"a": "", "b": "RuntimeError", "open": "RuntimeError: this task cannot evaluate"}
    assert "RuntimeError: this task cannot evaluate" in fleet.log("b.log")


def test_a_server_killed_between_rounds_continues_after_its_restart(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=8)
    for name, shift in (("a", 1), ("b", 3)):
        fleet.start_client(name, shift=shift, steps=2, step_seconds=0.05)
    for version in (2, 5):
        fleet.wait_for_version(version)
        fleet.kill_server()
        fleet.start_server(rounds=8)
    fleet.wait_for_version(8)
    fleet.prove(8)


@pytest.mark.slow
def test_a_server_killed_during_a_round_keeps_every_acknowledged_update(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=2, round__minimum_clients=3, lease_seconds=20)
    for name in ("a", "b"):
        fleet.start_client(name)
    fleet.start_client("slow", steps=40, step_seconds=0.1)
    until(
        lambda: fleet.query("select count(*) from updates")[0][0] == 2, "two updates to be stored"
    )
    before = fleet.query("select client, digest, unix_seconds from updates order by client")
    fleet.kill_server()
    fleet.start_server(rounds=2, round__minimum_clients=3, lease_seconds=20)
    fleet.wait_for_version(1)
    after = fleet.query(
        "select client, digest, unix_seconds from updates where round = 0 order by client"
    )
    assert [row for row in after if row[0] != "slow"] == before
    assert len(after) == 3
    fleet.wait_for_version(2)
    fleet.prove(2)


@pytest.mark.slow
def test_with_durability_per_round_clients_train_again_after_a_crash(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=2, round__minimum_clients=3, durability="round", lease_seconds=20)
    for name in ("a", "b"):
        fleet.start_client(name)
    fleet.start_client("slow", steps=15, step_seconds=0.1)
    until(lambda: fleet.status().received == 2, "two updates")
    fleet.kill_server()
    fleet.start_server(rounds=2, round__minimum_clients=3, durability="round", lease_seconds=20)
    fleet.wait_for_version(2)
    fleet.prove(2)
    assert all(len(record["contributions"]) == 3 for record in fleet.records())


@pytest.mark.slow
def test_many_kills_of_server_and_clients_lose_nothing(fleet: Fleet) -> None:
    fleet.init(300_000)
    fleet.start_server(rounds=12, round__minimum_clients=2, round__quorum=0.4, lease_seconds=2)
    for name, shift in (("a", 1), ("b", 2), ("c", 4)):
        fleet.start_client(name, shift=shift, steps=3, step_seconds=0.03)
    for kill in range(6):
        time.sleep(0.37 * (kill % 3 + 1))
        if kill % 2:
            fleet.kill_client("b")
            fleet.start_client("b", shift=2, steps=3, step_seconds=0.03)
        fleet.kill_server()
        fleet.start_server(rounds=12, round__minimum_clients=2, round__quorum=0.4, lease_seconds=2)
    fleet.wait_for_version(12)
    fleet.prove(12)


def test_a_finished_federation_can_be_continued_for_more_rounds(fleet: Fleet) -> None:
    fleet.init()
    for rounds in (2, 3):
        fleet.start_server(rounds=rounds, **FINISHED)
        for name in ("a", "b"):
            fleet.start_client(name)
        fleet.wait_clients()
        assert fleet.server is not None
        fleet.server.wait(20)
    fleet.prove(3)


def test_sigterm_ends_server_and_client_cleanly(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=1000)
    fleet.start_client("a")
    fleet.start_client("b", steps=200, step_seconds=0.1)
    until(lambda: fleet.status().asked == 1, "b to train")
    events = fleet.watch()
    for name in ("b", "a"):
        fleet.clients[name].send_signal(signal.SIGTERM)
        assert fleet.clients[name].wait(10) == 0
    until(
        lambda: sum(event.HasField("client_gone") for event in events) == 2,
        "both to have said goodbye",
    )
    assert {e.client_gone.reason for e in events if e.HasField("client_gone")} == {"stopped"}
    assert fleet.stop_server() == 0


def test_clients_continue_when_a_stopped_server_returns(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=1000)
    for name in ("a", "b"):
        fleet.start_client(name)
    fleet.wait_for_version(2)
    assert fleet.stop_server() == 0
    stopped_at = fleet.version()
    fleet.start_server(rounds=stopped_at + 3)
    fleet.wait_for_version(stopped_at + 3)
    fleet.prove(stopped_at + 3)


def test_an_operator_pauses_resumes_and_stops(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=10_000)
    operator = fleet.operator()
    for name in ("a", "b"):
        fleet.start_client(name)
    fleet.wait_for_version(1)
    operator.Pause(pb.PauseRequest())
    until(lambda: fleet.status().phase == pb.PHASE_WAITING, "the round under way to end")
    version = fleet.version()
    time.sleep(0.5)
    assert fleet.version() == version
    fleet.kill_server()
    fleet.start_server(rounds=10_000)  # a pause is durable
    until(lambda: fleet.status().connected == 2, "the clients to come back")
    assert fleet.status().paused
    assert fleet.version() == version
    operator = fleet.operator()
    operator.Resume(pb.ResumeRequest())
    fleet.wait_for_version(version + 2)
    operator.Stop(pb.StopRequest(reason="enough"))
    assert set(fleet.wait_clients().values()) == {0}
    fleet.prove(fleet.version())


def test_a_revoked_client_is_excluded_at_once_and_permanently(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=10_000, round__minimum_clients=2)
    for name in ("a", "b", "mallory"):
        fleet.start_client(name)
    fleet.wait_for_version(1)
    fleet.operator().Revoke(pb.RevokeRequest(client="mallory", reason="sends nonsense"))
    assert fleet.clients["mallory"].wait(20) == 4
    assert "mallory was revoked: sends nonsense" in fleet.log("mallory.log")
    fleet.start_client("mallory")
    assert fleet.clients["mallory"].wait(20) == 4
    version = fleet.version()
    fleet.wait_for_version(version + 2)
    assert {c["client"] for c in fleet.records()[-1]["contributions"]} == {"a", "b"}


@pytest.mark.slow
def test_a_federation_with_its_database_in_postgresql_survives_a_kill(
    fleet: Fleet, postgresql: PostgreSQL
) -> None:
    fleet.init()
    settings = {"database": postgresql.new_database(), "round__evaluate_every": 2}
    fleet.start_server(rounds=10_000, **settings)
    for name in ("a", "b"):
        fleet.start_client(name)
    until(lambda: fleet.status().version >= 2, "two rounds")
    fleet.kill_server()
    fleet.start_server(rounds=10_000, **settings)
    version = fleet.status().version
    assert version >= 2
    until(lambda: fleet.status().version >= version + 2, "two more rounds")
    fleet.stop_server()
    done = fleet.run(
        "server", "--check", "--state-dir", str(fleet.state), "--database", settings["database"]
    )
    assert done.returncode == 0, done.stderr
    assert not (fleet.state / "federation.db").exists()
