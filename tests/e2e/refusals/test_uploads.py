"""Uploads that are repeated, replaced, interrupted, or not opened."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import grpc
import pytest

from fairfleet.common.wire import ERROR_METADATA
from fairfleet.proto.v1 import fleet_pb2 as pb
from tests.support.altered_chunks import flip_one_bit, send_altered
from tests.support.device import Device
from tests.support.fleet import Fleet
from tests.support.refusals import refused

Code = grpc.StatusCode


def test_a_takeover_closes_the_upload_of_the_former_process(
    device: Device, shared_fleet: Fleet
) -> None:
    successor = Device(shared_fleet.address, device.name)
    chunks, encoded = device.encode()
    token = device.open(encoded).upload
    successor.join()
    with refused(Code.FAILED_PRECONDITION, "open it again"):
        device.send(token, chunks)
    successor.task, device.session = device.task, successor.session
    assert successor.send(successor.open(encoded).upload, chunks).outcome == pb.OUTCOME_COUNTED


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_grpc_compression_is_refused_with_an_explanation(
    shared_fleet: Fleet, device: Device, compression: grpc.Compression
) -> None:
    kind = compression.name.lower()
    words = (f"compressed with {kind}", "Switch it off")
    with grpc.insecure_channel(shared_fleet.address, compression=compression) as channel:
        packed = Device("", device.name, channel)
        with pytest.raises(grpc.RpcError) as caught:
            packed.join(device="d" * 1000)
        error: Any = caught.value
        assert error.code() is Code.UNIMPLEMENTED
        assert all(word in error.details() for word in words)
        assert dict(error.trailing_metadata())[ERROR_METADATA] == "CompressedMessage"
        chunks, encoded = device.encode()
        with refused(Code.UNIMPLEMENTED, *words):
            packed.send(device.open(encoded).upload, chunks)
    assert send_altered(device, lambda chunks: chunks).outcome == pb.OUTCOME_COUNTED


def test_a_stream_without_an_open_upload_is_refused(device: Device) -> None:
    chunks, _ = device.encode()
    with refused(Code.FAILED_PRECONDITION, "not open"):
        device.send(b"no such upload", chunks)


@pytest.mark.parametrize(
    "metadata", [(), (("fairfleet-upload-bin", b""),), (("fairfleet-upload", "token"),)]
)
def test_a_stream_that_does_not_name_its_upload_is_refused(
    device: Device, metadata: tuple[tuple[str, Any], ...]
) -> None:
    """Opening the upload again, as other refusals suggest, would not help here."""
    chunks, _ = device.encode()
    with refused(Code.INVALID_ARGUMENT, "have no fairfleet-upload-bin", "fairfleet-announced-bin"):
        device.stub.SendUpload(iter(chunks), metadata=metadata, timeout=20)


def test_an_update_opened_and_sent_in_one_call_counts_once(device: Device) -> None:
    chunks, encoded = device.encode()
    announced = device.announcement(encoded).SerializeToString()
    first, again = (device.open_and_send(announced, chunks) for _ in range(2))
    assert first.outcome == again.outcome == pb.OUTCOME_COUNTED
    assert first.digest == again.digest == encoded.digest


def test_one_call_is_refused_if_the_server_has_a_part_of_the_update(device: Device) -> None:
    chunks, encoded = device.encode()
    # The stream ends too early; the server keeps its first chunks.
    with pytest.raises(grpc.RpcError):
        device.send(device.open(encoded).upload, chunks[:3])
    with refused(Code.FAILED_PRECONDITION, "a part of this update was received before"):
        device.open_and_send(device.announcement(encoded).SerializeToString(), chunks)
    opened = device.open(encoded)
    rest = [chunk for chunk in chunks if chunk.offset_bytes >= opened.offset_bytes]
    assert 0 < len(rest) < len(chunks)
    assert device.send(opened.upload, rest).outcome == pb.OUTCOME_COUNTED


def test_one_call_is_refused_for_the_same_reasons_as_two(device: Device) -> None:
    chunks, encoded = device.encode()
    wrong = device.announcement(encoded, model_digest=bytes(32)).SerializeToString()
    with refused(Code.FAILED_PRECONDITION, "was computed on model"):
        device.open_and_send(wrong, chunks)
    with refused(Code.DATA_LOSS, "checksum"):
        device.open_and_send(device.announcement(encoded).SerializeToString(), flip_one_bit(chunks))
    with refused(Code.INVALID_ARGUMENT, "not a serialized OpenUploadRequest"):
        device.open_and_send(b"\xff\xff", chunks)


def test_a_duplicate_gets_the_same_receipt_and_another_update_is_refused(device: Device) -> None:
    chunks, encoded = device.encode()
    first = device.send(device.open(encoded).upload, chunks)
    assert first.outcome == pb.OUTCOME_COUNTED
    assert device.open(encoded).receipt == first
    _, second_encoded = device.encode(2.0)
    with refused(
        Code.FAILED_PRECONDITION, f"{encoded.digest.hex()[:16]}… counts", "request the next task"
    ):
        device.open(second_encoded)
    assert device.open(encoded).receipt == first


def test_opening_an_upload_again_voids_the_older_stream(device: Device) -> None:
    chunks, encoded = device.encode()
    older, newer = device.open(encoded).upload, device.open(encoded).upload
    with refused(Code.FAILED_PRECONDITION, "not open"):
        device.send(older, chunks)
    assert device.send(newer, chunks).outcome == pb.OUTCOME_COUNTED


@pytest.mark.parametrize("after_seconds", [0.0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05])
def test_an_upload_cut_at_any_moment_can_be_resumed_and_counts_once(
    device: Device, after_seconds: float
) -> None:
    """The stream may be cut while its last chunk is decoded, synced or recorded."""
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


def test_an_update_replaced_while_it_is_recorded_is_stored_once(
    device: Device, shared_fleet: Fleet
) -> None:
    chunks, encoded = device.encode(1.0)
    metadata = (("fairfleet-upload-bin", device.open(encoded).upload),)
    first = device.stub.SendUpload.future(iter(chunks), metadata=metadata)
    second_chunks, second_encoded = device.encode(2.0)
    with contextlib.suppress(grpc.RpcError):  # the first may have a receipt already
        device.send(device.open(second_encoded).upload, second_chunks)
    with contextlib.suppress(grpc.RpcError):
        first.result(timeout=10)
    rows = shared_fleet.query(
        f"select digest, file from updates where round = {device.task.round} and client = 'device'"
    )
    assert len(rows) == 1
    digest, file = rows[0]
    assert digest in (encoded.digest.hex(), second_encoded.digest.hex())
    assert (shared_fleet.state / file).exists()


def test_an_upload_with_another_digest_begins_at_zero(device: Device) -> None:
    with refused(Code.OUT_OF_RANGE):
        send_altered(device, lambda chunks: chunks[:1])
    _, second_encoded = device.encode(3.0)
    assert device.open(second_encoded).offset_bytes == 0
