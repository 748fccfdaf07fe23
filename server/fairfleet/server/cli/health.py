"""`fairfleet health`, for health checks of containers: it imports little and ends fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fairfleet.common.errors import Unreachable
from fairfleet.common.net.addresses import dialled
from fairfleet.common.net.server_access import ServerAccess

# A proxy that the environment names would answer in place of the server.
NO_PROXY = (("grpc.enable_http_proxy", 0),)

Listen = Annotated[
    str,
    typer.Option(
        envvar="FAIRFLEET_LISTEN", metavar="HOST:PORT", help="Address that the server listens on."
    ),
]
CredentialsFile = Annotated[
    Path | None,
    typer.Option(
        envvar="FAIRFLEET_CREDENTIALS",
        metavar="FILE",
        help="NAME.fleet, for a server with TLS.",
        show_default="none",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        envvar="FAIRFLEET_INSECURE",
        help="Allow an unencrypted connection to another machine.",
        show_default="off",
    ),
]


def health(
    server: Listen = "127.0.0.1:8440",
    credentials: CredentialsFile = None,
    insecure: Insecure = False,
    seconds: Annotated[float, typer.Option(help="How long to wait for an answer.")] = 3.0,
) -> None:
    """Check whether a server is serving.

    It uses the gRPC health service. The exit code is 0 if the server is serving.

    Example:

      fairfleet health --server 127.0.0.1:8440
    """
    server = dialled(server)
    with ServerAccess(server, credentials, insecure).channel(NO_PROXY) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds)
        except grpc.RpcError as error:
            raise Unreachable(
                f"no server answers at {server} within {seconds:g} s ({error.code().name})"
            ) from None
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise Unreachable(f"the server at {server} reports {status}; expected SERVING")
    print(status.lower())
