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
