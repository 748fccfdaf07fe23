"""One server for all attacks of a module: it must survive all of them in sequence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.attacks.siege import Siege
from tests.support.device import Device


@pytest.fixture(scope="module")
def siege(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    """Yield a server with narrow limits and one honest client."""
    siege = Siege(tmp_path_factory.mktemp("siege"))
    try:
        siege.bring_honest_client()
        yield siege
    finally:
        siege.end()


@pytest.fixture
def device(siege: Siege, request: pytest.FixtureRequest) -> Iterator[Device]:
    """Yield a client with a task, and with a name for each test, because limits are per client."""
    device = Device(siege.address, f"d{abs(hash(request.node.name))}")
    device.join(instance="the same")
    device.train_task()
    yield device
    device.channel.close()
