"""The builds of k8s/ as fixtures."""

from __future__ import annotations

import sys

import pytest

from tests.deploy.manifests import BUILDS, K8S, Manifests, built

sys.path.insert(0, str(K8S))


SECURE = [build for build in BUILDS if build != "local"]


@pytest.fixture(params=BUILDS)
def manifests(request: pytest.FixtureRequest) -> Manifests:
    return built(request.param)


@pytest.fixture(params=SECURE)
def secure(request: pytest.FixtureRequest) -> Manifests:
    return built(request.param)
