"""What bad input gets: a status, a message that helps, nothing lost, and clients beside it that notice nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fairfleet.common.stream import xxh3_128_digest
from fairfleet.common.wire import ERROR_METADATA, signature_out
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1 import operator_pb2
from fairfleet.proto.v1.model_pb2 import SECTION_BUFFERS, Chunk, Signature
from tests.e2e.device import REPORT, Device
from tests.e2e.fleet import Fleet, until

Code = grpc.StatusCode


@contextlib.contextmanager
def refused(code: grpc.StatusCode, *parts: str) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as caught:
        yield
    error: Any = caught.value
    assert error.code() is code, error.details()
    for part in parts:
        assert part in error.details(), error.details()


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One server that all the refusals below are tried on: it must bear them all."""
    fleet = Fleet(tmp_path_factory.mktemp("standing"))
    fleet.init(600_000)
    fleet.start_server(rounds=10_000, round__minimum_clients=2, round__quorum=0.1, lease_seconds=60)
    yield fleet
    assert fleet.server is not None
    assert fleet.server.poll() is None, fleet.log("server.log")
    assert "Traceback" not in fleet.log("server.log")
    fleet.end()


@pytest.fixture
def device(standing: Fleet) -> Iterator[Device]:
    """A client with a task to train. Beside it an honest one, which must get through whatever this one does."""
    honest, device = Device(standing.address, "honest"), Device(standing.address, "device")
    honest.join()
    device.join()
    device.train_task()
    honest.train_task()
    assert device.task.round == honest.task.round
    yield device
    chunks, encoded = honest.encode()
    receipt = honest.send(honest.open(encoded).upload, chunks)
    assert (receipt.outcome, receipt.durable) == (pb.OUTCOME_COUNTED, True)
    device.leave()
    standing.wait_for_version(honest.task.round + 1)
    honest.leave()


# ---- joining -------------------------------------------------------------------------------------


def test_an_unknown_protocol_version(standing: Fleet) -> None:
    with refused(Code.FAILED_PRECONDITION, "speaks protocol version 99", "speaks 1", "Upgrade"):
        Device(standing.address, "future").join(protocol_version=99)


def test_every_error_of_the_server_is_marked_as_its_own_word(standing: Fleet) -> None:
    """By which a client knows a broken connection: then it joins anew instead of asking for its session in vain."""
    with pytest.raises(grpc.RpcError) as caught:
        Device(standing.address, "stranger").next_task()
    error: Any = caught.value
    assert (ERROR_METADATA, "SessionUnknown") in [(key, value) for key, value in error.trailing_metadata()]


@pytest.mark.parametrize("name", ["", "a/b", "../up", "..", "x" * 65, "white space", "new\nline"])
def test_a_name_that_cannot_be_one(standing: Fleet, name: str) -> None:
    with refused(Code.INVALID_ARGUMENT, "1 to 64"):
        Device(standing.address, name).join()


def test_no_codec_in_common(standing: Fleet) -> None:
    with refused(Code.FAILED_PRECONDITION, "no codec in common", "smoke-signals", "raw32"):
        Device(standing.address, "odd").join(codecs=["smoke-signals"])


def other_name(signature: Signature) -> None:
    signature.tensors[0].name = "wait"


def other_shape(signature: Signature) -> None:
    signature.tensors[1].shape[0] = 4


def other_dtype(signature: Signature) -> None:
    signature.tensors[1].dtype = "float64"


def extra_tensor(signature: Signature) -> None:
    signature.tensors.add(name="more", dtype="float32", section=SECTION_BUFFERS)


def no_section(signature: Signature) -> None:
    signature.tensors[0].section = 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_name, "tensor weight float32[600000] (parameters) is missing"),
        (other_shape, "found tensor bias float32[4] (parameters), expected bias float32[3]"),
        (other_dtype, "found tensor bias float64[3]"),
        (extra_tensor, "found unexpected tensor more"),
        (no_section, "section"),
    ],
)
def test_a_model_that_is_not_the_federations(
    standing: Fleet, change: Callable[[Signature], None], message: str
) -> None:
    probe = Device(standing.address, "probe")
    probe.join()
    signature = signature_out(probe.model.signature)
    change(signature)
    with refused(Code.INVALID_ARGUMENT, message):
        probe.join(signature=signature)
    probe.leave()


def test_a_real_client_with_another_task_says_so_and_ends(standing: Fleet) -> None:
    done = standing.run("client", "--task", "tasks:shift", "-o", "size=7", "--server", standing.address, "--name", "x")
    assert done.returncode == 4
    assert "found tensor weight float32[7]" in done.stderr
    assert "Traceback" not in done.stderr


