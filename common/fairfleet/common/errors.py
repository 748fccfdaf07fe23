"""What can go wrong, as one small tree; each error knows its gRPC status and its exit code.

    FleetError
    ├── UsageError            the person at this command: flags, settings, files, ports
    │   ├── BadSettings
    │   └── StateDirError
    ├── Refused               a peer's mistake, or a peer that comes at the wrong time
    │   ├── BadRequest            never right, whatever the state
    │   │   ├── NotFinite             a NaN or an infinity among the numbers
    │   │   └── BadReport             what is said beside an update cannot be so
    │   ├── WrongState            right at another time, or for another federation
    │   ├── SessionUnknown        join again
    │   ├── Superseded            another process speaks for this client now
    │   ├── ContestedIdentity     two processes keep taking over from each other
    │   ├── NotAllowed            not this peer: its role, its name, its token
    │   │   └── Revoked               not any more
    │   ├── LimitReached          too much, too often, or too many at once
    │   ├── NotKept               no longer, or not yet, to be had
    │   ├── OutOfOrder            not the chunk that follows
    │   └── Corrupted             bytes that do not match their checksum or digest
    ├── TryLater              the same call may succeed in a while
    ├── TooSlow               a peer that sends or reads nothing holds up what others need
    ├── Unreachable           nobody answers where the server should be
    ├── TaskFailed            the task on this client: training diverged, data that do not fit the model
    └── Bug                   our own

A message says what was found, what was expected, and what to do. A value that came from a
peer is shortened (`short`) before it is quoted.
"""

from __future__ import annotations

import grpc


class FleetError(Exception):
    status = grpc.StatusCode.INTERNAL
    exit_code = 1


class UsageError(FleetError):
    exit_code = 2


class BadSettings(UsageError):
    pass


class StateDirError(UsageError):
    exit_code = 3


class Refused(FleetError):
    exit_code = 4


class BadRequest(Refused):
    status = grpc.StatusCode.INVALID_ARGUMENT


class NotFinite(BadRequest):
    pass


class BadReport(BadRequest):
    pass


class WrongState(Refused):
    status = grpc.StatusCode.FAILED_PRECONDITION


class SessionUnknown(Refused):
    status = grpc.StatusCode.UNAUTHENTICATED


class Superseded(Refused):
    status = grpc.StatusCode.ABORTED
    exit_code = 5


class ContestedIdentity(Refused):
    status = grpc.StatusCode.ALREADY_EXISTS
    exit_code = 5


class NotAllowed(Refused):
    status = grpc.StatusCode.PERMISSION_DENIED


class Revoked(NotAllowed):
    pass


class LimitReached(Refused):
    status = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, reason: str = "", retry_seconds: float | None = None) -> None:
        """`reason` is which limit, for those who count; `retry_seconds`: the same call may succeed after so long."""
        super().__init__(message)
        self.reason = reason
        self.retry_seconds = retry_seconds


class NotKept(Refused):
    status = grpc.StatusCode.NOT_FOUND


class OutOfOrder(Refused):
    status = grpc.StatusCode.OUT_OF_RANGE


class Corrupted(Refused):
    status = grpc.StatusCode.DATA_LOSS


class TryLater(FleetError):
    status = grpc.StatusCode.UNAVAILABLE


class TooSlow(FleetError):
    status = grpc.StatusCode.DEADLINE_EXCEEDED

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class Unreachable(FleetError):
    status = grpc.StatusCode.UNAVAILABLE
    exit_code = 6


class TaskFailed(FleetError):
    pass


class Bug(FleetError):
    pass


REFUSALS: dict[grpc.StatusCode, type[Refused]] = {kind.status: kind for kind in Refused.__subclasses__()}


def refusal(status: grpc.StatusCode, message: str) -> Refused | None:
    """The error that a server's answer stands for; None where the call is worth a retry."""
    kind = REFUSALS.get(status)
    return kind(message) if kind else None


def short(value: object, limit: int = 80) -> str:
    """A peer's value, fit to be quoted in a message or a log line."""
    text = repr(value) if isinstance(value, bytes) else str(value)
    shown = "".join(c if c.isprintable() else "?" for c in text[:limit])  # the rest may be megabytes
    return shown if len(text) <= limit else f"{shown}… ({len(text)} characters)"
