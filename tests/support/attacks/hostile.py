"""A federation of three honest devices and one hostile device, trained round by round.

`HostileFederation.play` lets the hostile device send whatever a test drew. It then checks that the
server lives, that the round is committed with the honest updates, and that everything committed is
finite.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from fairfleet.common.features import FEATURES
from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.support.device import Device
from tests.support.fleet import Fleet

HONEST = ("ann", "bob", "cat")
HOSTILE = "eve"
CODECS = ["raw32", "fp16", "bf16", "int8", "topk", "topsign", "sign", "zstd"]
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.OUT_OF_RANGE,
}
SETTINGS = {
    "rounds": 1_000_000,
    "round__minimum_clients": 4,
    "round__quorum": 0.75,
    "round__deadline_seconds": 20,
    "lease_seconds": 60,
    "keep_models": 2,
    "limits__calls_per_minute": 10_000_000,
    "limits__polls_per_minute": 10_000_000,
    "limits__joins_per_minute": 10_000_000,
}


@dataclass(frozen=True)
class HostileUpdate:
    """What the hostile device sends in one round."""

    parameters: NDArray[np.float32]
    report: pb.TrainReport | None
    running_mean: float = 0.0
    counter: int = 0
    codec: str = ""  # empty: as the task says
    announced_in_metadata: bool = False
    heartbeat_loss: float = 0.0
    trial_losses: Sequence[float] = (1.0,)  # repeated for as many trials as there are
    stray_round: int = 0  # the number of unrequested answers
    evaluation: pb.Evaluation = field(default_factory=pb.Evaluation)


class HostileFederation:
    """A real server process, three devices that behave, and one that does not."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.fleet = Fleet(folder)
        self.fleet.init(20)
        self._settings = SETTINGS | settings
        self.outcomes: dict[str, int] = {}
        self.start()

    def start(self) -> None:
        self.fleet.start_server(**self._settings)
        self.devices = {name: self._joined(name) for name in (*HONEST, HOSTILE)}

    def restart(self) -> None:
        """Kill the server and start it again on the same state directory."""
        self.fleet.kill_server()
        for device in self.devices.values():
            device.channel.close()
        self.start()

    def _joined(self, name: str) -> Device:
        channel = grpc.insecure_channel(self.fleet.address, [("grpc.use_local_subchannel_pool", 1)])
        device = Device(self.fleet.address, name, channel)
        samples = {"train_samples": 10, "test_samples": 10}
        device.join(codecs=CODECS, features=FEATURES, verifies=True, predicts=True, **samples)
        return device

    def play(self, update: HostileUpdate, restart: bool = False) -> None:
        """Train one round; with `restart` the server is killed after it has the hostile update."""
        tasks = {name: device.train_task() for name, device in self.devices.items()}
        number = tasks[HOSTILE].round
        assert {task.round for task in tasks.values()} == {number}
        self._count(self._attack(update))
        if restart:
            self.restart()
            for name in HONEST:
                assert self.devices[name].train_task().round == number
        for place, name in enumerate(HONEST):
            self._train_honestly(name, place)
        self._finish(number, update)
        self.check(number)

    def _attack(self, update: HostileUpdate) -> str:
        eve = self.devices[HOSTILE]
        eve.stub.Heartbeat(
            pb.HeartbeatRequest(
                session=eve.session, task=eve.task.id, steps_done=1, loss=update.heartbeat_loss
            ),
            timeout=10,
        )
        self._send_stray_answers(eve, update.stray_round)
        eve.model.buffers[:] = update.running_mean
        eve.model.counters[:] = update.counter
        codec = update.codec or eve.task.codec
        try:
            chunks, encoded = eve.encode(update.parameters, codec)
        except ValueError:  # a codec cannot express these values, so no client can send them
            chunks, encoded = eve.encode(0.0, codec)
        fields = {"codec": codec, "report": update.report}
        try:
            if update.announced_in_metadata:
                announced = eve.announcement(encoded, **fields).SerializeToString()
                return pb.Outcome.Name(eve.open_and_send(announced, chunks).outcome)
            return pb.Outcome.Name(eve.send(eve.open(encoded, **fields).upload, chunks).outcome)
        except grpc.RpcError as refusal:
            error: Any = refusal
            assert error.code() in REFUSALS, f"{error.code()}: {error.details()}"
            assert error.details(), "a refusal must have a reason"
            self._give_up(eve, eve.task.id)
            return str(error.code().name)

    @staticmethod
    def _send_stray_answers(eve: Device, number: int) -> None:
        """Send answers to tasks that were never given: each is refused or ignored."""
        tried = pb.ReportVerificationRequest(
            session=eve.session, round=number, step_digest=bytes(32), losses=[1.0]
        )
        scores = pb.Evaluation(samples=1, loss=1.0)
        evaluated = pb.ReportEvaluationRequest(
            session=eve.session, version=number, evaluation=scores
        )
        for call in (
            lambda: eve.stub.ReportVerification(tried, timeout=10),
            lambda: eve.stub.ReportEvaluation(evaluated, timeout=10),
        ):
            try:
                call()
            except grpc.RpcError as refusal:
                error: Any = refusal
                assert error.code() in REFUSALS, f"{error.code()}: {error.details()}"

    @staticmethod
    def _give_up(device: Device, task: str) -> None:
        request = pb.HeartbeatRequest(session=device.session, task=task, failure="refused")
        device.stub.Heartbeat(request, timeout=10)

    def _train_honestly(self, name: str, place: int) -> None:
        device = self.devices[name]
        values = np.cos(np.arange(device.model.parameters.size) + place).astype(
            np.float32
        ) * np.float32(0.01)
        device.model.buffers[:] = 0.5
        device.model.counters[:] += 1
        chunks, encoded = device.encode(values, device.task.codec)
        report = pb.TrainReport(
            samples=10 + place,
            loss_before=1.0 + place / 50,
            loss_after=0.5,
            gradient_norm=1.0,
            accuracy=0.5,
            steps=5,
            batch_size=5,
            learning_rate=0.1,
        )
        opened = device.open(encoded, codec=device.task.codec, report=report)
        assert device.send(opened.upload, chunks).outcome == pb.OUTCOME_COUNTED

    def _finish(self, number: int, update: HostileUpdate) -> None:
        """Answer the other requests of the round, until each device has a task of the next one."""
        with ThreadPoolExecutor(len(self.devices)) as pool:
            waiting = [
                pool.submit(self._finish_one, device, number, update)
                for device in self.devices.values()
            ]
            for future in waiting:
                future.result()

    def _finish_one(self, device: Device, number: int, update: HostileUpdate) -> None:
        hostile = device.name == HOSTILE
        for _ in range(5):
            task = device.next_task()
            if task.HasField("train") and task.train.round > number:
                return
            if task.HasField("verify"):
                self._try_step(
                    device, task.verify, number, update.trial_losses if hostile else (0.9,)
                )
            elif task.HasField("evaluate"):
                right = pb.Evaluation(samples=10, loss=1.0, accuracy=0.5)
                self._evaluate(device, task.evaluate, update.evaluation if hostile else right)
        raise AssertionError(f"no round after {number} came for {device.name}")

    def _try_step(
        self, device: Device, task: pb.VerifyTask, number: int, losses: Sequence[float]
    ) -> None:
        count = task.halvings + 1
        sent = list(islice(cycle(losses), count))
        request = pb.ReportVerificationRequest(
            session=device.session, round=number, step_digest=task.step.digest, losses=sent
        )
        self._answer(device, task.id, lambda: device.stub.ReportVerification(request, timeout=10))

    def _evaluate(self, device: Device, task: pb.EvaluateTask, evaluation: pb.Evaluation) -> None:
        request = pb.ReportEvaluationRequest(
            session=device.session, version=task.model.version, evaluation=evaluation
        )
        self._answer(device, task.id, lambda: device.stub.ReportEvaluation(request, timeout=10))

    def _answer(self, device: Device, task: str, call: Callable[[], object]) -> None:
        try:
            call()
        except grpc.RpcError as refusal:
            error: Any = refusal
            assert device.name == HOSTILE, error.details()
            assert error.code() in REFUSALS, f"{error.code()}: {error.details()}"
            self._give_up(device, task)

    def check(self, number: int) -> None:
        """Check that the round has the honest updates, and that the model is finite."""
        server = self.fleet.server
        assert server is not None
        assert server.poll() is None, self.fleet.log("server.log")[-3000:]
        self.fleet.wait_for_version(number + 1)
        record = json.loads(
            self.fleet.query(f"select record from rounds where round = {number}")[0][0]
        )
        counted = {part["client"] for part in record["contributions"]}
        left_out = [row for row in record.get("admission", []) if row["decision"] == "quarantined"]
        assert counted >= set(HONEST), (record["diagnostics"]["status"], left_out)
        for row in left_out:
            assert row["client"] == HOSTILE, row
            self._count("quarantined")
        model = self.fleet.model(number + 1)
        assert np.isfinite(model.parameters).all()
        assert np.isfinite(model.buffers).all()

    def check_state(self) -> None:
        """Check the state directory: models, optimizer state, history and journal."""
        self.fleet.kill_server()
        checked = self.fleet.run("server", "--check", "--state-dir", str(self.fleet.state))
        assert checked.returncode == 0, checked.stdout + checked.stderr

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def end(self) -> None:
        for device in self.devices.values():
            device.channel.close()
        self.fleet.end()


@contextlib.contextmanager
def hostile_federation(folder: Path, **settings: Any) -> Iterator[HostileFederation]:
    federation = HostileFederation(folder, **settings)
    try:
        yield federation
    finally:
        federation.end()
