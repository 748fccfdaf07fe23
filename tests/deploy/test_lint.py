"""The linter of k8s/ reports what it should, with the checkov that `make lint` installs."""

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


@pytest.mark.slow
def test_the_linter_reports_unintended_findings_and_stale_entries(
    local: str,
) -> None:
    wrong = local.replace("allowPrivilegeEscalation: false", "privileged: true")
    assert wrong != local
    output = lint.complaints(str(CHECKOV), {"wrong": wrong})
    assert any(line.startswith(f"wrong: {lint.SERVER}: CKV_K8S_16 ") for line in output), output

    server_alone = "---".join(
        part for part in local.split("---") if "name: fairfleet-client" not in part
    )
    output = lint.complaints(str(CHECKOV), {"server": server_alone})
    assert f"k8s/lint.py: {lint.CLIENT}: CKV_K8S_8 is no longer found" in output


def test_every_overlay_and_component_is_in_a_build_that_is_linted() -> None:
    used = set(builds.OTHER_COMPONENTS)
    for name in builds.OVERLAYS:
        kustomization = yaml.safe_load((K8S / "overlays" / name / "kustomization.yaml").read_text())
        used |= {Path(component).name for component in kustomization.get("components", ())}
    assert used == {folder.name for folder in (K8S / "components").iterdir()}
    assert set(builds.OVERLAYS) == {folder.name for folder in (K8S / "overlays").iterdir()}
