"""What a cluster would be told: the overlays of k8s/, as kubectl builds them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from tests.deploy.settings import ROOT

K8S = ROOT / "k8s"
OVERLAYS = ("local", "production", "gpu")
# The components that no overlay has, put together as docs/kubernetes.md says.
OTHER = "cert-manager"
OTHER_COMPONENTS = ("cert-manager", "monitoring", "ingress")
BUILDS = (*OVERLAYS, OTHER)
Manifest = dict[str, Any]


class Manifests(list[Manifest]):
    def of(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self if manifest["kind"] == kind]

    def one(self, kind: str, name: str) -> Manifest:
        (found,) = [manifest for manifest in self.of(kind) if manifest["metadata"]["name"] == name]
        return found

    def has(self, kind: str, name: str) -> bool:
        return any(manifest["metadata"]["name"] == name for manifest in self.of(kind))

    def pod(self, name: str) -> Manifest:
        spec: Manifest = self.one("StatefulSet", name)["spec"]["template"]["spec"]
        return spec

    def pods(self) -> Iterator[tuple[str, Manifest]]:
        for manifest in self.of("StatefulSet"):
            yield manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]

    def containers(self) -> Iterator[tuple[str, Manifest]]:
        for name, pod in self.pods():
            for container in (*pod.get("initContainers", ()), *pod["containers"]):
                yield f"{name}/{container['name']}", container

    def environment(self, name: str) -> dict[str, str]:
        """What the one container of a set is told."""
        (container,) = self.pod(name)["containers"]
        told: dict[str, str] = {}
        for source in container["envFrom"]:
            told |= self.one("ConfigMap", source["configMapRef"]["name"])["data"]
        return told


@cache
def built(overlay: str) -> Manifests:
    if not shutil.which("kubectl"):
        pytest.skip("no kubectl here")
    if overlay in OVERLAYS:
        return _build(K8S / "overlays" / overlay)
    with TemporaryDirectory() as folder:
        beside = os.path.relpath(K8S, os.path.realpath(folder))
        kustomization = {
            "namespace": "fairfleet",
            "resources": [f"{beside}/base"],
            "components": [f"{beside}/components/{name}" for name in OTHER_COMPONENTS],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return _build(Path(folder))


def _build(folder: Path) -> Manifests:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Manifests(yaml.safe_load_all(done.stdout))
