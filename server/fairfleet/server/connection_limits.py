"""Limits that hold before a peer has said who it is: of connections, streams, frames and messages.

gRPC keeps those of the gRPC port itself, told by channel options; `http_endpoint` keeps its own.
"""

from __future__ import annotations

import logging

from fairfleet.server.http_endpoint import HttpLimits
from fairfleet.server.settings import Limits

ENROLMENT_MS = 60_000  # for which a connection may ask for certificates
ENROLMENT_STREAMS = 16  # one is needed; one that just ended may still count
ENROLMENT_BYTES = 64 << 10  # of a message: a token and a certificate request, of 8 KiB at most
IDENTITY_ONLY = 1  # as a bit set of gRPC's compression algorithms


def connection_limits(limits: Limits) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.max_receive_message_length", limits.message_bytes),
        # Between the two gRPC refuses some and not others, by lot; that would only be hard to understand.
        ("grpc.max_metadata_size", limits.metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes),
        ("grpc.max_concurrent_streams", limits.streams_per_connection),
        ("grpc.max_allowed_incoming_connections", limits.most_connections),
        ("grpc.server_handshake_timeout_ms", round(1000 * limits.handshake_seconds)),
        ("grpc.max_connection_idle_ms", round(1000 * limits.idle_seconds)),
        # gRPC would unpack a few MiB to gigabytes before it looks at any limit; our codecs compress better anyway.
        ("grpc.compression_enabled_algorithms_bitset", IDENTITY_ONLY),
        ("grpc.per_message_decompression", 0),
    )


def enrolment_limits(limits: Limits) -> tuple[tuple[str, int], ...]:
    """Of the port for those without a certificate: anybody gets through its handshake, and nobody needs it for long."""
    own = {
        "grpc.max_allowed_incoming_connections": limits.enrolment_connections,
        "grpc.max_concurrent_streams": ENROLMENT_STREAMS,
        "grpc.max_receive_message_length": ENROLMENT_BYTES,
        "grpc.max_connection_idle_ms": round(1000 * limits.handshake_seconds),
        "grpc.max_connection_age_ms": ENROLMENT_MS,
        "grpc.max_connection_age_grace_ms": ENROLMENT_MS,
    }
    return tuple((dict(connection_limits(limits)) | own).items())


def keep_log_short() -> None:
    """gRPC writes a traceback for every piece of metadata that is not text: any stranger could fill the disk."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: "Invalid encoding" not in str(record.msg))


def http_limits(limits: Limits) -> HttpLimits:
    return HttpLimits(limits.http_connections, limits.http_viewers, limits.http_header_bytes, limits.http_seconds)
