"""Simulate many clients without data in one process, on few connections.

They join, and train and evaluate when the server selects them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
import numpy as np

from fairfleet.common.chunk_stream import encode, model_pieces
from fairfleet.common.tensors import Model
from fairfleet.common.wire import PROTOCOL_VERSION, UPLOAD_METADATA, signature_in
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.fleet_pb2_grpc import FleetStub

PER_CONNECTION = 20  # clients: fewer than the server's limits.streams_per_connection
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
REPORT = pb.TrainReport(samples=10, loss_before=1.0, loss_after=0.5, steps=1, learning_rate=0.1)


class SimulatedClients:
    """Clients that run in a separate thread until the end of a `with` block."""

    def __init__(self, address: str, count: int) -> None:
        self._address, self._count = address, count
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> SimulatedClients:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._all.cancel)
        self._thread.join(20)

    def _run(self) -> None:
        self._all = self._loop.create_task(self._take_part())
        # CancelledError: the block has ended. RpcError: the server has ended.
        with contextlib.suppress(asyncio.CancelledError, grpc.RpcError):
            self._loop.run_until_complete(self._all)

    async def _take_part(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(
                    grpc.aio.insecure_channel(self._address, OWN_CONNECTION)
                )
                for _ in range(0, self._count, PER_CONNECTION)
            ]
            await asyncio.gather(
                *(
                    SimulatedClient(channels[number // PER_CONNECTION], number).run()
                    for number in range(self._count)
                )
            )


class SimulatedClient:
    """One client, with random updates and accuracies."""

    def __init__(self, channel: grpc.aio.Channel, number: int) -> None:
        self._channel, self._stub, self._number = channel, FleetStub(channel), number
        self._random = np.random.default_rng(number)

    async def run(self) -> None:
        """Join and do all tasks until the federation is finished."""
        stub: Any = self._stub
        join = pb.JoinRequest(
            client=f"client-{self._number:04d}",
            instance=secrets.token_hex(4),
            protocol_version=PROTOCOL_VERSION,
            codecs=["raw32"],
            train_samples=10,
            test_samples=10,
            device="crowd",
        )
        joined = await stub.Join(join, timeout=60)
        self._session, self._signature = joined.session, signature_in(joined.signature)
        while True:
            task = await stub.NextTask(pb.NextTaskRequest(session=self._session), timeout=60)
            match task.WhichOneof("task"):
                case "train":
                    await self._train(task.train)
                case "evaluate":
                    await stub.ReportEvaluation(
                        self._evaluation(task.evaluate.model.version), timeout=60
                    )
                case "finished":
                    return

    def _evaluation(self, version: int) -> pb.ReportEvaluationRequest:
        accuracy = float(
            np.clip(0.4 + 0.05 * version + 0.1 * self._random.standard_normal(), 0.0, 1.0)
        )
        evaluation = pb.Evaluation(samples=10, loss=2.0 - accuracy, accuracy=accuracy)
        return pb.ReportEvaluationRequest(
            session=self._session, version=version, evaluation=evaluation
        )

    async def _train(self, task: pb.TrainTask) -> None:
        messages: list[bytes] = []
        update = Model.empty(self._signature)
        update.parameters[:] = self._random.standard_normal(update.parameters.size)
        encoded = encode(
            model_pieces(update), lambda head, data: messages.append(b"".join((head, data)))
        )
        request = pb.OpenUploadRequest(
            session=self._session,
            round=task.round,
            model_digest=task.model.digest,
            codec="raw32",
            size_bytes=encoded.size_bytes,
            digest=encoded.digest,
            report=REPORT,
        )
        stub: Any = self._stub
        opened = await stub.OpenUpload(request, timeout=60)
        if not opened.HasField("receipt"):
            send: Any = self._channel.stream_unary("/fairfleet.v1.Fleet/SendUpload", None, None)
            await send(iter(messages), metadata=((UPLOAD_METADATA, opened.upload),), timeout=60)
