"""The client's link to its server: one session, joined anew when it must be, calls repeated while that is worth it.

Restarts of the server, changed addresses, refused connections and half-open links end here: above,
a call either answers or fails for good. Safe to use from the training and the heartbeat thread at once.
"""

from __future__ import annotations

import itertools
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import grpc

from fairfleet.client.telemetry import Telemetry
from fairfleet.common.access import Access, handshake_words
from fairfleet.common.errors import Refused, SessionUnknown, refusal, short
from fairfleet.common.keepalive import CLIENT_OPTIONS
from fairfleet.common.wire import ANNOUNCED_METADATA, ERROR_METADATA, RETRY_METADATA, TASK_METADATA, UPLOAD_METADATA
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.fleet_pb2_grpc import FleetStub

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 2.0  # a server that comes back finds its whole fleet again within seconds
TRIES_BEFORE_PATIENCE = 40  # ten minutes and more, since each waits for a connection
PATIENT_PAUSE_SECONDS = 60.0  # then it may be days: radio and battery are worth more than seconds
CALL_SECONDS = 15.0  # for calls that the server answers at once
POLL_SECONDS = 45.0  # for NextTask, which it holds for up to 30 s
FAILURES_BEFORE_NEW_CHANNEL = 3  # a channel can cling to an address that is gone
SERVER_BUGS_TOLERATED = 8
LONGEST_HINT_SECONDS = 600.0  # a server may ask for patience, but not for ever
NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


class Stopped(Exception):
    """The person or the system asked this client to stop."""


def pauses() -> Iterator[float]:
    """Exponential backoff with full jitter, so that a thousand clients do not come back all at once."""
    longest = FIRST_PAUSE_SECONDS
    for tries in itertools.count():
        yield random.uniform(0.05, longest)  # not a secret
        longest = min(2 * longest, PATIENT_PAUSE_SECONDS if tries >= TRIES_BEFORE_PATIENCE else LONGEST_PAUSE_SECONDS)


