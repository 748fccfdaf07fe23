"""The events of a small federation, made by hand."""

from __future__ import annotations

from typing import Any

from fairfleet.client.operator.fleet_view import FleetView, Observation, Snapshot, fold
from fairfleet.proto.v1 import fleet_pb2, operator_pb2

pb = operator_pb2
NAMES = ("a", "b", "c")


def event(round_number: int, **kind: Any) -> pb.Event:
    return pb.Event(sequence=1, unix_seconds=1000.0 + round_number, round=round_number, **kind)


def view_after(*observations: Observation) -> FleetView:
    view = FleetView()
    for seen in observations:
        view = fold(view, seen)
    return view


def start(rounds: int = 10) -> Snapshot:
    return Snapshot(
        pb.StatusResponse(
            federation="fleet",
            rounds_planned=rounds,
            phase=pb.PHASE_WAITING,
            missing=3,
            rule="fedavg",
            parameters=650,
        )
    )


def joined(*names: str) -> list[pb.Event]:
    return [
        event(
            0,
            client_joined=pb.ClientJoined(
                client=name, device="cpu", train_samples=50, connected=1 + number
            ),
        )
        for number, name in enumerate(names)
    ]


def began(round_number: int, *names: str) -> pb.Event:
    return event(round_number, round_started=pb.RoundStarted(clients=names))


def delivered(round_number: int, name: str, loss: float, received: int, asked: int) -> pb.Event:
    report = fleet_pb2.TrainReport(
        samples=50, loss_before=loss, loss_after=loss / 2, steps=10, learning_rate=0.1
    )
    update = pb.UpdateReceived(
        client=name, size_bytes=2600, report=report, received=received, asked=asked
    )
    return event(round_number, update_received=update)


def committed(round_number: int, *dropped: str) -> pb.Event:
    report = fleet_pb2.TrainReport(samples=50, loss_before=0.5)
    record = pb.RoundRecord(
        round=round_number,
        contributions=[
            pb.ClientContribution(client=name, weight=0.5, report=report) for name in ("a", "b")
        ],
        dropped=dropped,
        training_seconds=0.25,
        aggregation_seconds=0.001,
        commit_seconds=0.01,
        bytes_received=5200,
        diagnostics_json='{"conflicts": ["b"]}',
        unix_seconds=1000.0 + round_number,
    )
    return event(round_number, round_committed=pb.RoundCommitted(record=record))


def evaluated(version: int, **accuracy: float) -> list[pb.Event]:
    reports = [
        pb.EvaluationReported(
            client=name, evaluation=fleet_pb2.Evaluation(samples=20, loss=1 - share, accuracy=share)
        )
        for name, share in accuracy.items()
    ]
    return [
        event(version, evaluation_started=pb.EvaluationStarted(clients=list(accuracy))),
        *(event(version, evaluation_reported=report) for report in reports),
        event(
            version,
            evaluation_finished=pb.EvaluationFinished(reported=len(accuracy), asked=len(accuracy)),
        ),
    ]


def finished(version: int) -> pb.Event:
    return event(version, federation_finished=pb.FederationFinished(reason="all rounds are done"))
