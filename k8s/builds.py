"""Build the manifests of k8s/ with kubectl: base, overlays, and components that no overlay has."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

HERE = Path(__file__).resolve().parent
OVERLAYS = ("local", "production", "gpu")
# Put together as docs/how-to/kubernetes.md says.
OTHER = "cert-manager"
OTHER_COMPONENTS = ("cert-manager", "monitoring", "ingress")
BASE = "base"  # which a server refuses: it says nothing of who may come in
BUILDS = (*OVERLAYS, OTHER)


class NoKubectl(Exception):
    """Nothing can be built here."""


def build(name: str) -> str:
    """The manifests of one of BUILDS, or of BASE, as YAML."""
    if name == BASE:
        return _kustomize(HERE / BASE)
    if name in OVERLAYS:
        return _kustomize(HERE / "overlays" / name)
    with TemporaryDirectory() as folder:
        relative = os.path.relpath(HERE, os.path.realpath(folder))
        kustomization = {
            "namespace": "fairfleet",
            "resources": [f"{relative}/base"],
            "components": [f"{relative}/components/{component}" for component in OTHER_COMPONENTS],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return _kustomize(Path(folder))


def _kustomize(folder: Path) -> str:
    if not shutil.which("kubectl"):
        raise NoKubectl("kubectl is not installed: scripts/install-test-packages")
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
