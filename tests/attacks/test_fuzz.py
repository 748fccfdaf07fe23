"""Malformed messages to every RPC of both services: each is refused, none causes an internal error.

The random numbers are seeded, so a failure is reproducible. The number of inputs per RPC is printed
(`pytest -s`).
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from fairfleet.common.pki.certificates import certified, new_request
from fairfleet.proto.v1 import enrolment_pb2 as en
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1 import operator_pb2 as op
from fairfleet.proto.v1.operator_pb2_grpc import OperatorStub
from fairfleet.server.privacy.release_queries import MOST_RELEASES
from tests.support.attacks.mutations import damaged
from tests.support.attacks.siege import Siege
from tests.support.device import Device
from tests.support.fleet import Fleet, until
from tests.support.secure import SecureFleet, client

FLEET = pb.DESCRIPTOR.services_by_name["Fleet"]
OPERATOR = op.DESCRIPTOR.services_by_name["Operator"]
INPUTS = 1000  # inputs per RPC
OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}  # bugs in the server
CALL_SECONDS = 0.5  # a valid poll or watch waits, so it is cancelled
WIDE = {
    f"limits__{name}_per_minute": 10_000_000
    for name in ("joins", "polls", "calls", "enrolments", "wrong_tokens")
} | {"limits__idle_seconds": 30, "limits__known_clients": 100_000, "limits__clients": 10_000}


class Fuzzer:
    def __init__(self, siege: Siege | Fleet, **joined: Any) -> None:
        self._joined = {"instance": "the same", **joined}
        self.dice = random.Random(2026)
        self.counts: Counter[str] = Counter()
        self.codes: Counter[str] = Counter()
        self._device = Device(siege.address, "fuzzed")
        self._refresh()

    def templates(self) -> dict[str, Message]:
        """Return a currently valid message for every RPC."""
        device = self._device
        _, encoded = device.encode()
        session, task = device.session, device.task
        signature = pb.JoinRequest(
            client="fuzzed-join",
            instance="x",
            protocol_version=1,
            codecs=["raw32"],
            device="d",
            train_samples=5,
        )
        return {
            "Join": signature,
            "NextTask": pb.NextTaskRequest(session=session),
            "TakeTask": pb.TakeTaskRequest(session=session, held=task.model.digest),
            "FetchModel": pb.FetchModelRequest(session=session, version=task.model.version),
            "OpenUpload": device.announcement(encoded),
            "SendUpload": device.announcement(encoded),
            "ReportEvaluation": pb.ReportEvaluationRequest(
                session=session,
                version=task.round,
                evaluation=pb.Evaluation(samples=5, loss=1.0, accuracy=0.5),
                privacy=task.privacy,
            ),
            "ReportVerification": pb.ReportVerificationRequest(
                session=session, round=task.round, step_digest=bytes(32), losses=[1.0, 2.0]
            ),
            "Heartbeat": pb.HeartbeatRequest(
                session=session, task=task.id, steps_done=1, steps_planned=2, loss=0.5
            ),
            "Leave": pb.LeaveRequest(session=session, reason="tired"),
            "Status": op.StatusRequest(),
            "Watch": op.WatchRequest(),
            "Rounds": op.RoundsRequest(first=1, last=3),
            "Clients": op.ClientsRequest(),
            "Pause": op.PauseRequest(),
            "Resume": op.ResumeRequest(),
            "Stop": op.StopRequest(reason="enough"),
            "Continue": op.ContinueRequest(from_version=0, rounds=5, seconds=1.0),
            "Models": op.ModelsRequest(),
            "Audit": op.AuditRequest(first=1),
            "Revoke": op.RevokeRequest(client="nobody", reason="why not"),
            "ExportModel": op.ExportModelRequest(version=1),
            "MakeToken": op.MakeTokenRequest(client="guest", seconds=60, certificate_seconds=60),
        }

    def fuzz(self, service: str, name: str, count: int) -> None:
        send = self.sender(service, name)
        for start in range(0, count, 50):
            self._refresh()
            for data in damaged(self.templates()[name], self.dice, min(50, count - start)):
                self.attempt(name, lambda data=data: send(data), data)

    def fuzz_chunks(self, count: int) -> None:
        """Send malformed chunks to SendUpload, in a correctly opened upload."""
        for number in range(count):
            if number % 10 == 0:
                self._refresh()
            chunks, encoded = self._device.encode()
            bad = next(
                itertools.islice(damaged(chunks[0], self.dice, number % 30 + 1), number % 30, None)
            )
            self.attempt(
                "SendUpload (chunks)", lambda bad=bad, e=encoded: self._upload(e, bad), bad
            )

    def _upload(self, encoded: Any, data: bytes) -> None:
        opened = self._device.open(encoded)
        if not opened.HasField("receipt"):
            self._device.send_raw(opened.upload, [data])

    def _refresh(self) -> None:
        """Get a new session and task, because an earlier input may have ended them."""
        self._device.join(**self._joined)
        self._device.train_task()

    def sender(self, service: str, name: str) -> Callable[[bytes], object]:
        channel, path = self._device.channel, f"/{service}/{name}"
        if name == "SendUpload":
            call: Any = channel.stream_unary(path, None, None)
            key = "fairfleet-announced-bin"
            return lambda data: call(iter([b""]), metadata=((key, data),), timeout=CALL_SECONDS)
        streams = (
            (FLEET if service == FLEET.full_name else OPERATOR)
            .methods_by_name[name]
            .server_streaming
        )
        if not streams:
            unary: Any = channel.unary_unary(path, None, None)
            return lambda data: unary(data, timeout=CALL_SECONDS)
        stream: Any = channel.unary_stream(path, None, None)

        def read(data: bytes) -> None:
            answers: Iterator[bytes] = stream(data, timeout=CALL_SECONDS)
            for _ in itertools.islice(answers, 3):
                pass
            answers.cancel()  # type: ignore[attr-defined]

        return read

    def attempt(self, name: str, call: Callable[[], object], data: bytes) -> None:
        self.counts[name] += 1
        code: Any = grpc.StatusCode.OK
        details = ""
        try:
            call()
        except grpc.RpcError as error:
            call_error: Any = error
            code, details = call_error.code(), call_error.details()
        self.codes[code.name] += 1
        assert code not in OURS, f"{name} answered {code.name} ({details}) to {data[:300]!r}"


@pytest.mark.slow
def test_malformed_messages_to_every_rpc_are_refused(tmp_path: Path) -> None:
    siege = Siege(tmp_path, **WIDE)
    try:
        siege.bring_honest_client()
        fuzzer = Fuzzer(siege)
        rpcs = [
            (service.full_name, method.name)
            for service in (FLEET, OPERATOR)
            for method in service.methods
        ]
        assert {name for _, name in rpcs} == fuzzer.templates().keys(), "every RPC needs a template"
        rpcs = [
            rpc for rpc in rpcs if rpc[1] not in ("Stop", "Pause")
        ]  # RPCs for which every empty message is valid
        for service, name in rpcs:
            fuzzer.fuzz(service, name, 100)
        fuzzer.fuzz_chunks(100)
        with siege.borne(growth_mib=48):
            for service, name in rpcs:
                fuzzer.fuzz(service, name, INPUTS)
            fuzzer.fuzz_chunks(INPUTS)
        for _ in range(INPUTS // 50):  # a pause stops rounds and tasks, so each is undone
            _fuzz_pause(fuzzer, siege)
        siege.trains_on()
        _ends_as_it_should(fuzzer, siege)
        print(
            f"\n{sum(fuzzer.counts.values())} inputs: {dict(fuzzer.counts)}"
            f"\nanswers: {dict(fuzzer.codes)}"
        )
        assert all(count >= INPUTS for count in fuzzer.counts.values())
    finally:
        siege.end()


@pytest.mark.slow
def test_malformed_certificate_requests_are_refused(tmp_path: Path) -> None:
    """This needs TLS and the CA's key: without encryption nothing is signed."""
    fleet, dice, codes = SecureFleet(tmp_path), random.Random(2026), Counter[str]()
    try:
        fleet.init()
        fleet.start_server(rounds=1_000_000, round__minimum_clients=1, **WIDE)
        operators, member = fleet.channel(), fleet.channel_of(fleet.credentials(client("ann")))
        make = op.MakeTokenRequest(client="guest", seconds=60, certificate_seconds=60)
        secret = OperatorStub(operators).MakeToken(make, timeout=20).secret
        right = new_request(client("guest"))[1]
        enrol = en.EnrolRequest(client="guest", secret=secret, request=right)
        renew = en.RenewRequest(request=new_request(client("ann"))[1])
        tried = (
            (
                fleet.enrolment_channel(),
                "Enrolment/Enrol",
                [*damaged(enrol, dice, INPUTS), *_bent(enrol, dice)],
            ),
            (member, "Enrolment/Renew", [*damaged(renew, dice, INPUTS), *_bent(renew, dice)]),
            (operators, "Operator/MakeToken", list(damaged(make, dice, INPUTS))),
        )
        for channel, path, messages in tried:
            call: Any = channel.unary_unary(f"/fairfleet.v1.{path}", None, None)
            for data in messages:
                code, details = grpc.StatusCode.OK, ""
                try:
                    call(data, timeout=20)
                except grpc.RpcError as error:
                    call_error: Any = error
                    code, details = call_error.code(), call_error.details()
                assert code not in OURS, (
                    f"{path} answered {code.name} ({details}) to {data[:300]!r}"
                )
                codes[code.name] += 1
        print(f"\n{codes.total()} inputs, answers: {dict(codes)}")
        make.client = enrol.client = "last"
        enrol.secret = OperatorStub(operators).MakeToken(make, timeout=20).secret
        enrol.request = new_request(client("last"))[1]
        assert certified(
            fleet.enrolment_stub().Enrol(enrol, timeout=20).certificate
        ).identity == client("last")
    finally:
        fleet.end()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["client", "server"])
