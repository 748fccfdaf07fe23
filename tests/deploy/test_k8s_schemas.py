"""The manifests of k8s/ are valid by the schemas of Kubernetes.

Kinds of other projects (gateways, certificates, monitors) are validated only if FAIRFLEET_CRDS
names a folder with the definitions of those projects.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deploy.manifests import K8S, Manifests, built

sys.path.insert(0, str(K8S))


VERSIONS = ("1.27", "1.29", "1.31", "1.33", "1.35", "1.37")


OWN = {"apps/v1", "networking.k8s.io/v1", "policy/v1", "v1"}  # of Kubernetes itself


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid_by_the_schema_of_kubernetes(
    manifests: Manifests, version: str
) -> None:
    own = [manifest for manifest in manifests if manifest["apiVersion"] in OWN]
    assert len(own) >= 13
    for manifest in own:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_misspelt_field_is_reported() -> None:
    wrong = yaml.safe_load(yaml.safe_dump(built("local").one("StatefulSet", "fairfleet-server")))
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def definitions(folder: Path) -> dict[tuple[str, str], Any]:
    """Return the schemas of the CustomResourceDefinitions in a folder, by apiVersion and kind."""
    schemas = {}
    for file in folder.rglob("*.yaml"):
        for crd in yaml.safe_load_all(file.read_text()):
            if crd and crd.get("kind") == "CustomResourceDefinition":
                for version in crd["spec"]["versions"]:
                    key = f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"]
                    schemas[key] = (
                        _closed(version["schema"]["openAPIV3Schema"]) if version["served"] else None
                    )
    return schemas


def _closed(schema: Any) -> Any:
    """Return a schema that refuses unnamed fields, because the API server prunes them."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if str(closed.get("pattern", "")).startswith("^(?"):
        del closed["pattern"]  # Python does not accept flags in Go's syntax.
    if (
        isinstance(closed.get("properties"), dict)
        and "type" in closed
        and "additionalProperties" not in closed
    ):
        closed["additionalProperties"] = (
            "kind" in closed["properties"] and "spec" in closed["properties"]
        )
    if closed.pop("x-kubernetes-int-or-string", False):
        closed.pop("type", None)
    return closed


@pytest.mark.skipif(
    "FAIRFLEET_CRDS" not in os.environ, reason="FAIRFLEET_CRDS names no folder with definitions"
)
def test_every_other_manifest_is_valid_by_the_definition_of_its_project(
    manifests: Manifests,
) -> None:
    schemas = definitions(Path(os.environ["FAIRFLEET_CRDS"]))
    for manifest in manifests:
        if manifest["apiVersion"] not in OWN:
            schema = schemas[manifest["apiVersion"], manifest["kind"]]
            assert schema is not None, (
                f"{manifest['apiVersion']} {manifest['kind']} is no longer served"
            )
            jsonschema.validate(manifest, schema)
