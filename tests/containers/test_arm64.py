"""The client's image for arm64, built and run under emulation, with clients of this machine.

Emulation says nothing about a device's speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers import arm64
from tests.containers.deployment import deployed
from tests.containers.engine import Engine, NoEngine, base_image
from tests.containers.images import build_images

pytestmark = pytest.mark.containers
VERSION = "test-arm64"
IMAGE = f"fairfleet-client-lite:{VERSION}"


@pytest.fixture
def arm64_image(docker: Engine) -> Iterator[str]:
    try:
        with arm64.emulation():
            more = ("--platform", arm64.PLATFORM, "--build-arg", f"BUILD_BASE={base_image(docker)}")
            build_images(
                docker, arm64.base_image(docker), ["client-lite"], version=VERSION, more=more
            )
            yield IMAGE
    except NoEngine as error:
        pytest.skip(str(error))


def test_an_arm64_container_trains_together_with_native_ones(
    docker: Engine, arm64_image: str, tmp_path: Path
) -> None:
    assert docker.inspect(arm64_image)["Architecture"] == "arm64"
    with (
        deployed(docker, tmp_path) as fleet,
        fleet.another_client(arm64_image, "--platform", arm64.PLATFORM) as container,
    ):
        fleet.wait_for_a_round_with({"client-0", "client-1", "client-2", "client-3"}, seconds=300)
        assert fleet.name_of(container) == "client-3"
        assert docker.run("exec", container, "uname", "-m") == "aarch64"
        docker.run("stop", "--time", "60", container)
        assert fleet.exit_code(container) == 0
