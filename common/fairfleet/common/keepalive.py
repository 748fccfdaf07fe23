"""Channel options of both ends: how a dead link is noticed, a silent one kept open, and a stream read.

The client pings every 20 s, also between calls: a NAT box forgets an idle connection after a minute
or less, and a half-open link is found within 30 s. A server at its defaults would answer such pings
with GOAWAY (too_many_pings), so it is told to allow them.
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
    # gRPC's own backoff between connection attempts grows to two minutes; ours paces the calls.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 10_000),  # not a pause: how long one attempt may take, on a slow link too
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Streams from the server are read by the thread that wants them, not handed over by another, message by message.
    (ChannelOptions.SingleThreadedUnaryStream, 1),
)
SERVER_OPTIONS = (
    *_BOTH,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_SECONDS * 500),
    # What a stream may send ahead of its reader. Left to itself, gRPC lets uploads pile up tens of megabytes in memory,
    # for no gain; with this, 20 MB/s still come in from a client that is 100 ms away.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2 << 20),
    ("grpc.so_reuseport", 0),  # else a second server on the same port starts without a word
)
