"""Limits of connections, streams and messages, which hold before a peer is identified.

gRPC enforces them on its ports, by channel options. `http_endpoint` has limits of its own.
"""

from __future__ import annotations

import logging

from fairfleet.server.security.limits import ServerLimits

ENROLMENT_MS = 60_000  # the longest connection of a device that enrolls
ENROLMENT_STREAMS = 16  # one is needed; one that just ended may still count
ENROLMENT_BYTES = 64 << 10  # of a message: a token and a certificate request of up to 8 KiB
PEER_FAULTS = (
    "Invalid encoding",  # metadata that is not text
    "ExecuteBatchError raised in core",  # the caller closed the call while its status was sent
    "Failed sending error status from server",  # the same, while a refusal was sent
)


def connection_limits(limits: ServerLimits) -> tuple[tuple[str, int], ...]:
    """Return the channel options of the main port."""
    return (
        ("grpc.max_receive_message_length", limits.message_bytes),
        # gRPC refuses at random between the soft and the hard limit, so both are the same.
        ("grpc.max_metadata_size", limits.metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes),
        ("grpc.max_concurrent_streams", limits.streams_per_connection),
        ("grpc.max_allowed_incoming_connections", limits.most_connections),
        ("grpc.server_handshake_timeout_ms", round(1000 * limits.handshake_seconds)),
        ("grpc.max_connection_idle_ms", round(1000 * limits.idle_seconds)),
        # gRPC decompresses a few MiB to gigabytes before it applies any limit. So a compressed
        # message is passed on as it is, and refused with an explanation (`grpc_compression`). If
        # the algorithms were disabled as well, gRPC would refuse it without an explanation.
        ("grpc.per_message_decompression", 0),
    )


def enrolment_limits(limits: ServerLimits) -> tuple[tuple[str, int], ...]:
    """Return the channel options of the port for devices that have no certificate.

    Anybody can connect to it, and nobody needs it for long.
    """
    stricter = {
        "grpc.max_allowed_incoming_connections": limits.enrolment_connections,
        "grpc.max_concurrent_streams": ENROLMENT_STREAMS,
        "grpc.max_receive_message_length": ENROLMENT_BYTES,
        "grpc.max_connection_idle_ms": round(1000 * limits.handshake_seconds),
        "grpc.max_connection_age_ms": ENROLMENT_MS,
        "grpc.max_connection_age_grace_ms": ENROLMENT_MS,
    }
    return tuple((dict(connection_limits(limits)) | stricter).items())


def keep_log_short() -> None:
    """Suppress the tracebacks that gRPC logs for what any peer can do: they could fill the disk."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: not _is_a_peers_fault(record))


def _is_a_peers_fault(record: logging.LogRecord) -> bool:
    """Return whether a peer can cause a record of gRPC.

    A batch of operations can fail because the peer closed the call. A batch that gRPC does not even
    start is a mistake of the server, such as two writes at once, and is logged.
    """
    error = record.exc_info[1] if record.exc_info else None
    if "grpc_call_start_batch" in str(error):
        return False
    return any(text in str(record.msg) for text in PEER_FAULTS)
