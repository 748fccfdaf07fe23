"""Functions that read what a failed gRPC call says: details, metadata and durations in words.

The server marks its own errors with metadata. Errors without the mark come from gRPC itself, for
example because the connection broke, or from a proxy.
"""

from __future__ import annotations

import re

import grpc

from fairfleet.common.errors import (
    AnotherUpdateCounts,
    BadRequest,
    FleetError,
    Refused,
    WrongState,
    short,
)
from fairfleet.common.wire import ERROR_METADATA, RETRY_METADATA, STANDING_METADATA
from fairfleet.proto.v1 import fleet_pb2 as pb

LONGEST_HINT_SECONDS = 600.0  # a server may request a pause, but not forever
NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


class JoinRefused(Refused):
    """The server does not accept this client; the call for which it joined was not judged."""


class FederationChanged(FleetError):
    """The server has another federation than that for which a call was to be made."""

    def __init__(self, address: str, before: pb.JoinResponse, now: pb.JoinResponse) -> None:
        """Create the error from the earlier and the present answer to Join."""
        super().__init__(
            f"server {address} has federation {_described(now)} now, and had {_described(before)} "
            "before"
        )


def _described(joined: pb.JoinResponse) -> str:
    return f"{short(joined.federation)} ({short(joined.federation_id) or 'no id'})"


def join_refusal(refused: Refused) -> Refused:
    """Return the error of a refused Join, which no caller takes for the answer to its own call."""
    return JoinRefused(str(refused)) if isinstance(refused, BadRequest | WrongState) else refused


def is_from_server(error: Exception) -> bool:
    """Return whether the server itself sent the error, not gRPC or a proxy."""
    return _metadata_value(error, ERROR_METADATA) is not None


def standing_digest(error: Exception) -> bytes | None:
    """Return the digest of the update that has the receipt, if another was refused for it."""
    value = _metadata_value(error, STANDING_METADATA)
    return value if isinstance(value, bytes) else None


def with_standing_update(refused: Refused, error: Exception) -> Refused:
    """Return AnotherUpdateCounts if the error names the update that has the receipt.

    Any other refusal is returned unchanged.
    """
    digest = standing_digest(error)
    if isinstance(refused, WrongState) and digest is not None:
        return AnotherUpdateCounts(str(refused), digest=digest)
    return refused


def retry_seconds(error: Exception) -> float | None:
    """Return after how many seconds the same call may succeed, if the server says so."""
    value = _metadata_value(error, RETRY_METADATA)
    text = "" if value is None else str(value)
    return min(float(text), LONGEST_HINT_SECONDS) if NUMBER.fullmatch(text) else None


def _metadata_value(error: Exception, key: str) -> str | bytes | None:
    metadata = error.trailing_metadata() if isinstance(error, grpc.RpcError) else None
    return next((entry.value for entry in metadata or () if entry.key == key), None)


def details_of(error: Exception) -> str:
    """Return the message of a failed call."""
    return (error.details() or "no details") if isinstance(error, grpc.RpcError) else str(error)