# ---- sessions ------------------------------------------------------------------------------------


def test_an_unknown_session(standing: Fleet) -> None:
    stranger = Device(standing.address, "stranger")
    with refused(Code.UNAUTHENTICATED, "join again"):
        stranger.next_task()
    with refused(Code.UNAUTHENTICATED, "join again"):
        list(stranger.stub.FetchModel(pb.FetchModelRequest(version=0)))


def test_a_second_join_takes_over_and_the_first_is_told(standing: Fleet) -> None:
    first, second = Device(standing.address, "twice"), Device(standing.address, "twice")
    older = first.join()
    polling = first.stub.NextTask.future(pb.NextTaskRequest(session=first.session), timeout=30)
    time.sleep(0.1)
    newer = second.join()
    assert newer.fence > older.fence
    with refused(Code.ABORTED, "another process joined as twice"):
        polling.result()
    with refused(Code.ABORTED):
        first.stub.Heartbeat(pb.HeartbeatRequest(session=first.session))
    second.leave()


def test_the_open_upload_of_a_process_that_was_taken_over_from_ends_with_it(device: Device, standing: Fleet) -> None:
    heir = Device(standing.address, device.name)
    chunks, encoded = device.encode()
    token = device.open(encoded).upload
    heir.join()
    with refused(Code.FAILED_PRECONDITION, "open it again"):
        device.send(token, chunks)
    heir.task, device.session = device.task, heir.session
    assert heir.send(heir.open(encoded).upload, chunks).outcome == pb.OUTCOME_COUNTED


def test_a_reconnection_of_the_same_process_is_no_takeover(standing: Fleet) -> None:
    device = Device(standing.address, "flaky")
    for _ in range(8):
        device.join(instance="same")
    device.leave()


def test_two_processes_that_keep_taking_over_are_stopped_and_the_holder_keeps_the_name(standing: Fleet) -> None:
    rivals = Device(standing.address, "rival"), Device(standing.address, "rival")
    for turn in range(4):
        rivals[turn % 2].join(instance=f"process-{turn % 2}")
    with refused(Code.ALREADY_EXISTS, "two processes claim this identity", "--name"):
        rivals[0].join(instance="process-0")
    assert rivals[1].stub.Heartbeat(pb.HeartbeatRequest(session=rivals[1].session)).abandon  # alive, without a task
    done = standing.run(
        "client", "--task", "tasks:shift", "-o", "size=600000", "--server", standing.address, "--name", "rival"
    )
    assert done.returncode == 5
    assert "two processes claim this identity" in done.stderr
    rivals[1].leave()


# ---- tasks and models ----------------------------------------------------------------------------


def test_the_same_task_is_given_until_it_is_done(device: Device) -> None:
    assert device.next_task().train.id == device.task.id
    assert device.next_task().train.plan == device.task.plan


def test_a_version_that_is_not_published(device: Device) -> None:
    request = pb.FetchModelRequest(session=device.session, version=device.task.model.version + 5)
    with refused(Code.NOT_FOUND, "is not published; the newest is"):
        list(device.stub.FetchModel(request))


def test_a_model_can_be_fetched_from_any_chunk_and_from_no_other_byte(device: Device) -> None:
    request = pb.FetchModelRequest(session=device.session, version=device.task.model.version)
    whole = list(device.stub.FetchModel(request))
    for at, chunk in enumerate(whole):
        request.offset_bytes = chunk.offset_bytes
        assert list(device.stub.FetchModel(request)) == whole[at:]
    request.offset_bytes = 1
    with refused(Code.OUT_OF_RANGE, "byte 1 is not the beginning of a chunk"):
        list(device.stub.FetchModel(request))


# ---- announcing an update ------------------------------------------------------------------------


def test_an_update_for_another_round(device: Device) -> None:
    _, encoded = device.encode()
    with refused(Code.FAILED_PRECONDITION, "round 999999 is not known"):
        device.open(encoded, round=999_999)


def test_an_update_computed_on_another_model(device: Device) -> None:
    _, encoded = device.encode()
    with refused(Code.FAILED_PRECONDITION, "was computed on model", "Ask for a new task"):
        device.open(encoded, model_digest=bytes(32))


