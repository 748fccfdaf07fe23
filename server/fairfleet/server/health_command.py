"""`fairfleet health`: for health checks, so it imports little and ends fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fairfleet.common.access import Access
from fairfleet.common.addresses import dialled
from fairfleet.common.errors import Unreachable

DIRECT = (("grpc.enable_http_proxy", 0),)  # a proxy that the environment names would answer for the server

Listen = Annotated[str, typer.Option(envvar="FAIRFLEET_LISTEN", metavar="HOST:PORT", help="Where the server listens.")]


def health(
    server: Listen = "127.0.0.1:8440",
    credentials: Annotated[
        Path | None, typer.Option(envvar="FAIRFLEET_CREDENTIALS", help="NAME.fleet, where the server wants TLS.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", envvar="FAIRFLEET_INSECURE", help="Ask another machine in the clear.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="How long to wait for an answer.")] = 3.0,
) -> None:
    """Ask a server, through the gRPC health service, whether it serves; exit code 0 if so.

    Example:

      fairfleet health --server 127.0.0.1:8440
    """
    server = dialled(server)
    with Access(server, credentials, insecure).channel(DIRECT) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds)
        except grpc.RpcError as error:
            raise Unreachable(f"no server answers at {server} within {seconds:g} s ({error.code().name})") from None
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise Unreachable(f"the server at {server} says {status}; expected SERVING")
    print(status.lower())
