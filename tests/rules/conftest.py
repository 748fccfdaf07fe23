"""Where the shared test vectors are, and cohorts small enough to check by hand."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from fairfleet.server import vectors

settings.register_profile("fairfleet", deadline=None)  # a busy machine is no failure
settings.load_profile("fairfleet")

SHARED = Path(os.environ.get("FAIRFLEET_SHARED", Path(__file__).resolve().parents[3] / "shared"))


@pytest.fixture(scope="session")
def vector_folder() -> Path:
    if not (SHARED / "vectors" / "cases.json").is_file():
        pytest.skip(f"no test vectors in {SHARED / 'vectors'}; set FAIRFLEET_SHARED to the shared folder")
    return SHARED / "vectors"


@pytest.fixture(scope="session")
def shared_vectors(vector_folder: Path) -> vectors.Vectors:
    return vectors.load(vector_folder)
