"""Verified descent over the network: steps are tried by those whom they concern before they are taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.fleet import Fleet, until

VERIFIED = {"verification__halvings": 3, "verification__threshold": 1.0}


def start(fleet: Fleet, targets: dict[str, float], **options: Any) -> None:
    for name, target in targets.items():
        fleet.start_client(name, task="quadratic", target=target, **options)


def taken(fleet: Fleet) -> list[float]:
    return [record["verification"]["factor"] for record in fleet.records()]


def prove(fleet: Fleet, rounds: int, stride: float = 3.0) -> None:
    """The model is what the recorded factors and weights make of the clients' targets."""
    model = 0.0
    for record in fleet.records()[:rounds]:
        factor = record["verification"]["factor"] if record.get("verification") else 1.0
        targets = {c["client"]: fleet.options[c["client"]]["target"] for c in record["contributions"]}
        weights = {c["client"]: c["weight"] for c in record["contributions"]}
        model -= factor * sum(weights[one] * stride * (model - target) for one, target in targets.items())
    np.testing.assert_allclose(fleet.model(rounds).parameters, model, rtol=1e-5)


def test_the_longest_step_is_taken_under_which_enough_losses_fall(fleet: Fleet) -> None:
    fleet.init(task="quadratic")
    fleet.start_server(rounds=4, **VERIFIED)
    trace = fleet.folder / "tried"
    start(fleet, {"a": 1.0, "b": 1.5}, trace=trace)
    fleet.wait_for_version(4)
    assert set(fleet.wait_clients().values()) == {0}
    first = fleet.records()[0]["verification"]
    assert first["tried"] == [1.0, 0.5, 0.25, 0.125]
    assert first["improved"] == [0.0, 1.0, 1.0, 1.0]  # three times too far, half of that, and less
    assert (first["outcome"], first["factor"], first["answered"], first["silent"]) == ("accepted", 0.5, ["a", "b"], [])
    prove(fleet, 4)
    tried = {round(float(line), 5) for line in Path(trace).read_text().split()[:8]}
    assert tried == {3.75, 1.875, 0.9375, 0.46875}


@pytest.mark.parametrize("codec", ["raw32", "int8"])
def test_the_model_after_a_verified_step_is_not_sent_again_to_those_who_tried_it(fleet: Fleet, codec: str) -> None:
    size = 200_000
    fleet.init(size, task="quadratic")
    fleet.start_server(rounds=4, compression__downlink=codec, **VERIFIED)
    start(fleet, {"a": 1.0, "b": 1.5})
    fleet.wait_for_version(3)
    sent = fleet.status().bytes_sent
    whole, step = 4 * size, 4 * size if codec == "raw32" else size
    assert sent < 2 * (whole + 4 * step) + 3 * whole  # both fetched the first model, then steps only
    assert set(fleet.wait_clients().values()) == {0}
    assert "fetched whole" not in fleet.log("a.log") + fleet.log("b.log")
    assert taken(fleet)[0] == 0.5
    for client in "ab":
        assert "do not lead" not in fleet.log(f"{client}.log")


@pytest.mark.parametrize(("fallback", "factor"), [("commit", 1.0), ("smallest", 0.125), ("skip", 0.0)])
def test_a_step_that_lowers_too_few_losses_ends_in_the_fallback(fleet: Fleet, fallback: str, factor: float) -> None:
    fleet.init(task="quadratic")
    fleet.start_server(rounds=2, verification__fallback=fallback, **VERIFIED)
    start(fleet, {"a": 1.0, "b": -0.5})  # whatever is good for one is bad for the other
    fleet.wait_for_version(2)
    assert set(fleet.wait_clients().values()) == {0}
    found = fleet.records()[0]["verification"]
    assert (found["outcome"], found["factor"]) == (fallback, factor)
    assert "50% of 2 losses fell, 100% were wanted" in found["reason"]
    prove(fleet, 2)
    if fallback == "skip":
        digests = dict(fleet.query("select version, digest from models"))
        assert digests[0] == digests[1] == digests[2]


