"""k8s/base: built by kubectl, valid by the schemas of Kubernetes, and in line with the code's own settings.

No cluster runs here: what is checked is what a cluster would be told.
"""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from typing import Any

import kubernetes_validate
import pytest
import yaml

from fairfleet.lab import digits
from tests.deploy.settings import ROOT, client_settings, compose_services, server_settings

BASE = ROOT / "k8s" / "base"
VERSIONS = ("1.27", "1.29", "1.31", "1.33", "1.35", "1.37")  # gRPC probes are stable since 1.27
Manifest = dict[str, Any]


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    names = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    return [manifest for name in names for manifest in yaml.safe_load_all((BASE / name).read_text())]


def found(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (one,) = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name]
    return one


def pod(manifests: list[Manifest], name: str) -> Manifest:
    spec: Manifest = found(manifests, "StatefulSet", name)["spec"]["template"]["spec"]
    return spec


def environment(manifests: list[Manifest], name: str) -> dict[str, str]:
    """What the first container of a set is told."""
    (source,) = pod(manifests, name)["containers"][0]["envFrom"]
    data: dict[str, str] = found(manifests, "ConfigMap", source["configMapRef"]["name"])["data"]
    return data


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid_by_the_schema_of_kubernetes(manifests: list[Manifest], version: str) -> None:
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_misspelt_field_would_be_noticed(manifests: list[Manifest]) -> None:
    wrong = yaml.safe_load(yaml.safe_dump(found(manifests, "StatefulSet", "fairfleet-server")))
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl here")
def test_kubectl_builds_what_the_files_say_with_the_images_tagged(manifests: list[Manifest]) -> None:
    done = subprocess.run(["kubectl", "kustomize", str(BASE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    assert sorted((m["kind"], m["metadata"]["name"]) for m in built) == sorted(
        (m["kind"], m["metadata"]["name"]) for m in manifests
    )
    images = {
        container["image"]
        for manifest in built
        if manifest["kind"] == "StatefulSet"
        for key in ("containers", "initContainers")
        for container in manifest["spec"]["template"]["spec"].get(key, ())
    }
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert images == {f"fairfleet-server:{version}", f"fairfleet-client-lite:{version}"}
    for manifest in built:
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)


def test_ports_of_service_container_and_probes_are_those_the_server_listens_on(
    manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server_settings(environment(manifests, "fairfleet-server"), monkeypatch)
    wanted = {"grpc": int(settings.listen.rpartition(":")[2]), "http": settings.http_port}
    (server,) = pod(manifests, "fairfleet-server")["containers"]
    assert {port["name"]: port["containerPort"] for port in server["ports"]} == wanted
    service = found(manifests, "Service", "fairfleet-server")["spec"]["ports"]
    assert {port["targetPort"]: port["port"] for port in service} == wanted
    assert server["startupProbe"]["grpc"]["port"] == wanted["grpc"]
    pages = [server[probe]["httpGet"] for probe in ("livenessProbe", "readinessProbe")]
    assert pages == [{"path": "/healthz", "port": "http"}, {"path": "/readyz", "port": "http"}]
    template = found(manifests, "StatefulSet", "fairfleet-server")["spec"]["template"]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(wanted["http"])


def test_state_lies_in_a_claimed_volume_below_its_root(
    manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume's root may hold lost+found, and the server takes only a directory of its own."""
    server = server_settings(environment(manifests, "fairfleet-server"), monkeypatch)
    client = client_settings(environment(manifests, "fairfleet-client"), monkeypatch)
    for name, state in (("fairfleet-server", server.state_dir), ("fairfleet-client", client.state_dir)):
        (container,) = pod(manifests, name)["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        (claimed,) = found(manifests, "StatefulSet", name)["spec"]["volumeClaimTemplates"]
        assert mounts[str(state.parent)] == claimed["metadata"]["name"] == "state"


def test_the_model_is_written_where_the_server_reads_it(
    manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server_settings(environment(manifests, "fairfleet-server"), monkeypatch)
    spec = pod(manifests, "fairfleet-server")
    (model,), (server,) = spec["initContainers"], spec["containers"]
    assert model["args"][model["args"].index("--output") + 1] == str(settings.model)
    volumes = [
        {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}["/model"]
        for container in (model, server)
    ]
    assert volumes == ["model", "model"]


def test_identity_and_data_of_a_client_come_from_its_ordinal(
    manifests: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = client_settings(environment(manifests, "fairfleet-client"), monkeypatch)
    assert settings.replica == "hostname"
    numbered = [
        settings.numbered(n) for n in range(found(manifests, "StatefulSet", "fairfleet-client")["spec"]["replicas"])
    ]
    assert len({one.name for one in numbered}) == len(numbered)
    assert [digits.client_name(one.options["shard"]) for one in numbered] == list(digits.CLIENTS)
    service = found(manifests, "Service", "fairfleet-server")
    assert settings.server == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"


@pytest.mark.parametrize("name", ["fairfleet-server", "fairfleet-client"])
def test_selectors_match_the_pods_and_nobody_is_root(manifests: list[Manifest], name: str) -> None:
    whole = found(manifests, "StatefulSet", name)["spec"]
    labels = whole["template"]["metadata"]["labels"]
    assert (
        whole["selector"]["matchLabels"]
        == labels
        == found(manifests, "Service", whole["serviceName"])["spec"]["selector"]
    )
    assert whole["template"]["spec"]["securityContext"]["runAsUser"] == 10001
    assert "useradd --uid 10001" in (ROOT / "docker" / "Dockerfile").read_text()


def test_the_federation_is_the_one_of_the_compose_file(manifests: list[Manifest]) -> None:
    """But for where things lie, and how a client finds its number."""
    of_place = {"FAIRFLEET_STATE_DIR", "FAIRFLEET_LISTEN", "FAIRFLEET_HTTP__HOST", "FAIRFLEET_HTTP__PORT"}
    of_place |= {"FAIRFLEET_SERVER", "FAIRFLEET_REPLICA", "no_grpc_proxy"}
    composed = compose_services()
    for name in ("server", "client"):
        told = environment(manifests, f"fairfleet-{name}")
        wanted = {key: str(value) for key, value in composed[name]["environment"].items()}
        assert {k: v for k, v in told.items() if k not in of_place} == {
            k: v for k, v in wanted.items() if k not in of_place
        }
    replicas = found(manifests, "StatefulSet", "fairfleet-client")["spec"]["replicas"]
    assert replicas == composed["client"]["deploy"]["replicas"]
    (model,) = pod(manifests, "fairfleet-server")["initContainers"]
    assert model["args"] == composed["model"]["command"]