def test_an_update_that_nobody_asked_for(device: Device, standing: Fleet) -> None:
    guest = Device(standing.address, "guest")
    guest.join()
    guest.task = device.task
    _, encoded = guest.encode()
    with refused(Code.FAILED_PRECONDITION, "client guest was not asked to train"):
        guest.open(encoded)
    guest.leave()


def test_an_update_that_came_too_late_gets_a_receipt_that_says_so(device: Device, standing: Fleet) -> None:
    operator = standing.operator()
    assert device.task.round > 0, "an earlier test committed a round"
    _, encoded = device.encode()
    receipt = device.open(encoded, round=device.task.round - 1).receipt
    assert receipt.outcome in (pb.OUTCOME_IGNORED, pb.OUTCOME_COUNTED)
    late = Device(standing.address, "latecomer")
    late.join()
    late.task = device.task
    receipt = late.open(encoded, round=0).receipt
    assert receipt.outcome == pb.OUTCOME_IGNORED
    assert "round 0 went on without latecomer" in receipt.reason
    late.leave()
    assert operator.Status(operator_pb2.StatusRequest()).version == device.task.round


def test_a_declared_size_over_the_limit(device: Device) -> None:
    _, encoded = device.encode()
    with refused(Code.RESOURCE_EXHAUSTED, "declared 1000000000000 bytes", "limits.upload_bytes"):
        device.open(encoded, size_bytes=10**12)


def test_a_codec_that_does_not_exist(device: Device) -> None:
    _, encoded = device.encode()
    with refused(Code.INVALID_ARGUMENT, "unknown codec", "raw32"):
        device.open(encoded, codec="zip")


def test_a_digest_of_the_wrong_length(device: Device) -> None:
    _, encoded = device.encode()
    with refused(Code.INVALID_ARGUMENT, "32 bytes; found 3"):
        device.open(encoded, digest=b"abc")


@pytest.mark.parametrize(
    ("field", "value"), [("loss_before", float("nan")), ("loss_after", float("inf")), ("learning_rate", -1.0)]
)
def test_a_report_that_is_not_usable(device: Device, field: str, value: float) -> None:
    _, encoded = device.encode()
    report = pb.TrainReport()
    report.CopyFrom(REPORT)
    setattr(report, field, value)
    with refused(Code.INVALID_ARGUMENT, "the training report is not usable", field):
        device.open(encoded, report=report)


# ---- sending it ----------------------------------------------------------------------------------


def test_a_stream_without_an_open_upload(device: Device) -> None:
    chunks, _ = device.encode()
    with refused(Code.FAILED_PRECONDITION, "not open"):
        device.send(b"no such upload", chunks)


def test_an_update_that_is_opened_and_sent_in_one_call_counts_once(device: Device) -> None:
    chunks, encoded = device.encode()
    announced = device.announcement(encoded).SerializeToString()
    first, again = (device.open_and_send(announced, chunks) for _ in range(2))
    assert first.outcome == again.outcome == pb.OUTCOME_COUNTED
    assert first.digest == again.digest == encoded.digest


def test_one_call_does_not_send_again_what_is_here(device: Device) -> None:
    chunks, encoded = device.encode()
    with pytest.raises(grpc.RpcError):  # the stream ends too early, and leaves its first chunks here
        device.send(device.open(encoded).upload, chunks[:3])
    with refused(Code.FAILED_PRECONDITION, "a part of this update is here already"):
        device.open_and_send(device.announcement(encoded).SerializeToString(), chunks)
    opened = device.open(encoded)
    rest = [chunk for chunk in chunks if chunk.offset_bytes >= opened.offset_bytes]
    assert 0 < len(rest) < len(chunks)
    assert device.send(opened.upload, rest).outcome == pb.OUTCOME_COUNTED


def test_one_call_is_refused_as_its_two_halves_are(device: Device) -> None:
    chunks, encoded = device.encode()
    wrong = device.announcement(encoded, model_digest=bytes(32)).SerializeToString()
    with refused(Code.FAILED_PRECONDITION, "was computed on model"):
        device.open_and_send(wrong, chunks)
    with refused(Code.DATA_LOSS, "checksum"):
        device.open_and_send(device.announcement(encoded).SerializeToString(), corrupted(chunks))
    with refused(Code.INVALID_ARGUMENT, "not a serialized OpenUploadRequest"):
        device.open_and_send(b"\xff\xff", chunks)


def sent(device: Device, change: Callable[[list[Chunk]], list[Chunk]], **fields: Any) -> pb.Receipt:
    chunks, encoded = device.encode()
    return device.send(device.open(encoded, **fields).upload, change(chunks))


