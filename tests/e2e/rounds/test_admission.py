"""One of four clients sends an update and a loss a thousand times too large to a real server."""

from __future__ import annotations

import json
from typing import Any

import grpc
import numpy as np
import pytest

from fairfleet.proto.v1 import fleet_pb2
from tests.support.device import REPORT, Device
from tests.support.fleet import Fleet, free_port, until
from tests.support.scraping import scrape, series

HONEST = ("ann", "bob", "cem")
LIE = 1000.0
OBSERVE: dict[str, Any] = {"admission__norm": "observe", "admission__loss": "observe"}
BOUND: dict[str, Any] = {
    "admission__norm": "clip",
    "admission__loss": "winsorise",
    "admission__samples": "cap",
}
REJECT: dict[str, Any] = {"admission__norm": "reject", "admission__loss": "reject"}


def findings(record: dict[str, Any]) -> set[tuple[str, str, str]]:
    return {
        (finding["client"], finding["check"], finding["decision"])
        for finding in record["admission"]
    }


@pytest.mark.slow
def test_a_false_update_counts_is_bounded_or_is_left_out_as_configured(fleet: Fleet) -> None:
    fleet.init()
    for name in HONEST:
        fleet.start_client(name, step_seconds=0.05)
    fleet.start_client("liar", shift=LIE, loss=LIE, step_seconds=0.05)
    # The result of TERM with a loss of 1000 among ones; with four equal losses and the long update
    # clipped; and without the false update.
    steps = {"observed": LIE, "clipped": (1 + 1 + 1 + 3) / 4, "rejected": 1.0}
    second = {"observed": "observed", "clipped": "winsorised", "rejected": "rejected"}
    modes: list[str] = []
    for decision, settings in zip(steps, (OBSERVE, BOUND, REJECT), strict=True):
        port, begun = free_port(), len(modes)
        usual = {
            "rounds": 10_000,
            "rule__name": "term",
            "round__minimum_clients": 4,
            "keep_models": 1000,
        }
        fleet.start_server(**usual, **settings, http__port=port)
        fleet.wait_for_version(begun + 3)
        counted = scrape(port)
        shown = fleet.run("rounds", "--server", fleet.address, "--last", "2")
        output = fleet.run("rounds", "--server", fleet.address, "--last", "1", "--json")
        fleet.kill_server()  # in mid-round: the next server judges the updates again
        modes += [decision] * (fleet.version() - begun)
        for check, done in (("norm", decision), ("loss", second[decision])):
            assert counted[series("fairfleet_admission_total", check=check, decision=done)] >= 2
            assert counted[series("fairfleet_admission_total", check=check, decision="passed")] >= 6
        assert counted[series("fairfleet_admission_total", check="finite", decision="passed")] >= 8
        assert ("2 observed" if decision == "observed" else f"liar {decision}") in " ".join(
            shown.stdout.split()
        )
        (finding, *_) = json.loads(output.stdout.splitlines()[-1])["admission"]
        assert (finding["client"], finding["check"], finding["decision"]) == (
            "liar",
            "norm",
            decision,
        )
        assert finding["value"] > finding["limit"] > 0
    records = fleet.records()
    assert len(records) == len(modes)
    for record, decision in zip(records, modes, strict=True):
        buffers = (
            set() if decision == "rejected" else {("liar", "buffers", "clipped")}
        )  # a liar's buffers follow its update
        assert findings(record) == {
            ("liar", "norm", decision),
            ("liar", "loss", second[decision]),
            *buffers,
        }
        counts = {contribution["client"] for contribution in record["contributions"]}
        assert counts == ({*HONEST} if decision == "rejected" else {*HONEST, "liar"})
    moved = sum(steps[decision] for decision in modes)
    np.testing.assert_allclose(fleet.model(len(records)).parameters, -moved, rtol=1e-5)
    assert fleet.query("select count(*) from updates where client = 'liar' and round = 0") == [(1,)]


@pytest.mark.slow
def test_a_rejected_client_does_not_try_the_step(fleet: Fleet) -> None:
    fleet.init()
    verified = {
        "verification__halvings": 1,
        "verification__quorum": 1.0,
        "verification__deadline_seconds": 30,
    }
    fleet.start_server(rounds=2, round__minimum_clients=4, **verified, **REJECT)
    for name in HONEST:
        fleet.start_client(name)
    fleet.start_client("liar", shift=LIE, loss=LIE)
    fleet.wait_clients()
    for record in fleet.records():
        assert record["verification"]["answered"] == sorted(HONEST)
        assert record["verification"]["silent"] == []
        assert record["verification"]["outcome"] == "accepted"
    np.testing.assert_allclose(fleet.model(2).parameters, -2.0, rtol=1e-6)


def test_refused_updates_are_counted_by_reason(fleet: Fleet) -> None:
    port = free_port()
    fleet.init(size=10)
    fleet.start_server(http__port=port, round__minimum_clients=1)
    device = Device(fleet.address, "ann")
    device.join()
    device.train_task()
    wrong_report = fleet_pb2.TrainReport()
    wrong_report.CopyFrom(REPORT)
    wrong_report.loss_before = float("nan")
    chunks, encoded = device.encode()
    for attempt in (
        lambda: device.open(encoded, report=wrong_report),
        lambda: device.open(encoded, codec="nonsense"),
        lambda: device.open(encoded, size_bytes=10**12),
        lambda: device.send(device.open(encoded).upload, [chunks[0], chunks[0]]),
    ):
        with pytest.raises(grpc.RpcError):
            attempt()
    chunks, encoded = device.encode(value=float("inf"))
    with pytest.raises(grpc.RpcError) as caught:
        device.send(device.open(encoded).upload, chunks)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    chunks, encoded = device.encode()
    assert device.send(device.open(encoded).upload, chunks).outcome == fleet_pb2.OUTCOME_COUNTED
    until(lambda: fleet.version() >= 1, "the round to be committed")
    counted = scrape(port)
    metrics = {
        check: [
            counted[series("fairfleet_admission_total", check=check, decision=outcome)]
            for outcome in ("rejected", "passed")
        ]
        for check in ("form", "finite", "report")
    }
    assert metrics["report"] == [1, 1]
    assert metrics["finite"] == [1, 1]
    assert metrics["form"][0] >= 2