def test_malformed_results_do_not_overspend_the_privacy_budget(tmp_path: Path, where: str) -> None:
    """No input spends more than a client can, and a server that accepted it restarts."""
    fleet, rule = Fleet(tmp_path), {"rule__name": "fedavg", "rule__weighting": "uniform"}
    private = {
        "privacy__where": where,
        "privacy__clip": 1,
        "privacy__noise_multiplier": 2,
        "privacy__reports": "noised",
    }
    quick = {"round__deadline_seconds": 0.5}  # then a client that gave up may be selected again
    settings = {"rounds": 1_000_000, "round__minimum_clients": 1} | quick | rule | private | WIDE
    try:
        fleet.init(task="plain")
        fleet.start_server(**settings)
        fuzzer = Fuzzer(fleet, protects=True)
        for name in ("OpenUpload", "SendUpload", "ReportEvaluation", "Heartbeat"):
            fuzzer.fuzz(FLEET.full_name, name, INPUTS)
        print(f"\n{sum(fuzzer.counts.values())} inputs, answers: {dict(fuzzer.codes)}")
        assert "Traceback" not in fleet.log("server.log")
        per_round = fleet.query(
            "select count(*) from releases where what != 'model' group by round, client"
        )
        assert max(count for (count,) in per_round) <= MOST_RELEASES
        before = fleet.status().privacy
        assert fleet.stop_server() == 0
        fleet.start_server(**settings)
        assert fleet.status().privacy == before
    finally:
        fleet.end()


