"""Evaluations and verifications that nobody requested are refused, and cost nothing."""

from __future__ import annotations

import contextlib
from typing import Any

import grpc
import pytest

from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.support.device import Device
from tests.support.fleet import Fleet
from tests.support.refusals import refused

Code = grpc.StatusCode
PRIVACY: dict[str, Any] = {
    "privacy__where": "client",
    "privacy__clip": 1.0,
    "privacy__noise_multiplier": 20.0,
    "privacy__reports": "noised",
    "privacy__report_noise": 5.0,
    "privacy__max_epsilon": 6.0,
}


def evaluate(device: Device, version: int, **fields: Any) -> None:
    request = pb.ReportEvaluationRequest(session=device.session, version=version, **fields)
    device.stub.ReportEvaluation(request, timeout=10)


@pytest.mark.slow
def test_unrequested_evaluations_spend_no_privacy_budget(fleet: Fleet) -> None:
    fleet.init(20, task="plain")
    fleet.start_server(
        rounds=200, round__minimum_clients=2, round__clients=2, round__evaluate_every=0, **PRIVACY
    )
    for name in ("ann", "bob"):
        fleet.start_client(name, task="plain", step_seconds=0.2)
    fleet.wait_for_version(3)
    eve = Device(fleet.address, "eve")
    joined = eve.join(protects=True)
    for version in range(3):
        for value in range(9):
            evaluation = pb.Evaluation(samples=1, loss=value / 100, accuracy=0.5)
            with refused(Code.FAILED_PRECONDITION, "client eve was not"):
                evaluate(eve, version, evaluation=evaluation, privacy=joined.privacy)
    assert fleet.query("select client from releases where client = 'eve'") == []


@pytest.mark.slow
def test_a_client_without_test_data_may_not_send_evaluations(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(
        rounds=3,
        round__minimum_clients=2,
        round__evaluate_every=1,
        round__quorum=0.5,
        round__deadline_seconds=3,
        lease_seconds=60,
    )
    eve = Device(fleet.address, "eve")
    eve.join(test_samples=0)
    for name in ("ann", "bob"):
        fleet.start_client(name, steps=1, step_seconds=0.1)
    fleet.wait_for_version(2)
    with refused(Code.FAILED_PRECONDITION, "client eve was not"):
        evaluate(eve, 1, evaluation=pb.Evaluation(samples=3, loss=0.1))


def test_an_empty_evaluation_is_refused_by_name(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=1)
    eve = Device(fleet.address, "eve")
    eve.join()
    with refused(Code.INVALID_ARGUMENT, "evaluation.samples is 0"):
        evaluate(eve, 0, evaluation=pb.Evaluation())


@pytest.mark.slow
def test_updates_of_clients_that_were_not_selected_spend_no_privacy_budget(fleet: Fleet) -> None:
    fleet.init(20, task="plain")
    fleet.start_server(
        rounds=200, round__minimum_clients=2, round__clients=2, round__evaluate_every=0, **PRIVACY
    )
    for name in ("ann", "bob"):
        fleet.start_client(name, task="plain", step_seconds=0.2)
    fleet.wait_for_version(2)
    eve = Device(fleet.address, "eve")
    joined = eve.join(protects=True)
    ((digest,),) = fleet.query("select digest from models where version = 0")
    model = pb.ModelRef(version=0, digest=bytes.fromhex(digest))
    eve.task = pb.TrainTask(round=0, model=model, privacy=joined.privacy)
    for value in range(3):
        with contextlib.suppress(grpc.RpcError):
            eve.open(eve.encode(float(value))[1])
    assert fleet.query("select client from releases where client = 'eve'") == []
