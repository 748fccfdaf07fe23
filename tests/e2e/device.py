"""A client made by hand, one RPC at a time, that can say anything: also what a real client never would."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import grpc
import numpy as np

from fairfleet.common.codecs import codec_named
from fairfleet.common.stream import Encoded, encode, float_pieces, state_pieces
from fairfleet.common.tensors import Model, Section
from fairfleet.common.wire import signature_in
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.fleet_pb2_grpc import FleetStub
from fairfleet.proto.v1.model_pb2 import Chunk

REPORT = pb.TrainReport(samples=10, loss_before=1.0, loss_after=0.5, steps=1, learning_rate=0.1)


def read_task(call: Any) -> tuple[list[Chunk], pb.NextTaskResponse]:
    chunks, told = list(call), dict(call.trailing_metadata())
    return chunks, pb.NextTaskResponse.FromString(told["fairfleet-task-bin"])


class Device:
    def __init__(self, address: str, name: str, channel: grpc.Channel | None = None) -> None:
        self.name = name
        self.channel = channel or grpc.insecure_channel(address)
        self.stub = FleetStub(self.channel)
        self.session = ""

    def join(self, **fields: Any) -> pb.JoinResponse:
        known = {"client": self.name, "instance": secrets.token_hex(4), "protocol_version": 1, "codecs": ["raw32"]}
        joined = self.stub.Join(pb.JoinRequest(**(known | fields)), timeout=10, wait_for_ready=True)
        self.session = joined.session
        self.model = Model.empty(signature_in(joined.signature))
        return joined

    def next_task(self) -> pb.NextTaskResponse:
        return self.stub.NextTask(pb.NextTaskRequest(session=self.session), timeout=40)

    def take_task(self, held: bytes = b"") -> tuple[list[Chunk], pb.NextTaskResponse]:
        """The model that came in front of the task, and the task."""
        return read_task(self.stub.TakeTask(pb.TakeTaskRequest(session=self.session, held=held), timeout=40))

    def train_task(self) -> pb.TrainTask:
        """Waits for a task to train; remembers it."""
        for _ in range(10):
            response = self.next_task()
            if response.HasField("train"):
                self.task = response.train
                return self.task
        raise AssertionError("no task came")

    def encode(self, value: float = 1.0, codec: str = "raw32") -> tuple[list[Chunk], Encoded]:
        """The chunks of an update that moves every parameter by `value`."""
        size, chunks = len(self.model.parameters), list[Chunk]()
        pieces = chain(
            float_pieces(Section.PARAMETERS, size, codec_named(codec), lambda a, b: np.full(b - a, value, np.float32)),
            state_pieces(self.model),
        )
        encoded = encode(pieces, lambda head, data: chunks.append(Chunk.FromString(b"".join((head, data)))))
        return chunks, encoded

    def open(self, encoded: Encoded, **fields: Any) -> pb.OpenUploadResponse:
        return self.stub.OpenUpload(self.announcement(encoded, **fields), timeout=10)

    def announcement(self, encoded: Encoded, **fields: Any) -> pb.OpenUploadRequest:
        known = {
            "session": self.session,
            "round": self.task.round,
            "model_digest": self.task.model.digest,
            "codec": "raw32",
            "size_bytes": encoded.size_bytes,
            "digest": encoded.digest,
            "report": REPORT,
            "privacy": self.task.privacy if self.task.HasField("privacy") else None,  # it says that it did so
        }
        return pb.OpenUploadRequest(**(known | fields))

    def open_and_send(self, announced: bytes, chunks: Iterable[Chunk]) -> pb.Receipt:
        metadata = (("fairfleet-announced-bin", announced),)
        return self.stub.SendUpload(iter(chunks), metadata=metadata, timeout=20).receipt

    def send(self, upload: bytes, chunks: Iterable[Chunk]) -> pb.Receipt:
        stream: Iterator[Chunk] = iter(chunks)
        return self.stub.SendUpload(stream, metadata=(("fairfleet-upload-bin", upload),), timeout=20).receipt

    def send_raw(self, upload: bytes, messages: list[bytes]) -> bytes:
        call = self.channel.stream_unary("/fairfleet.v1.Fleet/SendUpload", None, None)
        answer: bytes = call(iter(messages), metadata=(("fairfleet-upload-bin", upload),), timeout=20)
        return answer

    def leave(self) -> None:
        self.stub.Leave(pb.LeaveRequest(session=self.session), timeout=20)
        self.channel.close()
