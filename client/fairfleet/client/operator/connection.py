"""An operator's connection to a server: its status, its events and its models.

If the first call finds no server, it fails with a message for the operator. A watcher that has
reached its server once waits for it to come back.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc

from fairfleet.client.agent.call_errors import is_from_server
from fairfleet.client.agent.connection_probe import probe
from fairfleet.client.operator.fleet_view import RECENT, Disconnected, Observation, Snapshot
from fairfleet.common.errors import (
    FleetError,
    LimitReached,
    Refused,
    Unreachable,
    UsageError,
    refusal,
    short,
)
from fairfleet.common.net.channel_options import CLIENT_OPTIONS
from fairfleet.common.net.server_access import ServerAccess, handshake_words
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.proto.v1.operator_pb2_grpc import OperatorStub

T = TypeVar("T")

ANSWER_SECONDS = 5.0
SLOW_ANSWER_SECONDS = 120.0  # of a call that copies a model, or reads a long table
STATUS_EVERY_SECONDS = 1.0  # the status has what events lack: bytes moved, clients missing
RETRY_SECONDS = 0.5
MOST = 2**64 - 1  # that a message can hold


class OperatorConnection:
    """Calls the operator service of one server; use it as a context manager.

    Every method raises Unreachable if no server answers, and Refused (or a subclass) if the server
    refuses the call.
    """

    def __init__(self, access: ServerAccess) -> None:
        self.address = access.address
        self._access = access
        self._has_answered = False
        self._connect()

    def __enter__(self) -> OperatorConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def _connect(self) -> None:
        self._channel = self._access.channel(CLIENT_OPTIONS)
        self._stub = OperatorStub(self._channel)

    def status(self) -> pb.StatusResponse:
        """Return the current status of the federation."""
        return self._answered(lambda: self._stub.Status(pb.StatusRequest(), timeout=ANSWER_SECONDS))

    def snapshot(self) -> Snapshot:
        """Return the status, all clients and the newest rounds."""
        return Snapshot(self.status(), self.clients(), self.rounds(RECENT))

    def rounds(self, last: int) -> tuple[pb.RoundRecord, ...]:
        """Return the records of the `last` newest rounds, oldest first."""
        request = pb.RoundsRequest(first=max(0, self.status().version - last))
        records = self._answered(lambda: tuple(self._stub.Rounds(request, timeout=ANSWER_SECONDS)))
        return records[-last:]  # more rounds may have been committed since the status was read

    def clients(self) -> tuple[pb.ClientRecord, ...]:
        """Return the record of every client that ever joined the federation."""
        return self._answered(
            lambda: tuple(self._stub.Clients(pb.ClientsRequest(), timeout=ANSWER_SECONDS))
        )

    def pause(self) -> None:
        """Pause the federation after the current round."""
        self._answered(lambda: self._stub.Pause(pb.PauseRequest(), timeout=ANSWER_SECONDS))

    def resume(self) -> None:
        """Continue a paused federation."""
        self._answered(lambda: self._stub.Resume(pb.ResumeRequest(), timeout=ANSWER_SECONDS))

    def stop(self, reason: str) -> None:
        """End the federation after the current round."""
        self._answered(
            lambda: self._stub.Stop(pb.StopRequest(reason=reason), timeout=ANSWER_SECONDS)
        )

    def revoke(self, name: str, reason: str, operator: bool = False) -> None:
        """Exclude a client permanently, or an operator's credentials."""
        request = pb.RevokeRequest(client=name, reason=reason, operator=operator)
        self._answered(lambda: self._stub.Revoke(request, timeout=ANSWER_SECONDS))

    def make_token(
        self, client: str, seconds: float, certificate_seconds: float
    ) -> pb.MakeTokenResponse:
        """Create a one-time enrolment token that is valid for `seconds`."""
        request = pb.MakeTokenRequest(
            client=client, seconds=seconds, certificate_seconds=certificate_seconds
        )
        return self._answered(lambda: self._stub.MakeToken(request, timeout=ANSWER_SECONDS))

    def continue_training(
        self, from_version: int | None, rounds: int | None, seconds: float | None
    ) -> pb.ContinueResponse:
        """Let a finished federation go on, perhaps from an earlier version with new limits."""
        request = pb.ContinueRequest(
            from_version=_sendable("version", from_version),
            rounds=_sendable("number of rounds", rounds),
            seconds=seconds,
        )
        return self._answered(lambda: self._stub.Continue(request, timeout=SLOW_ANSWER_SECONDS))

    def audit(self, first: int = 0) -> tuple[pb.AuditRecord, ...]:
        """Return what operators did, from a sequence number on, oldest first."""
        request = pb.AuditRequest(first=first)
        return self._answered(lambda: tuple(self._stub.Audit(request, timeout=SLOW_ANSWER_SECONDS)))

    def _answered(self, call: Callable[[], T]) -> T:
        try:
            answer = call()
        except grpc.RpcError as error:
            raise self._explained(error) from None
        self._has_answered = True
        return answer

    def models(self) -> tuple[pb.ModelRecord, ...]:
        """Return the record of every version whose model is kept, the oldest first."""
        return self._answered(
            lambda: tuple(self._stub.Models(pb.ModelsRequest(), timeout=ANSWER_SECONDS))
        )

    def model(self, version: int | None, best: bool = False) -> Iterator[pb.FileChunk]:
        """Return the file of a committed model in chunks.

        It is the best evaluated version, or the given one, or the newest without either.
        """
        request = pb.ExportModelRequest(version=_sendable("version", version), best=best)
        try:
            yield from self._stub.ExportModel(request)
        except grpc.RpcError as error:
            raise self._explained(error) from None

    # ---- watching ------------------------------------------------------------------------------

    def observe(self) -> Iterator[Observation]:
        """Yield a snapshot, then every event, until the federation is finished.

        Restarts of the server are survived. At least one observation comes about every second,
        even if nothing happens.
        """
        self.status()  # No server at all is an error. A server that goes away later is waited for.
        while True:
            try:
                for observation in self._observe_connected():
                    yield observation
                    if (
                        isinstance(observation, Snapshot)
                        and observation.status.phase == pb.PHASE_FINISHED
                    ):
                        return
                    if isinstance(observation, pb.Event) and observation.HasField(
                        "federation_finished"
                    ):
                        yield from self._last_look()
                        return
                yield Disconnected(f"the server at {self.address} stopped")
            except LimitReached:
                continue  # This watcher was too slow for the server: start with a new snapshot.
            except Unreachable as error:
                yield Disconnected(str(error))
            time.sleep(RETRY_SECONDS)
            self._channel.close()  # An old channel needs seconds to notice a restarted server.
            self._connect()

    def _observe_connected(self) -> Iterator[Observation]:
        call = self._stub.Watch(pb.WatchRequest())
        try:
            call.initial_metadata()  # From this point on no event is missed.
            yield self.snapshot()
            arrivals: queue.SimpleQueue[pb.Event | FleetError | None] = queue.SimpleQueue()
            threading.Thread(
                target=self._read, args=(call, arrivals), name="watch", daemon=True
            ).start()
            yield from self._merged(arrivals)
        finally:
            call.cancel()

    def _read(self, call: Any, arrivals: queue.SimpleQueue[pb.Event | FleetError | None]) -> None:
        try:
            for event in call:
                arrivals.put(event)
            arrivals.put(None)
        except grpc.RpcError as error:
            arrivals.put(self._explained(error))

    def _merged(
        self, arrivals: queue.SimpleQueue[pb.Event | FleetError | None]
    ) -> Iterator[Observation]:
        """Yield events as they arrive, and regularly the status, which has what events lack."""
        due = time.monotonic() + STATUS_EVERY_SECONDS
        while True:
            try:
                observation = arrivals.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                yield self.status()
                due = time.monotonic() + STATUS_EVERY_SECONDS
                continue
            if observation is None:
                return
            if isinstance(observation, FleetError):
                raise observation
            yield observation

    def _last_look(self) -> Iterator[Snapshot]:
        with contextlib.suppress(Unreachable):  # The server may exit with its federation.
            yield self.snapshot()

    def _explained(self, error: grpc.RpcError) -> FleetError:
        code, details = error.code(), error.details() or "no details"
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return Refused(
                f"the server at {self.address} does not support this call: check that it is a "
                "FairFleet server and not older than this program"
            )
        if refused := refusal(code, details):
            return refused
        if code is grpc.StatusCode.INTERNAL and is_from_server(error):
            return Refused(f"the server at {self.address} has a fault: {short(details, 300)}")
        if not self._has_answered and (finding := probe(self._access)):
            return Unreachable(f"cannot use the server at {self.address}: {finding.problem.value}")
        handshake = handshake_words(details, self._access.credentials is not None)
        cause = handshake or short(details.rsplit(": ", 1)[-1])
        return Unreachable(
            f"no FairFleet server answers at {self.address} ({cause}). "
            "Start one with `fairfleet server`, or give its address with --server host:port "
            "or FAIRFLEET_SERVER."
        )


def _sendable(what: str, number: int | None) -> int | None:
    """Return a number that fits into a message; raise UsageError for a larger one."""
    if number is not None and number > MOST:
        raise UsageError(f"{what} {number} is above {MOST}, the largest one; give a smaller number")
    return number