def test_whoever_cannot_try_or_hangs_is_not_waited_for_beyond_the_deadline(fleet: Fleet) -> None:
    fleet.init(task="quadratic")
    fleet.start_server(rounds=1, round__minimum_clients=4, verification__deadline_seconds=1.0, **VERIFIED)
    start(fleet, {"a": 1.0, "b": 1.5})
    start(fleet, {"hangs": 1.0}, trouble="hang")
    start(fleet, {"fails": 1.0}, trouble="fail")
    fleet.wait_for_version(1)
    found = fleet.records()[0]["verification"]
    assert (found["answered"], found["silent"]) == (["a", "b"], ["fails", "hangs"])
    assert (found["outcome"], found["factor"]) == ("accepted", 0.5)


def test_too_few_answers_end_in_the_fallback(fleet: Fleet) -> None:
    fleet.init(task="quadratic")
    fleet.start_server(rounds=1, verification__quorum=1.0, **VERIFIED)
    start(fleet, {"a": 1.0})
    start(fleet, {"fails": 1.0}, trouble="fail")
    fleet.wait_for_version(1)
    found = fleet.records()[0]["verification"]
    assert (found["outcome"], found["reason"]) == ("smallest", "1 of 2 participants answered")


def test_a_server_killed_while_a_step_is_tried_asks_only_those_who_have_not_answered(fleet: Fleet) -> None:
    fleet.init(task="quadratic")
    settings = {"rounds": 2, "verification__deadline_seconds": 30.0, **VERIFIED}
    fleet.start_server(**settings)
    trace = fleet.folder / "tried"
    start(fleet, {"a": 1.0}, trace=trace)
    start(fleet, {"b": 1.5}, trouble="hang")
    until(lambda: fleet.state.exists() and fleet.query("select client from trials"), "the first answer")
    fleet.kill_server()
    fleet.kill_client("b")
    fleet.start_server(**settings)
    start(fleet, {"b": 1.5})  # mended
    fleet.wait_for_version(1)
    tried = trace.read_text().split()
    fleet.wait_for_version(2)
    first = fleet.records()[0]["verification"]
    assert (first["answered"], first["factor"]) == (["a", "b"], 0.5)
    assert len(tried) == 4  # not asked again
    prove(fleet, 2)


@pytest.mark.parametrize("heard", [True, False], ids=["killed", "before_the_reply"])
def test_trying_other_lengths_after_a_restart_asks_again_and_goes_on(fleet: Fleet, heard: bool) -> None:
    """Also a client that did not hear that its answer arrived, and tells it again: losses of other lengths."""
    fleet.init(task="quadratic")
    settings = {"rounds": 1, "verification__deadline_seconds": 30.0, **VERIFIED}
    fleet.start_server(**settings, die_at="" if heard else "what ReportVerification did, before its answer")
    start(fleet, {"a": 1.0})
    start(fleet, {"b": 1.5}, trouble="hang")
    if heard:
        until(lambda: fleet.state.exists() and fleet.query("select client from trials"), "the first answer")
        fleet.kill_server()
    else:
        assert fleet.server is not None
        fleet.server.wait(30)
    fleet.kill_client("b")
    fleet.start_server(**settings | {"verification__halvings": 5})
    start(fleet, {"b": 1.5})
    fleet.wait_for_version(1)
    found = fleet.records()[0]["verification"]
    assert (found["answered"], len(found["tried"])) == (["a", "b"], 6)


def test_fedmdfg_searches_the_line_by_the_same_trials(fleet: Fleet) -> None:
    fleet.init(task="quadratic")
    fleet.start_server(rounds=2, rule__name="fedmdfg", rule__s=2)
    start(fleet, {"a": 1.0, "b": 1.0})  # equal losses: no guidance, which would cancel parallel gradients
    fleet.wait_for_version(2)
    assert set(fleet.wait_clients().values()) == {0}
    found = fleet.records()[0]["verification"]
    assert found["tried"][0] == 4.0
    assert found["outcome"] in ("accepted", "searched")
    assert found["improved"][found["tried"].index(found["factor"])] == 1.0
