"""The calls whose streams are plain bytes, because models and updates are stored and checked so."""

from __future__ import annotations

from typing import Any, NamedTuple

import grpc

from fairfleet.proto.v1 import fleet_pb2 as pb


class RawCalls(NamedTuple):
    """The callables of one channel, as gRPC makes them."""

    take: Any
    fetch: Any
    send: Any


def raw_calls(channel: grpc.Channel) -> RawCalls:
    """Return the calls that stream chunks, serialized as they are."""
    return RawCalls(
        channel.unary_stream(
            "/fairfleet.v1.Fleet/TakeTask", pb.TakeTaskRequest.SerializeToString, None
        ),
        channel.unary_stream(
            "/fairfleet.v1.Fleet/FetchModel", pb.FetchModelRequest.SerializeToString, None
        ),
        channel.stream_unary(
            "/fairfleet.v1.Fleet/SendUpload", None, pb.SendUploadResponse.FromString
        ),
    )
