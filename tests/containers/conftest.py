from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.containers.engine import Engine, NoEngine, base_image, engine
from tests.containers.images import build_images
from tests.containers.prometheus import provide_prometheus


@pytest.fixture(scope="session")
def docker() -> Iterator[Engine]:
    """Return an engine with our three images, built from the current files, and Prometheus."""
    try:
        with engine() as docker_engine:
            base = base_image(docker_engine)
            build_images(docker_engine, base)
            provide_prometheus(docker_engine, base)
            yield docker_engine
    except NoEngine as error:
        pytest.skip(str(error))
