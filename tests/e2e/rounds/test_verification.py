"""Verified descent over the network: clients try steps before the steps are taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.support.device import Device
from tests.support.fleet import Fleet, until

pytestmark = pytest.mark.slow

VERIFIED = {"verification__halvings": 3, "verification__threshold": 1.0}


def start(fleet: Fleet, targets: dict[str, float], **options: Any) -> None:
    for name, target in targets.items():
        fleet.start_client(name, task="quadratic", target=target, **options)


def taken(fleet: Fleet) -> list[float]:
    return [record["verification"]["factor"] for record in fleet.records()]


def prove(fleet: Fleet, rounds: int, stride: float = 3.0) -> None:
    """Check that the model follows from the recorded factors, weights and the clients' targets."""
    model = 0.0
    for record in fleet.records()[:rounds]:
        factor = record["verification"]["factor"] if record.get("verification") else 1.0
        targets = {
            c["client"]: fleet.options[c["client"]]["target"] for c in record["contributions"]
        }
        weights = {c["client"]: c["weight"] for c in record["contributions"]}
        model -= factor * sum(
            weights[client] * stride * (model - target) for client, target in targets.items()
        )
    np.testing.assert_allclose(fleet.model(rounds).parameters, model, rtol=1e-5)


def test_the_longest_step_that_lowers_enough_losses_is_taken(fleet: Fleet) -> None:
    fleet.init(task="quadratic")
    fleet.start_server(rounds=4, **VERIFIED)
    trace = fleet.folder / "tried"
    start(fleet, {"a": 1.0, "b": 1.5}, trace=trace)
    fleet.wait_for_version(4)
    assert set(fleet.wait_clients().values()) == {0}
    first = fleet.records()[0]["verification"]
    assert first["tried"] == [1.0, 0.5, 0.25, 0.125]
    assert first["improved"] == [0.0, 1.0, 1.0, 1.0]  # the first is three times too far
    assert (first["outcome"], first["factor"], first["answered"], first["silent"]) == (
        "accepted",
        0.5,
        ["a", "b"],
        [],
    )
    prove(fleet, 4)
    tried = {round(float(line), 5) for line in Path(trace).read_text().split()[:8]}
    assert tried == {3.75, 1.875, 0.9375, 0.46875}


@pytest.mark.parametrize("codec", ["raw32", "int8"])
def test_clients_that_tried_the_step_do_not_download_the_next_model(
    fleet: Fleet, codec: str
) -> None:
    size = 200_000
    fleet.init(size, task="quadratic")
    fleet.start_server(rounds=4, compression__downlink=codec, **VERIFIED)
    start(fleet, {"a": 1.0, "b": 1.5})
    fleet.wait_for_version(3)
    sent = fleet.status().bytes_sent
    model_bytes, step = 4 * size, 4 * size if codec == "raw32" else size
    assert (
        sent < 2 * (model_bytes + 4 * step) + 3 * model_bytes
    )  # both fetched the first model, and only steps after it
    assert set(fleet.wait_clients().values()) == {0}
    assert "fetched whole" not in fleet.log("a.log") + fleet.log("b.log")
    assert taken(fleet)[0] == 0.5
    for client in "ab":
        assert "do not lead" not in fleet.log(f"{client}.log")


@pytest.mark.parametrize(
    ("fallback", "factor"), [("commit", 1.0), ("smallest", 0.125), ("skip", 0.0)]
)
def test_a_step_that_lowers_too_few_losses_ends_in_the_fallback(
    fleet: Fleet, fallback: str, factor: float
) -> None:
    fleet.init(task="quadratic")
    fleet.start_server(rounds=2, verification__fallback=fallback, **VERIFIED)
    start(fleet, {"a": 1.0, "b": -0.5})  # each step that helps one client harms the other
    fleet.wait_for_version(2)
    assert set(fleet.wait_clients().values()) == {0}
    verification = fleet.records()[0]["verification"]
    assert (verification["outcome"], verification["factor"]) == (fallback, factor)
    assert "50% of 2 losses fell, 100% were required" in verification["reason"]
    prove(fleet, 2)
    if fallback == "skip":
        digests = dict(fleet.query("select version, digest from models"))
        assert digests[0] == digests[1] == digests[2]


@pytest.mark.slow
def test_clients_that_cannot_try_a_step_delay_the_round_at_most_to_the_deadline(
    fleet: Fleet,
) -> None:
    fleet.init(task="quadratic")
    fleet.start_server(
        rounds=1, round__minimum_clients=4, verification__deadline_seconds=1.0, **VERIFIED
    )
    start(fleet, {"a": 1.0, "b": 1.5})
    start(fleet, {"hangs": 1.0}, trouble="hang")
    start(fleet, {"fails": 1.0}, trouble="fail")
    fleet.wait_for_version(1)
    verification = fleet.records()[0]["verification"]
    assert (verification["answered"], verification["silent"]) == (["a", "b"], ["fails", "hangs"])
    assert (verification["outcome"], verification["factor"]) == ("accepted", 0.5)


