"""The manifests of k8s/ follow the rules that a linter would check."""

from __future__ import annotations

import sys
import tomllib

from tests.deploy.manifests import K8S, Manifests
from tests.deploy.settings import ROOT

sys.path.insert(0, str(K8S))


VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_images_have_the_project_version_and_never_latest(manifests: Manifests) -> None:
    for name, container in manifests.containers():
        image, _, tag = container["image"].rpartition(":")
        assert tag == VERSION, name
        assert image.rpartition("/")[2].startswith("fairfleet-"), name


def test_every_container_has_requests_and_a_memory_limit(
    manifests: Manifests,
) -> None:
    for name, container in manifests.containers():
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), name
        assert "memory" in container["resources"]["limits"], name


def test_pods_meet_the_restricted_standard_with_a_read_only_root(
    manifests: Manifests,
) -> None:
    (namespace,) = manifests.of("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    allowed = {"configMap", "csi", "emptyDir", "secret"}
    for name, pod in manifests.pods():
        context = pod["securityContext"]
        assert (context["runAsNonRoot"], context["seccompProfile"]) == (
            True,
            {"type": "RuntimeDefault"},
        ), name
        assert context["runAsUser"] == context["runAsGroup"] == context["fsGroup"] == 10001, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), name
        assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False, name
        assert all(set(volume) - {"name"} <= allowed for volume in pod["volumes"]), name
    for name, container in manifests.containers():
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False, name
        assert own["capabilities"] == {"drop": ["ALL"]}, name
        assert own["readOnlyRootFilesystem"] is True, name
        assert not any("hostPort" in port for port in container.get("ports", ())), name
    assert "useradd --uid 10001" in (ROOT / "docker" / "Dockerfile").read_text()


def test_every_manifest_is_in_the_namespace(manifests: Manifests) -> None:
    for manifest in manifests:
        if manifest["kind"] != "Namespace":
            assert manifest["metadata"]["namespace"] == "fairfleet", manifest["metadata"]["name"]


def test_listening_containers_have_http_probes(
    manifests: Manifests,
) -> None:
    for name, pod in manifests.pods():
        (container,) = pod["containers"]
        probes = {key: container[key]["httpGet"] for key in container if key.endswith("Probe")}
        if "ports" in container:
            ready, alive = {"path": "/readyz", "port": "http"}, {"path": "/healthz", "port": "http"}
            assert probes == {
                "startupProbe": ready,
                "readinessProbe": ready,
                "livenessProbe": alive,
            }, name
        else:
            assert not probes, name


def test_traffic_is_denied_unless_a_policy_allows_it(manifests: Manifests) -> None:
    deny = manifests.one("NetworkPolicy", "default-deny")["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    server = manifests.one("NetworkPolicy", "fairfleet-server")["spec"]["ingress"]
    outside = [rule for rule in server if "from" not in rule]
    reachable = any(manifests.of(kind) for kind in ("Gateway", "Ingress"))
    assert bool(outside) is reachable
    http = [
        policy["metadata"]["name"]
        for policy in manifests.of("NetworkPolicy")
        for rule in policy["spec"].get("ingress", ())
        if {"port": 8441} in rule["ports"]
    ]
    assert http == (["fairfleet-monitoring"] if manifests.of("ServiceMonitor") else [])
