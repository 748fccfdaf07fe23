"""A client's session with its server, and calls that are repeated while that is useful.

Restarts of the server, changed addresses, refused and half-open connections are handled here: for
the caller, a call either succeeds or fails for good. The session is joined again when necessary.
The training thread and the heartbeat thread may use it at the same time.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import grpc

from fairfleet.client.agent.call_errors import (
    FederationChanged,
    details_of,
    is_from_server,
    join_refusal,
    retry_seconds,
    with_standing_update,
)
from fairfleet.client.agent.connection_probe import probe
from fairfleet.client.agent.counters import ClientCounters
from fairfleet.client.agent.pauses import CALL_SECONDS, TRIES_BEFORE_PATIENCE, pauses
from fairfleet.client.agent.raw_calls import raw_calls
from fairfleet.client.agent.sample_counts import SampleCounts
from fairfleet.common.cli.durations import format_duration
from fairfleet.common.errors import FleetError, Refused, SessionUnknown, refusal, short
from fairfleet.common.features import check_spoken
from fairfleet.common.net.channel_options import CLIENT_OPTIONS
from fairfleet.common.net.server_access import ServerAccess, handshake_words
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.proto.v1.fleet_pb2_grpc import FleetStub

log = logging.getLogger(__name__)
T = TypeVar("T")

FAILURES_BEFORE_NEW_CHANNEL = 3  # a channel can keep using an address that is gone
SERVER_BUGS_TOLERATED = 8
RETIREMENT_SECONDS = 60.0  # for a server that is away to learn of it
NO_CONNECTION = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
SERVER_BUGS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class Stopped(Exception):
    """Raised by a call when a person or the system has requested this client to stop."""


class FleetSession:
    """A connection with one session, kept alive across failures.

    `joined` is the newest answer to Join. Its session is empty when it is no longer valid.
    """

    def __init__(
        self, access: ServerAccess, join: pb.JoinRequest, counters: ClientCounters | None = None
    ) -> None:
        self.address = access.address
        self._access = access
        self.counters = counters or ClientCounters()
        self.joined = pb.JoinResponse()
        self._join_request, self.counts = join, SampleCounts(join)
        self._join_lock = threading.Lock()
        self._stop = threading.Event()
        self._is_disconnected = False
        self._failures = 0
        self._has_joined = False
        self._entered: pb.JoinResponse | None = None  # of the federation that calls are for
        self._connect()

    def _connect(self) -> None:
        self._channel = self._access.channel(CLIENT_OPTIONS)
        self._stub = FleetStub(self._channel)
        self._take, self._fetch, self._send = raw_calls(self._channel)

    # ---- stopping ------------------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    def stop(self) -> None:
        """End every call in progress with Stopped. May be called from a signal handler."""
        self._stop.set()
        # In a separate thread, because the interrupted main thread may hold a lock of gRPC.
        threading.Thread(target=lambda: self._channel.close(), daemon=True).start()

    def leave(self, reason: str) -> None:
        """End the session and close the connection."""
        if self.joined.session:
            with self._access.channel() as channel:  # a new one, since `stop` closed the other
                self._send_leave(FleetStub(channel), reason)
        self._channel.close()

    def retire(self, reason: str) -> None:
        """Leave for good: the privacy budget is spent.

        A server that is away is waited for, because it would wait for this client. It has a minute.
        """
        deadline = threading.Timer(RETIREMENT_SECONDS, self.stop)
        deadline.start()
        try:
            self.repeat(
                lambda session: self._stub.Leave(
                    pb.LeaveRequest(session=session, reason=reason, retires=True),
                    timeout=CALL_SECONDS,
                )
            )
        except (Stopped, FleetError) as error:
            why = str(error) or "it does not answer"
            log.warning("the server does not know that this client retires: %s", why)
        finally:
            deadline.cancel()
            self._channel.close()

    def disconnect(self, reason: str) -> None:
        """Leave for a while: no connection stays open, and the server waits for nothing."""
        with self._join_lock:  # from now on the heartbeat's thread cannot join any more
            self._is_disconnected = True
        if session := self.joined.session:
            self._send_leave(self._stub, reason)
            self._forget(session)
        self._channel.close()

    def reconnect(self) -> None:
        """Open a connection after `disconnect`. The next call joins again."""
        with self._join_lock:
            self._connect()
            self._is_disconnected = False

    def _send_leave(self, stub: FleetStub, reason: str) -> None:
        """Send Leave once; a server that is gone does not need it."""
        request = pb.LeaveRequest(session=self.joined.session, reason=reason)
        try:
            stub.Leave(request, timeout=2)
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed meanwhile
            log.debug("could not leave the server properly: %s", error)

    def wait(self, seconds: float) -> None:
        """Sleep. Raises Stopped when the client is stopped."""
        if self._stop.wait(seconds):
            raise Stopped

    # ---- the federation ------------------------------------------------------------------------

    def enter(self) -> pb.JoinResponse:
        """Join if necessary and return the answer; calls are for its federation from now on.

        They raise FederationChanged once the server has another one, until the next `enter`.
        """
        self._entered = None
        self._entered = self.repeat(lambda session: self.joined)
        return self._entered

    def _check_federation(self) -> None:
        entered, joined = self._entered, self.joined
        if entered is not None and entered.federation_id != joined.federation_id:
            # A fence of the former federation means nothing: the next Join is the first one here.
            self._join_request.since = 0
            self._forget(joined.session)
            raise FederationChanged(self.address, entered, joined)

    # ---- repeating -----------------------------------------------------------------------------

    def repeat(self, call: Callable[[str], T]) -> T:
        """Call with the current session until it succeeds, or fails in a way that is final."""
        bugs, began = 0, time.monotonic()
        for tries, pause in enumerate(pauses(), start=1):
            session = ""
            try:
                self._use_renewed_credentials()
                session = self._session()
                answer = call(session)
            except (grpc.RpcError, ValueError) as error:
                code = self._code(error)
                bugs += code in SERVER_BUGS
                self._raise_if_final(error, code, bugs, session, joining=not session)
                self._log_failure(error, code, tries, began)
            else:
                self._log_success(tries, began)
                return answer
            self.wait(pause)
        raise AssertionError("pauses never end")  # pragma: no cover

    def _log_success(self, tries: int, began: float) -> None:
        self._failures = 0
        if tries > TRIES_BEFORE_PATIENCE:
            absence = format_duration(time.monotonic() - began)
            log.info("server %s answers again, after %s", self.address, absence)

    def _log_failure(
        self, error: Exception, code: grpc.StatusCode, tries: int, began: float
    ) -> None:
        """Log why a call is repeated, at tries 1, 2, 4, 8, …: a log must not grow for days.

        Raises if this process never reached the server and no repetition can help.
        """
        self.counters.retries += 1
        if tries & (tries - 1):
            return
        absence = f" for {format_duration(time.monotonic() - began)}" if tries > 1 else ""
        has_no_connection = code in NO_CONNECTION and not is_from_server(error)
        diagnosis = probe(self._access) if has_no_connection else None
        if diagnosis is None:
            reason = self._describe(error, code)
            log.info("server %s: %s%s; trying again", self.address, reason, absence)
            return
        if diagnosis.is_lasting and not self._has_joined:
            raise diagnosis.to_error(self.address)
        reason = diagnosis.problem.value
        log.warning("server %s: %s%s; trying again", self.address, reason, absence)

    def _code(self, error: Exception) -> grpc.StatusCode:
        """Return the status of a failed call. Raises Stopped when the client is stopped."""
        if self.stopped:
            raise Stopped from None
        if isinstance(error, grpc.RpcError):
            code: grpc.StatusCode = error.code()
            return code
        if "closed channel" in str(error) or "Channel closed" in str(error):
            return grpc.StatusCode.CANCELLED  # the other thread has opened a new connection
        raise error

    def _raise_if_final(
        self,
        error: Exception,
        code: grpc.StatusCode,
        bugs: int = 0,
        session: str = "",
        *,
        joining: bool = False,
    ) -> None:
        """Raise what no repetition can change; otherwise prepare the next try."""
        if (seconds := retry_seconds(error)) is not None:
            self._pause_as_requested(seconds, self._describe(error, code))
            return
        refused = refusal(code, details_of(error))
        if isinstance(refused, SessionUnknown):
            self._forget(session)
        elif refused is not None:
            final = join_refusal(refused) if joining else with_standing_update(refused, error)
            raise final from None
        elif bugs > SERVER_BUGS_TOLERATED:
            raise Refused(
                f"server {self.address} failed {bugs} times in a row: {details_of(error)}"
            ) from None
        else:
            self._prepare_retry(error, code, session)

    def _pause_as_requested(self, seconds: float, reason: str) -> None:
        log.info("server %s requests a pause: %s", self.address, reason)
        self.wait(random.uniform(1.0, 1.25) * seconds)  # clients must not return all at once

    def _prepare_retry(self, error: Exception, code: grpc.StatusCode, session: str) -> None:
        if code is grpc.StatusCode.UNAVAILABLE and not is_from_server(error):
            # The server may have been replaced, and a new one does not know this session.
            self._forget(session)
        self._failures += 1
        if self._failures % FAILURES_BEFORE_NEW_CHANNEL == 0:
            self._replace_channel()

    def _describe(self, error: Exception, code: grpc.StatusCode) -> str:
        details = details_of(error)
        handshake = handshake_words(details, self._access.credentials is not None)
        return f"{code.name.lower()} ({handshake or short(details, 160)})"

    # ---- session and channel -------------------------------------------------------------------

    def _forget(self, session: str) -> None:
        """Drop the session, unless the other thread has joined again since."""
        with self._join_lock:
            if self.joined.session == session:
                joined = pb.JoinResponse()
                joined.CopyFrom(self.joined)  # the description of the federation stays valid
                joined.session = ""
                self.joined = joined

    def _replace_channel(self) -> None:
        self._access.refuse_expired()
        with self._join_lock:
            if self._is_disconnected:
                return
            old = self._channel
            self._connect()
            old.close()

    def _use_renewed_credentials(self) -> None:
        """Reconnect if the credentials file has changed, so that no restart is necessary."""
        with self._join_lock:
            renewed = self._access.renewed
        if renewed:
            self._replace_channel()

    def _session(self) -> str:
        """Return the session for a call; joins if there is none.

        After a failure, a Join that waits for the connection costs less than one that fails every
        second, and it succeeds as soon as the server is back.
        """
        with self._join_lock:
            if self._is_disconnected:
                raise Stopped
            if not self.joined.session:
                joined = self._stub.Join(
                    self._join_request, timeout=CALL_SECONDS, wait_for_ready=self._failures > 0
                )
                check_spoken(self.address, joined.protocol_version)
                self.joined = joined
                # With the fence, a process that joins as this client later counts as newer,
                # however often the connection or the server fails in between.
                self._join_request.since = self._join_request.since or self.joined.fence
                self._has_joined = True
                self.counts.joined(joined.session)
                log.info("joined %s at %s", short(joined.federation), self.address)
            session = self.joined.session
        self._check_federation()
        return session
