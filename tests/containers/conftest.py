from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.containers.engine import Engine, NoEngine, base_image, engine
from tests.containers.images import build_images
from tests.containers.prometheus import provide_prometheus


@pytest.fixture(scope="session")
def docker() -> Iterator[Engine]:
    """An engine with the three images in it, built from the files as they are now, and Prometheus'."""
    try:
        with engine() as found:
            base = base_image(found)
            build_images(found, base)
            provide_prometheus(found, base)
            yield found
    except NoEngine as error:
        pytest.skip(str(error))
