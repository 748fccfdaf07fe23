"""Tests of the log filter: what any peer can cause does not fill the log, and bugs are logged."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from fairfleet.server.rpc.channel_options import keep_log_short

GRPC = logging.getLogger("grpc._cython.cygrpc")


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    before = list(GRPC.filters)
    keep_log_short()
    yield caplog
    GRPC.filters[:] = before


@pytest.mark.parametrize(
    "text",
    [
        "ExecuteBatchError raised in core by servicer method [/fairfleet.v1.Operator/Watch]",
        "Failed sending error status from server",
        "Invalid encoding in metadata",
    ],
)
def test_what_a_peer_can_cause_is_not_logged(logged: pytest.LogCaptureFixture, text: str) -> None:
    GRPC.error(text)
    assert not logged.records


def test_an_error_of_the_server_is_logged(logged: pytest.LogCaptureFixture) -> None:
    GRPC.error("Unexpected [ValueError] raised by servicer method [/fairfleet.v1.Fleet/Join]")
    assert len(logged.records) == 1


def test_a_batch_that_grpc_did_not_start_is_an_error_of_the_server(
    logged: pytest.LogCaptureFixture,
) -> None:
    for reason in ("Failed grpc_call_start_batch: 8", 'Failed "execute_batch": (SendMessage,)'):
        try:
            raise RuntimeError(reason)  # gRPC's own ExecuteBatchError cannot be created here
        except RuntimeError:
            GRPC.exception("ExecuteBatchError raised in core by servicer method [/F/Watch]")
    (record,) = logged.records
    assert "grpc_call_start_batch" in str(record.exc_info)
