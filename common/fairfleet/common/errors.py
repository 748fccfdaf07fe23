"""The errors of FairFleet, as one small tree. Each class has a gRPC status and an exit code.

    FleetError
    ├── UsageError            a mistake of the user: flags, settings, files, ports
    │   ├── BadSettings
    │   └── StateDirError
    ├── Refused               a mistake of a peer, or a call at the wrong time
    │   ├── BadRequest            wrong in every state
    │   │   ├── NotFinite             a NaN or an infinity among the numbers
    │   │   ├── BadReport             a training report with impossible values
    │   │   └── CompressedMessage     a message in gRPC's own compression
    │   ├── WrongState            valid at another time, or for another federation
    │   │   └── AnotherUpdateCounts   another update of this client has the round's receipt
    │   ├── SessionUnknown        the client has to join again
    │   ├── Superseded            another process acts for this client now
    │   ├── ContestedIdentity     two processes keep replacing each other
    │   ├── NotAllowed            the peer's role, name or token does not permit the call
    │   │   └── Revoked               the peer's permission was withdrawn
    │   ├── LimitReached          too much, too often, or too many at once
    │   ├── NotKept               not available any more, or not yet
    │   ├── OutOfOrder            not the chunk that follows
    │   └── Corrupted             bytes that do not match their checksum or digest
    ├── TryLater              the same call may succeed later
    ├── TooSlow               a peer sends or reads nothing and blocks what others need
    ├── Unreachable           no server answers at the address
    ├── TaskFailed            the client's task failed: divergence, or data that do not fit
    └── Bug                   a mistake of FairFleet

A message says what was found, what was expected, and what to do. A value that came from a
peer is shortened (`short`) before it is quoted.
"""

from __future__ import annotations

import grpc


class FleetError(Exception):
    """The base class of all errors of FairFleet."""

    status = grpc.StatusCode.INTERNAL
    exit_code = 1


class UsageError(FleetError):
    """A mistake of the user: flags, settings, files or ports."""

    exit_code = 2


class BadSettings(UsageError):
    """A setting is missing, unknown or has a value that is not allowed."""


class StateDirError(UsageError):
    """The state directory cannot be used."""

    exit_code = 3


class Refused(FleetError):
    """A mistake of a peer, or a call at the wrong time."""

    exit_code = 4


class BadRequest(Refused):
    """A request that is wrong in every state of the server."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class NotFinite(BadRequest):
    """There is a NaN or an infinity among the numbers."""


class BadReport(BadRequest):
    """A training report has impossible values."""


class CompressedMessage(BadRequest):
    """A message uses gRPC's own compression, which is not accepted."""

    status = grpc.StatusCode.UNIMPLEMENTED


class WrongState(Refused):
    """A request that is valid at another time, or for another federation."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class AnotherUpdateCounts(WrongState):
    """Another update of this client already has the receipt for the round."""

    def __init__(self, message: str, *, digest: bytes = b"") -> None:
        """Create the error. `digest` identifies the update that has the receipt."""
        super().__init__(message)
        self.digest = digest


class SessionUnknown(Refused):
    """The server does not know the client's session; the client has to join again."""

    status = grpc.StatusCode.UNAUTHENTICATED


class Superseded(Refused):
    """Another process acts for this client now."""

    status = grpc.StatusCode.ABORTED
    exit_code = 5


class ContestedIdentity(Refused):
    """Two processes with the same identity keep replacing each other."""

    status = grpc.StatusCode.ALREADY_EXISTS
    exit_code = 5


class NotAllowed(Refused):
    """The peer's role, name or token does not permit the call."""

    status = grpc.StatusCode.PERMISSION_DENIED


class Revoked(NotAllowed):
    """The peer's permission was withdrawn."""


class LimitReached(Refused):
    """A peer sends too much, too often, or too many calls at once."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(
        self, message: str, *, reason: str = "", retry_seconds: float | None = None
    ) -> None:
        """Create the error.

        `reason` names the limit, for metrics. The same call may succeed after `retry_seconds`.
        """
        super().__init__(message)
        self.reason = reason
        self.retry_seconds = retry_seconds


class NotKept(Refused):
    """The requested item is not available any more, or not yet."""

    status = grpc.StatusCode.NOT_FOUND


class OutOfOrder(Refused):
    """A chunk is not the one that follows."""

    status = grpc.StatusCode.OUT_OF_RANGE


class Corrupted(Refused):
    """Bytes do not match their checksum or digest."""

    status = grpc.StatusCode.DATA_LOSS


class TryLater(FleetError):
    """The same call may succeed later."""

    status = grpc.StatusCode.UNAVAILABLE


class TooSlow(FleetError):
    """A peer sends or reads nothing and blocks what others need."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class Unreachable(FleetError):
    """No server answers at the address."""

    status = grpc.StatusCode.UNAVAILABLE
    exit_code = 6


class TaskFailed(FleetError):
    """The client's task failed: training diverged, or the data do not fit the model."""


class Bug(FleetError):
    """A mistake of FairFleet itself."""


REFUSALS: dict[grpc.StatusCode, type[Refused]] = {
    kind.status: kind for kind in Refused.__subclasses__()
}


def refusal(status: grpc.StatusCode, message: str) -> Refused | None:
    """Return the error of a server's status, or None if the call may be retried."""
    kind = REFUSALS.get(status)
    return kind(message) if kind else None


def short(value: object, limit: int = 80) -> str:
    """Return a peer's value, shortened and printable, to quote in a message or a log line."""
    text = repr(value) if isinstance(value, bytes) else str(value)
    # Cut first: the rest may be megabytes.
    shown = "".join(char if char.isprintable() else "?" for char in text[:limit])
    return shown if len(text) <= limit else f"{shown}… ({len(text)} characters)"