def corrupted(chunks: list[Chunk]) -> list[Chunk]:
    chunks[1].data = bytes([chunks[1].data[0] ^ 1]) + chunks[1].data[1:]
    return chunks


def test_a_corrupted_chunk_and_then_the_rest(device: Device) -> None:
    with refused(Code.DATA_LOSS, "does not match its checksum", "update of device"):
        sent(device, corrupted)
    chunks, encoded = device.encode()
    opened = device.open(encoded)
    assert opened.offset_bytes == chunks[1].offset_bytes  # the good one before it is kept
    rest = [chunk for chunk in chunks if chunk.offset_bytes >= opened.offset_bytes]
    assert device.send(opened.upload, rest).outcome == pb.OUTCOME_COUNTED


def test_a_reordered_stream(device: Device) -> None:
    with refused(Code.OUT_OF_RANGE, "not the one that follows; expected byte 0"):
        sent(device, lambda chunks: [chunks[1], chunks[0], *chunks[2:]])


def test_a_truncated_stream(device: Device) -> None:
    with refused(Code.OUT_OF_RANGE, "the stream ended after"):
        sent(device, lambda chunks: chunks[:-1])


def test_a_chunk_that_was_left_out(device: Device) -> None:
    with refused(Code.OUT_OF_RANGE, "not the one that follows"):
        sent(device, lambda chunks: [chunks[0], *chunks[2:]])


def test_more_bytes_than_announced(device: Device) -> None:
    with refused(Code.INVALID_ARGUMENT, "1048576 bytes came", "100 were announced"):
        sent(device, lambda chunks: chunks, size_bytes=100)


def test_another_digest_than_announced(device: Device) -> None:
    with refused(Code.DATA_LOSS, "announced was 0000000000000000"):
        sent(device, lambda chunks: chunks, digest=bytes(32))
    _, encoded = device.encode()
    assert device.open(encoded, digest=bytes(32)).offset_bytes == 0  # begun anew


def too_large(chunks: list[Chunk]) -> list[Chunk]:
    data = bytes((1 << 20) + 4)
    chunks[0].MergeFrom(Chunk(data=data, checksum=xxh3_128_digest(data), elements=len(data) // 4))
    return chunks


def test_a_chunk_over_the_limit(device: Device) -> None:
    with refused(Code.INVALID_ARGUMENT, "carries 1048580 bytes; at most 1048576"):
        sent(device, too_large)


def lying(chunks: list[Chunk]) -> list[Chunk]:
    chunks[0].elements += 1
    return chunks


def too_many(chunks: list[Chunk]) -> list[Chunk]:
    chunks[0].elements = 2**31
    return chunks


def wrong_section(chunks: list[Chunk]) -> list[Chunk]:
    chunks[0].section = SECTION_BUFFERS
    return chunks


def nothing_in_it(chunks: list[Chunk]) -> list[Chunk]:
    return [Chunk(section=1, checksum=xxh3_128_digest(b"")), *chunks]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lying, "values in raw32 take"),
        (too_many, "declares 2147483648 elements"),
        (wrong_section, "expected element 0 of parameters"),
        (nothing_in_it, "declares 0 elements"),
    ],
)
def test_a_chunk_that_lies(device: Device, change: Callable[[list[Chunk]], list[Chunk]], message: str) -> None:
    with refused(Code.INVALID_ARGUMENT, message):
        sent(device, change)


