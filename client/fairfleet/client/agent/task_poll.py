"""One wait for a task: it may take several calls, and a model may precede the task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fairfleet.client.agent.counters import ClientCounters
from fairfleet.common.wire import TASK_METADATA
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.fleet_pb2_grpc import FleetStub

POLL_SECONDS = 45.0  # for NextTask, which the server holds for up to 30 s


class TaskPoll:
    """Asks for a task, and remembers whether a model has begun to arrive."""

    def __init__(
        self,
        held_digest: Callable[[], bytes],
        receive: Callable[[Iterator[bytes]], object],
        counters: ClientCounters,
    ) -> None:
        """The server sends no model whose digest is `held_digest()`; `receive` gets the chunks."""
        self._held_digest, self._receive, self._counters = held_digest, receive, counters
        self._model_begun = False

    def ask(self, take: Any, stub: FleetStub, session: str, **counts: int) -> pb.NextTaskResponse:
        """Ask once. `take` is the call that brings models; None: the server does not know it."""
        if take is not None and not self._model_begun:
            # No time limit, as for a download: keepalive detects a dead connection.
            held = self._held_digest()
            call = take(pb.TakeTaskRequest(session=session, held=held, **counts))
            self._receive(self._counted(call))
            metadata = {entry.key: entry.value for entry in call.trailing_metadata()}
            if TASK_METADATA in metadata:  # a proxy may have dropped it
                return pb.NextTaskResponse.FromString(metadata[TASK_METADATA])
        request = pb.NextTaskRequest(session=session, **counts)
        return stub.NextTask(request, timeout=POLL_SECONDS)

    def _counted(self, call: Iterable[bytes]) -> Iterator[bytes]:
        for message in self._counters.counting_received(call):
            self._model_begun = True
            yield message
