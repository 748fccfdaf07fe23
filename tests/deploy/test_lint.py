"""The linter of k8s/ notices what it should, with the checkov that `make lint` has installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.manifests import K8S
from tests.deploy.settings import ROOT

sys.path.insert(0, str(K8S))
import builds
import lint

CHECKOV = ROOT / ".checkov" / "bin" / "checkov"
pytestmark = pytest.mark.skipif(not CHECKOV.exists(), reason="no checkov: make .checkov/.installed")


@pytest.fixture
def local() -> str:
    try:
        return builds.build("local")
    except builds.NoKubectl as error:
        pytest.skip(str(error))


def test_the_linter_complains_of_what_is_not_meant_and_of_what_is_no_longer_found(local: str) -> None:
    wrong = local.replace("allowPrivilegeEscalation: false", "privileged: true")
    assert wrong != local
    said = lint.complaints(str(CHECKOV), {"wrong": wrong})
    assert any(line.startswith(f"wrong: {lint.SERVER}: CKV_K8S_16 ") for line in said), said

    server_alone = "---".join(part for part in local.split("---") if "name: fairfleet-client" not in part)
    said = lint.complaints(str(CHECKOV), {"server": server_alone})
    assert f"k8s/lint.py: {lint.CLIENT}: CKV_K8S_8 is no longer found" in said


def test_every_overlay_and_component_is_in_a_build_that_is_linted() -> None:
    used = set(builds.OTHER_COMPONENTS)
    for name in builds.OVERLAYS:
        kustomization = yaml.safe_load((K8S / "overlays" / name / "kustomization.yaml").read_text())
        used |= {Path(component).name for component in kustomization.get("components", ())}
    assert used == {folder.name for folder in (K8S / "components").iterdir()}
    assert set(builds.OVERLAYS) == {folder.name for folder in (K8S / "overlays").iterdir()}