def test_too_few_answers_end_in_the_fallback(fleet: Fleet) -> None:
    fleet.init(task="quadratic")
    fleet.start_server(rounds=1, verification__quorum=1.0, **VERIFIED)
    start(fleet, {"a": 1.0})
    start(fleet, {"fails": 1.0}, trouble="fail")
    fleet.wait_for_version(1)
    verification = fleet.records()[0]["verification"]
    assert (verification["outcome"], verification["reason"]) == (
        "smallest",
        "1 of 2 participants answered",
    )


def test_a_server_killed_during_verification_selects_only_clients_without_an_answer(
    fleet: Fleet,
) -> None:
    fleet.init(task="quadratic")
    settings = {"rounds": 2, "verification__deadline_seconds": 30.0, **VERIFIED}
    fleet.start_server(**settings)
    trace = fleet.folder / "tried"
    start(fleet, {"a": 1.0}, trace=trace)
    start(fleet, {"b": 1.5}, trouble="hang")
    until(
        lambda: fleet.state.exists() and fleet.query("select client from trials"),
        "the first answer",
    )
    fleet.kill_server()
    fleet.kill_client("b")
    fleet.start_server(**settings)
    start(fleet, {"b": 1.5})  # repaired
    fleet.wait_for_version(1)
    tried = trace.read_text().split()
    fleet.wait_for_version(2)
    first = fleet.records()[0]["verification"]
    assert (first["answered"], first["factor"]) == (["a", "b"], 0.5)
    assert len(tried) == 4  # not selected again
    prove(fleet, 2)


@pytest.mark.parametrize("heard", [True, False], ids=["killed", "before_the_reply"])
def test_other_trial_lengths_after_a_restart_are_tried_again(fleet: Fleet, heard: bool) -> None:
    """A client may also repeat an answer whose receipt was lost, with losses of other lengths."""
    fleet.init(task="quadratic")
    settings = {"rounds": 1, "verification__deadline_seconds": 30.0, **VERIFIED}
    fleet.start_server(
        **settings, die_at="" if heard else "what ReportVerification did, before its answer"
    )
    start(fleet, {"a": 1.0})
    start(fleet, {"b": 1.5}, trouble="hang")
    if heard:
        until(
            lambda: fleet.state.exists() and fleet.query("select client from trials"),
            "the first answer",
        )
        fleet.kill_server()
    else:
        assert fleet.server is not None
        fleet.server.wait(30)
    fleet.kill_client("b")
    fleet.start_server(**settings | {"verification__halvings": 5})
    start(fleet, {"b": 1.5})
    fleet.wait_for_version(1)
    verification = fleet.records()[0]["verification"]
    assert (verification["answered"], len(verification["tried"])) == (["a", "b"], 6)


def test_late_answers_are_accepted_and_unrequested_answers_refused(
    fleet: Fleet,
) -> None:
    """A late answer is accepted even if the server was restarted with other settings.

    Older clients exit when an answer is refused.
    """
    fleet.init(20)
    settings = {
        "rounds": 100,
        "round__clients": 1,
        "round__minimum_clients": 2,
        "lease_seconds": 60,
    }
    fleet.start_server(**settings, **VERIFIED)
    devices = [Device(fleet.address, name) for name in "ab"]
    for device in devices:
        device.join(verifies=True)
    until(lambda: fleet.selections(), "a selection")
    selected, other = devices if fleet.selections()[0] == {"a"} else reversed(devices)
    selected.train_task()
    chunks, encoded = selected.encode()
    selected.send(selected.open(encoded).upload, chunks)
    step = selected.next_task().verify.step.digest
    answer = {"round": 0, "step_digest": step, "losses": [0.5] * 4}
    another_step = answer | {"step_digest": bytes(32)}
    assert verdict_on(selected, **another_step) is grpc.StatusCode.FAILED_PRECONDITION
    for device, verdict in ((other, grpc.StatusCode.FAILED_PRECONDITION), (selected, None)):
        assert verdict_on(device, **answer) is verdict
    fleet.wait_for_version(1)
    for device, verdict in ((other, grpc.StatusCode.FAILED_PRECONDITION), (selected, None)):
        assert verdict_on(device, **answer) is verdict
    fleet.kill_server()
    fleet.start_server(**settings)
    for device, verdict in ((other, grpc.StatusCode.FAILED_PRECONDITION), (selected, None)):
        device.join(verifies=True)
        assert verdict_on(device, **answer) is verdict
    assert verdict_on(selected, **answer | {"round": 5}) is grpc.StatusCode.FAILED_PRECONDITION


def verdict_on(device: Device, **answer: Any) -> grpc.StatusCode | None:
    """Send the losses of a step; return the status code of a refusal."""
    try:
        device.stub.ReportVerification(
            pb.ReportVerificationRequest(session=device.session, **answer), timeout=10
        )
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return None


def test_fedmdfg_uses_the_trials_for_its_line_search(fleet: Fleet) -> None:
    fleet.init(task="quadratic")
    fleet.start_server(rounds=2, rule__name="fedmdfg", rule__s=2)
    start(
        fleet, {"a": 1.0, "b": 1.0}
    )  # equal losses: no guidance term, which would cancel parallel gradients
    fleet.wait_for_version(2)
    assert set(fleet.wait_clients().values()) == {0}
    verification = fleet.records()[0]["verification"]
    assert verification["tried"][0] == 4.0
    assert verification["outcome"] in ("accepted", "searched")
    assert verification["improved"][verification["tried"].index(verification["factor"])] == 1.0
