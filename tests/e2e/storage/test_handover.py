"""A server under an orchestrator:

probed without a certificate, stopped by SIGTERM, started elsewhere.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.fleet import Fleet, free_port, until
from tests.support.secure import SecureFleet, operator

GRACE_SECONDS = 60  # terminationGracePeriodSeconds


@pytest.mark.slow
def test_a_server_stopped_in_mid_round_hands_the_round_over(fleet: Fleet) -> None:
    """The slow client keeps training; the fast one's update is not requested again."""
    fleet.init()
    settings = {"rounds": 2, "round__quorum": 1.0, "round__deadline_seconds": 3600}
    fleet.start_server(**settings)
    traced = fleet.folder / "trained"
    fleet.start_client("fast", task="counted", trace=str(traced))
    fleet.start_client("slow", steps=60, step_seconds=0.1)
    until(
        lambda: fleet.query("select client from updates where round = 0") == [("fast",)],
        "the first update",
    )
    assert fleet.version() == 0
    assert fleet.server is not None
    began = time.monotonic()
    assert fleet.stop_server() == 0
    assert time.monotonic() - began < GRACE_SECONDS  # later it would be killed
    assert fleet.query("select client from updates where round = 0") == [("fast",)]
    assert fleet.version() == 0  # the round was not ended early with one of two updates
    fleet.start_server(**settings)
    fleet.wait_for_version(2)
    fleet.wait_clients()
    fleet.kill_server()
    assert traced.read_text().splitlines() == ["trained"] * 2  # one training per round
    fleet.prove(2)


def get(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_server_with_mtls_is_probed_over_http_and_not_over_grpc(tmp_path: Path) -> None:
    fleet = SecureFleet(tmp_path)
    try:
        fleet.init()
        port = free_port()
        fleet.start_server(http__port=port, http__token="http-token-0123456789")
        assert (
            get(f"http://127.0.0.1:{port}/readyz") == get(f"http://127.0.0.1:{port}/healthz") == 200
        )
        # The kubelet's probe: unencrypted.
        with (
            grpc.insecure_channel(fleet.address) as channel,
            pytest.raises(grpc.RpcError) as refused,
        ):
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        asked = fleet.run(
            "health",
            "--server",
            fleet.address,
            "--credentials",
            str(fleet.credentials_file(operator("operator"))),
        )
        assert (asked.returncode, asked.stdout) == (0, "serving\n"), asked.stderr
    finally:
        fleet.end()