def test_bytes_that_are_no_message(device: Device) -> None:
    _, encoded = device.encode()
    with refused(Code.INVALID_ARGUMENT, "not a Chunk message"):
        device.send_raw(device.open(encoded).upload, [b"\xff\xff\xff\xff"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite(device: Device, value: float) -> None:
    chunks, encoded = device.encode(value)
    with refused(Code.INVALID_ARGUMENT, "element 0 of tensor weight is", "not a finite number"):
        device.send(device.open(encoded).upload, chunks)


def test_a_duplicate_gets_the_same_receipt(device: Device) -> None:
    chunks, encoded = device.encode()
    first = device.send(device.open(encoded).upload, chunks)
    assert first.outcome == pb.OUTCOME_COUNTED
    assert device.open(encoded).receipt == first
    _, other = device.encode(2.0)
    assert device.open(other).receipt == first, "the first update stands; nothing counts twice"


def test_an_upload_opened_again_shuts_the_older_stream_out(device: Device) -> None:
    chunks, encoded = device.encode()
    older, newer = device.open(encoded).upload, device.open(encoded).upload
    with refused(Code.FAILED_PRECONDITION, "not open"):
        device.send(older, chunks)
    assert device.send(newer, chunks).outcome == pb.OUTCOME_COUNTED


@pytest.mark.parametrize("after_seconds", [0.0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05])
def test_a_client_that_hangs_up_at_any_moment_of_its_upload_can_go_on(device: Device, after_seconds: float) -> None:
    """The stream may be cut while its last chunk is decoded, fsynced or recorded: the update still counts, once."""
    chunks, encoded = device.encode()
    metadata = (("fairfleet-upload-bin", device.open(encoded).upload),)
    call = device.stub.SendUpload.future(iter(chunks), metadata=metadata)
    time.sleep(after_seconds)
    call.cancel()
    opened = device.open(encoded)
    receipt = opened.receipt
    if not opened.HasField("receipt"):
        rest = [chunk for chunk in chunks if chunk.offset_bytes >= opened.offset_bytes]
        receipt = device.send(opened.upload, rest)
    assert (receipt.outcome, receipt.durable) == (pb.OUTCOME_COUNTED, True)
    assert device.open(encoded).receipt.digest == encoded.digest


def test_an_update_replaced_while_it_is_recorded_is_not_both(device: Device, standing: Fleet) -> None:
    chunks, encoded = device.encode(1.0)
    metadata = (("fairfleet-upload-bin", device.open(encoded).upload),)
    first = device.stub.SendUpload.future(iter(chunks), metadata=metadata)
    others, other = device.encode(2.0)
    opened = device.open(other)
    if not opened.HasField("receipt"):
        device.send(opened.upload, others)
    with contextlib.suppress(grpc.RpcError):
        first.result(timeout=10)
    rows = standing.query(f"select digest, file from updates where round = {device.task.round} and client = 'device'")
    assert len(rows) == 1
    digest, file = rows[0]
    assert digest in (encoded.digest.hex(), other.digest.hex())
    assert (standing.state / file).exists()


def test_saying_goodbye_twice_is_no_mistake(standing: Fleet) -> None:
    guest = Device(standing.address, "polite")
    guest.join()
    for _ in range(2):
        guest.stub.Leave(pb.LeaveRequest(session=guest.session), timeout=5)


def test_another_digest_begins_at_zero(device: Device) -> None:
    with refused(Code.OUT_OF_RANGE):
        sent(device, lambda chunks: chunks[:1])
    _, other = device.encode(3.0)
    assert device.open(other).offset_bytes == 0


def test_an_evaluation_that_is_not_usable(device: Device) -> None:
    request = pb.ReportEvaluationRequest(session=device.session, version=0)
    request.evaluation.MergeFrom(pb.Evaluation(samples=1, loss=1.0, accuracy=1.5))
    with refused(Code.INVALID_ARGUMENT, "accuracy"):
        device.stub.ReportEvaluation(request)


# ---- the server's own surroundings ---------------------------------------------------------------


def test_health_and_reflection_answer(standing: Fleet) -> None:
    with grpc.insecure_channel(standing.address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        (answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked)
    names = {service.name for service in answer.list_services_response.service}
    assert {"fairfleet.v1.Fleet", "fairfleet.v1.Operator", "grpc.health.v1.Health"} <= names


def test_frequent_pings_are_borne(standing: Fleet) -> None:
    """A server at gRPC's defaults answers a client that pings often with GOAWAY, and the call is lost."""
    options = [("grpc.keepalive_time_ms", 10_000), ("grpc.http2.max_pings_without_data", 0)]
    with grpc.insecure_channel(standing.address, options) as channel:
        assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == 1


def start(fleet: Fleet, *words: str) -> tuple[int, str]:
    done = fleet.run("server", "--listen", "127.0.0.1:0", *words)
    return done.returncode, done.stderr


def test_a_port_in_use(fleet: Fleet) -> None:
    model = fleet.init()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, said = start(
            fleet, "--listen", f"127.0.0.1:{port}", "--state-dir", str(fleet.state), "--model", str(model)
        )
    assert code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert "Traceback" not in said


def test_a_second_server_on_the_same_state_directory(standing: Fleet) -> None:
    code, said = start(standing, "--state-dir", str(standing.state))
    assert code == 3
    assert standing.server is not None
    assert f"is in use by another server (process {standing.server.pid})" in said


def test_a_foreign_directory_is_left_alone(fleet: Fleet) -> None:
    (fleet.folder / "holiday.jpg").write_text("precious")
    code, said = start(fleet, "--state-dir", str(fleet.folder))
    assert code == 3
    assert "not a FairFleet state directory: it holds 'holiday.jpg'" in said
    assert [path.name for path in fleet.folder.iterdir()] == ["holiday.jpg"]


def test_a_directory_that_cannot_be_written(fleet: Fleet) -> None:
    (fleet.folder / "file").write_text("")
    code, said = start(fleet, "--state-dir", str(fleet.folder / "file" / "state"))
    assert (code, "Not a directory" in said) == (3, True)
    if os.geteuid() == 0:
        return  # root may write anywhere
    (fleet.folder / "locked").mkdir(mode=0o500)
    code, said = start(fleet, "--state-dir", str(fleet.folder / "locked"))
    assert (code, "Permission denied" in said) == (3, True)


def test_a_database_that_is_none(fleet: Fleet) -> None:
    fleet.state.mkdir()
    (fleet.state / "federation.db").write_bytes(b"this is not a database, it only bears the name of one" * 100)
    code, said = start(fleet, "--state-dir", str(fleet.state))
    assert code == 3
    assert "cannot be read as a database" in said


def test_a_model_file_that_was_damaged(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(rounds=2, exit_when_finished=True)
    for name in ("a", "b"):
        fleet.start_client(name)
    fleet.wait_clients()
    assert fleet.server is not None
    fleet.server.wait(20)
    path: Path = max((fleet.state / "models").iterdir())
    path.write_bytes(path.read_bytes()[:-4] + b"oops")
    code, said = start(fleet, "--state-dir", str(fleet.state))
    assert code == 3
    assert f"{path.name} is damaged" in said


def test_no_federation_and_no_model(fleet: Fleet) -> None:
    code, said = start(fleet, "--state-dir", str(fleet.state))
    assert code == 2
    assert "fairfleet init" in said


def test_another_model_than_the_state_directory_holds(fleet: Fleet, tmp_path: Path) -> None:
    fleet.init()
    fleet.start_server()
    assert fleet.stop_server() == 0
    (fleet.folder / "model.safetensors").unlink()
    model = fleet.init(7)
    code, said = start(fleet, "--state-dir", str(fleet.state), "--model", str(model))
    assert code == 2
    assert "holds a federation of another model" in said
    assert "found tensor weight float32[7]" in said


def test_bad_settings_are_reported_all_at_once(fleet: Fleet) -> None:
    (fleet.folder / "bad.yaml").write_text("rounds: none\nplan:\n  solver: magic\ntypo: 1\n")
    code, said = start(fleet, "-c", str(fleet.folder / "bad.yaml"), "--set", "round.quorum=7")
    assert code == 2
    for part in ("4 mistakes", "rounds:", "plan.solver:", "typo: there is no such setting", "round.quorum:"):
        assert part in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "nowhere:task"), "no module 'nowhere'"),
        (("--task", "tasks:nothing"), "has no 'nothing'"),
        (("--task", "tasks"), "module:name"),
        (("--task", "tasks:shift", "-o", "colour=red"), "colour"),
        (("--task", "tasks:np"), "not a Task"),
        ((), "task: Field required"),
        (("--task", "tasks:shift", "--server", "nowhere"), "host:port"),
    ],
)
def test_a_client_command_that_cannot_work(fleet: Fleet, words: tuple[str, ...], message: str) -> None:
    done = fleet.run("client", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_lease_of_a_silent_client_ends(fleet: Fleet) -> None:
    fleet.init()
    fleet.start_server(lease_seconds=0.5, round__minimum_clients=5)
    device = Device(fleet.address, "silent")
    device.join()
    assert fleet.status().connected == 1
    until(lambda: fleet.status().connected == 0, "the lease to end")
    with refused(Code.UNAUTHENTICATED):
        device.next_task()


def test_a_call_that_is_refused_leaves_no_stream_behind(fleet: Fleet) -> None:
    """Also while nothing else happens, so that Python's collector has no reason to come by."""
    fleet.init()
    fleet.start_server(limits__streams_per_connection=8)
    device = Device(fleet.address, "ann", fleet.channel())
    for _ in range(100):
        with refused(Code.UNAUTHENTICATED, "join again"):
            device.stub.Heartbeat(pb.HeartbeatRequest(session="unknown"), timeout=20)
        with refused(Code.UNAUTHENTICATED, "join again"):
            list(device.stub.FetchModel(pb.FetchModelRequest(session="unknown"), timeout=20))
    device.channel.close()
