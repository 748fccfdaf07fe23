"""gRPC channel options of both ends: keepalive, reconnection and flow control.

The client pings every 20 s, also between calls. A NAT box forgets an idle connection after a
minute or less, and a half-open connection is detected within 30 s. A server with the default
options would answer such pings with GOAWAY (too_many_pings), so its options allow them.
"""

from __future__ import annotations

from grpc.experimental import ChannelOptions

PING_SECONDS = 20
ANSWER_SECONDS = 10

_BOTH = (
    ("grpc.keepalive_time_ms", PING_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", ANSWER_SECONDS * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
CLIENT_OPTIONS = (
    *_BOTH,
    # gRPC's own backoff between connection attempts grows to two minutes. The client has its own
    # backoff between calls.
    ("grpc.initial_reconnect_backoff_ms", 200),
    # This is not a pause. It is the time limit of one attempt, which may be slow.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # The thread that uses a stream from the server reads it, so no other thread has to hand over
    # every message.
    (ChannelOptions.SingleThreadedUnaryStream, 1),
)
SERVER_OPTIONS = (
    *_BOTH,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_SECONDS * 500),
    # How far a stream may send ahead of its reader. By default, gRPC buffers tens of megabytes of
    # an upload without any gain. With this limit, a client 100 ms away still sends 20 MB/s.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2 << 20),
    # Otherwise a second server on the same port would start without an error.
    ("grpc.so_reuseport", 0),
)
