"""A client that sends one RPC at a time, including messages that a real client never sends."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import grpc
import numpy as np
from numpy.typing import ArrayLike

from fairfleet.common.chunk_stream import EncodedStream, encode, float_pieces, state_pieces
from fairfleet.common.codecs import codec_named
from fairfleet.common.tensors import Model, Section
from fairfleet.common.wire import signature_in
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.fleet_pb2_grpc import FleetStub
from fairfleet.proto.v1.model_pb2 import Chunk
from tests.support.fleet import OWN_CONNECTION

JOIN_RETRIES = 2
REPORT = pb.TrainReport(samples=10, loss_before=1.0, loss_after=0.5, steps=1, learning_rate=0.1)


def read_task(call: Any) -> tuple[list[Chunk], pb.NextTaskResponse]:
    """Return the chunks and the task that a TakeTask call brings."""
    chunks, metadata = list(call), dict(call.trailing_metadata())
    return chunks, pb.NextTaskResponse.FromString(metadata["fairfleet-task-bin"])


class Device:
    """One client. It keeps its session, its model and the last training task."""

    def __init__(self, address: str, name: str, channel: grpc.Channel | None = None) -> None:
        self.name = name
        self.channel = channel or grpc.insecure_channel(address, OWN_CONNECTION)
        self.stub = FleetStub(self.channel)
        self.session = ""

    def join(self, **fields: Any) -> pb.JoinResponse:
        """Join the federation; `fields` replace those of an ordinary request."""
        defaults = {
            "client": self.name,
            "instance": secrets.token_hex(4),
            "protocol_version": 1,
            "codecs": ["raw32"],
        }
        joined = self._joined(pb.JoinRequest(**(defaults | fields)))
        self.session = joined.session
        self.model = Model.empty(signature_in(joined.signature))
        return joined

    def _joined(self, request: pb.JoinRequest) -> pb.JoinResponse:
        """Join, again if the channel notices only now that the server was restarted."""
        for _ in range(JOIN_RETRIES):
            try:
                return self.stub.Join(request, timeout=10, wait_for_ready=True)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
        return self.stub.Join(request, timeout=10, wait_for_ready=True)

    def next_task(self) -> pb.NextTaskResponse:
        """Poll for a task once."""
        return self.stub.NextTask(pb.NextTaskRequest(session=self.session), timeout=40)

    def take_task(self, cached_digest: bytes = b"") -> tuple[list[Chunk], pb.NextTaskResponse]:
        """Return the chunks of the model that came before the task, and the task."""
        request = pb.TakeTaskRequest(session=self.session, held=cached_digest)
        return read_task(self.stub.TakeTask(request, timeout=40))

    def fail_all_tasks(self) -> None:
        """Report every training task as failed, in the background, until the server ends."""

        def fail() -> None:
            with contextlib.suppress(grpc.RpcError):
                while (response := self.next_task()).WhichOneof("task") != "finished":
                    if task := response.train.id:
                        request = pb.HeartbeatRequest(
                            session=self.session, task=task, failure="no disk"
                        )
                        self.stub.Heartbeat(request, timeout=10)

        threading.Thread(target=fail, daemon=True).start()

    def train_task(self) -> pb.TrainTask:
        """Wait for a training task, keep it in `task`, and return it."""
        for _ in range(10):
            response = self.next_task()
            if response.HasField("train"):
                self.task = response.train
                return self.task
        raise AssertionError("no task came")

    def encode(
        self, value: ArrayLike = 1.0, codec: str = "raw32"
    ) -> tuple[list[Chunk], EncodedStream]:
        """Return the chunks of an update and their summary.

        The value is that of all parameters, or there is one for each. Buffers are those of
        `model`.
        """
        size, chunks = len(self.model.parameters), list[Chunk]()
        values = np.ascontiguousarray(np.broadcast_to(np.asarray(value, np.float32), size))
        pieces = chain(
            float_pieces(Section.PARAMETERS, size, codec_named(codec), lambda a, b: values[a:b]),
            state_pieces(self.model),
        )
        encoded = encode(
            pieces, lambda head, data: chunks.append(Chunk.FromString(b"".join((head, data))))
        )
        return chunks, encoded

    def open(self, encoded: EncodedStream, **fields: Any) -> pb.OpenUploadResponse:
        """Announce an update; `fields` replace those of an honest announcement."""
        return self.stub.OpenUpload(self.announcement(encoded, **fields), timeout=10)

    def announcement(self, encoded: EncodedStream, **fields: Any) -> pb.OpenUploadRequest:
        """Return the announcement of an update that was trained as the task requires."""
        task = self.task
        defaults = {
            "session": self.session,
            "round": task.round,
            "model_digest": task.model.digest,
            "codec": "raw32",
            "size_bytes": encoded.size_bytes,
            "digest": encoded.digest,
            "report": REPORT,
            # The device claims to have applied the privacy of the task.
            "privacy": task.privacy if task.HasField("privacy") else None,
        }
        return pb.OpenUploadRequest(**(defaults | fields))

    def open_and_send(self, announced: bytes, chunks: Iterable[Chunk]) -> pb.Receipt:
        """Announce and send an update in one call."""
        metadata = (("fairfleet-announced-bin", announced),)
        return self.stub.SendUpload(iter(chunks), metadata=metadata, timeout=20).receipt

    def send(self, upload: bytes, chunks: Iterable[Chunk]) -> pb.Receipt:
        """Send the chunks of an open upload."""
        stream: Iterator[Chunk] = iter(chunks)
        return self.stub.SendUpload(
            stream, metadata=(("fairfleet-upload-bin", upload),), timeout=20
        ).receipt

    def send_raw(self, upload: bytes, messages: list[bytes]) -> bytes:
        """Send messages that need not be chunks, and return the serialized answer."""
        call = self.channel.stream_unary("/fairfleet.v1.Fleet/SendUpload", None, None)
        answer: bytes = call(
            iter(messages), metadata=(("fairfleet-upload-bin", upload),), timeout=20
        )
        return answer

    def leave(self) -> None:
        """Leave the federation and close the channel."""
        self.stub.Leave(pb.LeaveRequest(session=self.session), timeout=20)
        self.channel.close()
