"""The operator's link to a server: how it stands, what happens there, and its models.

A first call that finds no server fails with a message for the person at the command; a watcher that
has met its server once waits for it to come back.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc

from fairfleet.client.fleet_view import RECENT, Disconnected, Observation, Snapshot
from fairfleet.common.access import Access, handshake_words
from fairfleet.common.errors import FleetError, LimitReached, Refused, Unreachable, refusal, short
from fairfleet.common.keepalive import CLIENT_OPTIONS
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.proto.v1.operator_pb2_grpc import OperatorStub

T = TypeVar("T")

ANSWER_SECONDS = 5.0
STATUS_EVERY_SECONDS = 1.0  # what events do not carry: bytes moved, clients missing
RETRY_SECONDS = 0.5


class OperatorLink:
    def __init__(self, access: Access) -> None:
        self.address = access.address
        self._access = access
        self._connect()

    def __enter__(self) -> OperatorLink:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def _connect(self) -> None:
        self._channel = self._access.channel(CLIENT_OPTIONS)
        self._stub = OperatorStub(self._channel)

    def status(self) -> pb.StatusResponse:
        return self._answered(lambda: self._stub.Status(pb.StatusRequest(), timeout=ANSWER_SECONDS))

    def snapshot(self) -> Snapshot:
        return Snapshot(self.status(), self.clients(), self.rounds(RECENT))

    def rounds(self, last: int) -> tuple[pb.RoundRecord, ...]:
        """The records of the newest rounds, oldest first."""
        request = pb.RoundsRequest(first=max(0, self.status().version - last))
        found = self._answered(lambda: tuple(self._stub.Rounds(request, timeout=ANSWER_SECONDS)))
        return found[-last:]  # more of them may have been committed since the status was asked for

    def clients(self) -> tuple[pb.ClientRecord, ...]:
        return self._answered(lambda: tuple(self._stub.Clients(pb.ClientsRequest(), timeout=ANSWER_SECONDS)))

    def pause(self) -> None:
        self._answered(lambda: self._stub.Pause(pb.PauseRequest(), timeout=ANSWER_SECONDS))

    def resume(self) -> None:
        self._answered(lambda: self._stub.Resume(pb.ResumeRequest(), timeout=ANSWER_SECONDS))

    def stop(self, reason: str) -> None:
        self._answered(lambda: self._stub.Stop(pb.StopRequest(reason=reason), timeout=ANSWER_SECONDS))

    def revoke(self, name: str, reason: str, operator: bool = False) -> None:
        request = pb.RevokeRequest(client=name, reason=reason, operator=operator)
        self._answered(lambda: self._stub.Revoke(request, timeout=ANSWER_SECONDS))

    def make_token(self, client: str, seconds: float, certificate_seconds: float) -> pb.MakeTokenResponse:
        request = pb.MakeTokenRequest(client=client, seconds=seconds, certificate_seconds=certificate_seconds)
        return self._answered(lambda: self._stub.MakeToken(request, timeout=ANSWER_SECONDS))

    def _answered(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except grpc.RpcError as error:
            raise self._explained(error) from None

    def model(self, version: int | None) -> Iterator[pb.FileChunk]:
        """The file of a committed model, the newest if no version is given."""
        try:
            yield from self._stub.ExportModel(pb.ExportModelRequest(version=version))
        except grpc.RpcError as error:
            raise self._explained(error) from None

    # ---- watching ------------------------------------------------------------------------------

    def observe(self) -> Iterator[Observation]:
        """How things stand, then what happens, until the federation is finished, over restarts of the server.

        At least one observation comes each second or so, whatever happens.
        """
        self.status()  # no server at all is an error; one that goes away later is waited for
        while True:
            try:
                for seen in self._observe_connected():
                    yield seen
                    if isinstance(seen, Snapshot) and seen.status.phase == pb.PHASE_FINISHED:
                        return
                    if isinstance(seen, pb.Event) and seen.HasField("federation_finished"):
                        yield from self._last_look()
                        return
                yield Disconnected(f"the server at {self.address} stopped")
            except LimitReached:
                continue  # we were too slow for it: look at everything anew and go on
            except Unreachable as error:
                yield Disconnected(str(error))
            time.sleep(RETRY_SECONDS)
            self._channel.close()  # an old channel takes seconds to notice that its server is back
            self._connect()

    def _observe_connected(self) -> Iterator[Observation]:
        call = self._stub.Watch(pb.WatchRequest())
        try:
            call.initial_metadata()  # from here on no event is missed
            yield self.snapshot()
            arrived: queue.SimpleQueue[pb.Event | FleetError | None] = queue.SimpleQueue()
            threading.Thread(target=self._read, args=(call, arrived), name="watch", daemon=True).start()
            yield from self._merged(arrived)
        finally:
            call.cancel()

    def _read(self, call: Any, arrived: queue.SimpleQueue[pb.Event | FleetError | None]) -> None:
        try:
            for event in call:
                arrived.put(event)
            arrived.put(None)
        except grpc.RpcError as error:
            arrived.put(self._explained(error))

    def _merged(self, arrived: queue.SimpleQueue[pb.Event | FleetError | None]) -> Iterator[Observation]:
        """Events as they come, and now and then the status, which has what they do not carry."""
        due = time.monotonic() + STATUS_EVERY_SECONDS
        while True:
            try:
                seen = arrived.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                yield self.status()
                due = time.monotonic() + STATUS_EVERY_SECONDS
                continue
            if seen is None:
                return
            if isinstance(seen, FleetError):
                raise seen
            yield seen

    def _last_look(self) -> Iterator[Snapshot]:
        with contextlib.suppress(Unreachable):  # the server may be set to end with its federation
            yield self.snapshot()

    def _explained(self, error: grpc.RpcError) -> FleetError:
        code, details = error.code(), error.details() or "no details"
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return Refused(
                f"the server at {self.address} does not know this call: is it a FairFleet server, as new as this?"
            )
        said = handshake_words(details, self._access.credentials is not None)
        return refusal(code, details) or Unreachable(
            f"no FairFleet server answers at {self.address} ({said or short(details.rsplit(': ', 1)[-1])}). "
            "Start one with `fairfleet server`, or say where it is with --server host:port or FAIRFLEET_SERVER."
        )