def _bent(right: Any, dice: random.Random) -> Iterator[bytes]:
    """Return valid messages with a damaged certificate request."""
    for _ in range(INPUTS):
        request, sent = bytearray(right.request), type(right)()
        for _ in range(dice.randint(1, 4)):
            request[dice.randrange(len(request))] = dice.randrange(256)
        sent.CopyFrom(right)
        sent.request = bytes(request[: dice.choice((len(request), dice.randrange(len(request))))])
        yield sent.SerializeToString()


def _fuzz_pause(fuzzer: Fuzzer, siege: Siege) -> None:
    send = fuzzer.sender(OPERATOR.full_name, "Pause")
    for data in damaged(op.PauseRequest(), fuzzer.dice, 50):
        fuzzer.attempt("Pause", lambda data=data: send(data), data)
    siege.fleet.operator().Resume(op.ResumeRequest())


def _ends_as_it_should(fuzzer: Fuzzer, siege: Siege) -> None:
    """Check that the first readable Stop ends the federation, and that others change nothing."""
    send = fuzzer.sender(OPERATOR.full_name, "Stop")
    for data in damaged(op.StopRequest(reason="enough"), fuzzer.dice, INPUTS):
        fuzzer.attempt("Stop", lambda data=data: send(data), data)
    assert siege.fleet.clients["honest"].wait(60) == 0
    until(lambda: siege.fleet.status().phase == op.PHASE_FINISHED, "the end")
