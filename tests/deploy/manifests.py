"""The builds of k8s/ as lists of manifests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml

from tests.deploy.settings import ROOT

sys.path.insert(0, str(ROOT / "k8s"))
from builds import BUILDS, OTHER, NoKubectl, build

__all__ = ["BUILDS", "K8S", "OTHER", "Manifest", "Manifests", "built"]
K8S = ROOT / "k8s"
Manifest = dict[str, Any]


class Manifests(list[Manifest]):
    def of(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self if manifest["kind"] == kind]

    def one(self, kind: str, name: str) -> Manifest:
        (match,) = [manifest for manifest in self.of(kind) if manifest["metadata"]["name"] == name]
        return match

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
        """Return the environment of the only container of a set."""
        (container,) = self.pod(name)["containers"]
        variables: dict[str, str] = {}
        for source in container["envFrom"]:
            variables |= self.one("ConfigMap", source["configMapRef"]["name"])["data"]
        return variables


@cache
def built(name: str) -> Manifests:
    try:
        return Manifests(yaml.safe_load_all(build(name)))
    except NoKubectl as error:
        pytest.skip(str(error))