class Link:
    def __init__(self, access: Access, join: pb.JoinRequest, telemetry: Telemetry | None = None) -> None:
        self.address = access.address
        self._access = access
        self.telemetry = telemetry or Telemetry()
        self.joined = pb.JoinResponse()  # the newest answer to Join; its session is empty once it is of no use
        self._join_request = join
        self._join_lock = threading.Lock()
        self._stop = threading.Event()
        self._aside = False
        self._failures = 0
        self._connect()

    def _connect(self) -> None:
        self._channel = self._access.channel(CLIENT_OPTIONS)
        self._stub = FleetStub(self._channel)
        # The data plane carries messages as the bytes they are: they are spooled and checked as such.
        self._take: Any = self._channel.unary_stream(
            "/fairfleet.v1.Fleet/TakeTask", pb.TakeTaskRequest.SerializeToString, None
        )
        self._fetch: Any = self._channel.unary_stream(
            "/fairfleet.v1.Fleet/FetchModel", pb.FetchModelRequest.SerializeToString, None
        )
        self._send: Any = self._channel.stream_unary(
            "/fairfleet.v1.Fleet/SendUpload", None, pb.SendUploadResponse.FromString
        )

    # ---- stopping ------------------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Ends every call under way with Stopped. May be called from a signal handler."""
        self._stop.set()
        # In a thread of its own: the interrupted main thread may hold a lock of gRPC's.
        threading.Thread(target=lambda: self._channel.close(), daemon=True).start()

    def leave(self, reason: str) -> None:
        if self.joined.session:
            with self._access.channel() as channel:  # `stop` has closed the other one
                self._say_goodbye(FleetStub(channel), reason)
        self._channel.close()

    def step_aside(self, reason: str) -> None:
        """Leaves for a while: no connection is held, and the server waits for nothing."""
        with self._join_lock:  # from here on the heartbeat's thread cannot join any more
            self._aside = True
        if session := self.joined.session:
            self._say_goodbye(self._stub, reason)
            self._forget(session)
        self._channel.close()

    def come_back(self) -> None:
        """After stepping aside; the next call joins again."""
        with self._join_lock:
            self._connect()
            self._aside = False

    def _say_goodbye(self, stub: FleetStub, reason: str) -> None:
        """Best effort: a server that is gone need not hear it."""
        try:
            stub.Leave(pb.LeaveRequest(session=self.joined.session, reason=reason), timeout=2)
        except (grpc.RpcError, ValueError) as error:  # ValueError: stopped meanwhile
            log.debug("could not say goodbye: %s", error)

    def wait(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise Stopped

    # ---- calls ---------------------------------------------------------------------------------

    def federation(self) -> str:
        """The name of the server's; joins it if need be."""
        return self.repeat(lambda session: self.joined.federation)

    def next_task(
        self, held: Callable[[], bytes] = bytes, receive: Callable[[Iterator[bytes]], object] = list
    ) -> pb.NextTaskResponse:
        """`receive` gets the chunks of a model that may come first, unless it is the one that is `held`: its digest.

        Where the link breaks in the middle of them, the task alone is asked for: a poll begins with the first chunk
        each time, but a model that is fetched goes on where it broke.
        """
        begun = False

        def received(call: Iterable[bytes]) -> Iterator[bytes]:
            nonlocal begun
            for message in self.telemetry.counting_received(call):
                begun = True
                yield message

        def ask(session: str) -> pb.NextTaskResponse:
            if self.joined.brings_models and not begun:
                # Without a time limit, as a download: keepalive tells a link that is dead.
                call = self._take(pb.TakeTaskRequest(session=session, held=held()))
                receive(received(call))
                told = {one.key: one.value for one in call.trailing_metadata()}
                if TASK_METADATA in told:  # else something on the way has dropped it
                    return pb.NextTaskResponse.FromString(told[TASK_METADATA])
            return self._stub.NextTask(pb.NextTaskRequest(session=session), timeout=POLL_SECONDS)

        return self.repeat(ask)

    def open_upload(self, **fields: Any) -> pb.OpenUploadResponse:
        answer: pb.OpenUploadResponse = self._unary("OpenUpload", pb.OpenUploadRequest, CALL_SECONDS, **fields)
        return answer

    def report_evaluation(self, **fields: Any) -> None:
        self._unary("ReportEvaluation", pb.ReportEvaluationRequest, CALL_SECONDS, **fields)

    def report_verification(self, **fields: Any) -> None:
        self._unary("ReportVerification", pb.ReportVerificationRequest, CALL_SECONDS, **fields)

    def heartbeat(self, **fields: Any) -> pb.HeartbeatResponse:
        answer: pb.HeartbeatResponse = self._unary("Heartbeat", pb.HeartbeatRequest, CALL_SECONDS, **fields)
        return answer

    def _unary(self, method: str, make: Callable[..., Any], seconds: float, **fields: Any) -> Any:
        return self.repeat(
            lambda session: getattr(self._stub, method)(make(session=session, **fields), timeout=seconds)
        )

    def fetch(self, version: int, offset_bytes: int, session: str, **form: bool) -> Iterable[bytes]:
        """One try at a model, or (`change`, `compact`) another form of it; to be called inside `repeat`."""
        request = pb.FetchModelRequest(session=session, version=version, offset_bytes=offset_bytes, **form)
        return self.telemetry.counting_received(self._fetch(request))

    def send(self, upload: bytes, messages: Iterator[bytes]) -> pb.Receipt | None:
        """One try at the rest of an upload; None when the stream broke: open it again to learn where to go on."""
        return self._stream(messages, UPLOAD_METADATA, upload)

    def open_and_send(self, messages: Iterator[bytes], **fields: Any) -> pb.Receipt | None:
        """The same for an upload of which nothing was sent yet, in one call."""
        announced = pb.OpenUploadRequest(session=self.joined.session, **fields)
        return self._stream(messages, ANNOUNCED_METADATA, announced.SerializeToString())

    def _stream(self, messages: Iterator[bytes], key: str, value: bytes) -> pb.Receipt | None:
        try:
            counted = self.telemetry.counting_sent(messages)
            response: pb.SendUploadResponse = self._send(counted, metadata=((key, value),))
            return response.receipt
        except (grpc.RpcError, ValueError) as error:
            code = self._code(error)
            if code is not grpc.StatusCode.FAILED_PRECONDITION:  # which says: not open (any more)
                self._raise_if_final(error, code)
            self.telemetry.retries += 1
            log.info("the upload broke off: %s", self._in_words(error, code))
            return None

    # ---- repeating -----------------------------------------------------------------------------

    def repeat(self, call: Callable[[str], T]) -> T:
        """Calls with the current session until it answers, or fails in a way that no repetition mends."""
        bugs, began = 0, time.monotonic()
        for tries, pause in enumerate(pauses(), start=1):
            session = ""
            try:
                self._renew()
                session = self._session()
                answer = call(session)
                self._failures = 0
                if tries > TRIES_BEFORE_PATIENCE:
                    log.info("server %s answers again, after %s", self.address, _span(time.monotonic() - began))
                return answer
            except (grpc.RpcError, ValueError) as error:
                code = self._code(error)
                bugs += code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
                self._raise_if_final(error, code, bugs, session)
                self.telemetry.retries += 1
                if tries & (tries - 1) == 0:  # ever more seldom: a log that grows for days helps nobody
                    away = f" for {_span(time.monotonic() - began)}" if tries > 1 else ""
                    log.info("server %s: %s%s; trying again", self.address, self._in_words(error, code), away)
            self.wait(pause)
        raise AssertionError("pauses never end")  # pragma: no cover

    def _code(self, error: Exception) -> grpc.StatusCode:
        if self.stopped:
            raise Stopped from None
        if isinstance(error, grpc.RpcError):
            code: grpc.StatusCode = error.code()
            return code
        if "closed channel" in str(error) or "Channel closed" in str(error):  # by a reconnection of the other thread
            return grpc.StatusCode.CANCELLED
        raise error

    def _raise_if_final(self, error: Exception, code: grpc.StatusCode, bugs: int = 0, session: str = "") -> None:
        if (seconds := _retry_seconds(error)) is not None:
            log.info("server %s asks for patience: %s", self.address, self._in_words(error, code))
            self.wait(random.uniform(1.0, 1.25) * seconds)  # not all at once
            return
        final = refusal(code, _details(error))
        if isinstance(final, SessionUnknown):
            self._forget(session)
        elif final is not None:
            raise final from None
        elif bugs > SERVER_BUGS_TOLERATED:
            raise Refused(f"server {self.address} failed {bugs} times in a row: {_details(error)}") from None
        else:
            if code is grpc.StatusCode.UNAVAILABLE and not _is_the_servers_word(error):
                self._forget(session)  # the server may be another by now: to ask for this session would be in vain
            self._failures += 1
            if self._failures % FAILURES_BEFORE_NEW_CHANNEL == 0:
                self._reconnect()

    def _in_words(self, error: Exception, code: grpc.StatusCode) -> str:
        details = _details(error)
        said = handshake_words(details, self._access.credentials is not None)
        return f"{code.name.lower()} ({said or short(details, 160)})"

    def _forget(self, session: str) -> None:
        with self._join_lock:
            if self.joined.session == session:  # else the other thread has joined anew since
                known = pb.JoinResponse()
                known.CopyFrom(self.joined)  # the federation stays what it was
                known.session = ""
                self.joined = known

    def _reconnect(self) -> None:
        self._access.refuse_ended()
        with self._join_lock:
            if self._aside:
                return
            old = self._channel
            self._connect()
            old.close()

    def _renew(self) -> None:
        """Whoever renews our credentials need not restart us."""
        with self._join_lock:
            renewed = self._access.renewed
        if renewed:
            self._reconnect()

    def _session(self) -> str:
        """The session to call with, joined if there is none.

        After a failure, a Join that waits for the connection costs less than one that fails every second, and it
        is through as soon as the server is back.
        """
        with self._join_lock:
            if self._aside:
                raise Stopped
            if not self.joined.session:
                failed = self._failures > 0
                self.joined = self._stub.Join(self._join_request, timeout=CALL_SECONDS, wait_for_ready=failed)
                # Whoever joins as this client after us is newer, however often the link or the server goes meanwhile.
                self._join_request.since = self._join_request.since or self.joined.fence
                log.info("joined %s at %s", self.joined.federation, self.address)
            return self.joined.session


def _span(seconds: float) -> str:
    """
    >>> _span(59.4), _span(7380)
    ('59 s', '2 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _is_the_servers_word(error: Exception) -> bool:
    """And not that of a connection that broke, or of a proxy."""
    told = error.trailing_metadata() if isinstance(error, grpc.RpcError) else None
    return any(one.key == ERROR_METADATA for one in told or ())


def _retry_seconds(error: Exception) -> float | None:
    """When the same call may succeed, if the server says so."""
    told = error.trailing_metadata() if isinstance(error, grpc.RpcError) else None
    found = next((str(one.value) for one in told or () if one.key == RETRY_METADATA), "")
    return min(float(found), LONGEST_HINT_SECONDS) if NUMBER.fullmatch(found) else None


def _details(error: Exception) -> str:
    return (error.details() or "no details") if isinstance(error, grpc.RpcError) else str(error)
