"""Checks of refused calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest


@contextlib.contextmanager
def refused(code: grpc.StatusCode, *parts: str) -> Iterator[None]:
    """Check that a call is refused with this code, and that the message has these parts."""
    with pytest.raises(grpc.RpcError) as caught:
        yield
    error: Any = caught.value
    assert error.code() is code, error.details()
    for part in parts:
        assert part in error.details(), error.details()
