"""The manifests of k8s/ agree with each other and with the settings of the programs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.deploy.manifests import K8S, Manifests, built
from tests.deploy.settings import client_settings, compose_services, server_settings

sys.path.insert(0, str(K8S))


def test_ports_match_the_server_settings(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server_settings(manifests.environment("fairfleet-server"), monkeypatch)
    ports = {"grpc": int(settings.listen.rpartition(":")[2]), "http": settings.http_port}
    if settings.enrolment:
        ports["enrolment"] = int(settings.enrolment.rpartition(":")[2])
    (server,) = manifests.pod("fairfleet-server")["containers"]
    assert {port["name"]: port["containerPort"] for port in server["ports"]} == ports
    service = manifests.one("Service", "fairfleet-server")["spec"]["ports"]
    assert {port["targetPort"]: port["port"] for port in service} == ports
    template = manifests.one("StatefulSet", "fairfleet-server")["spec"]["template"]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(ports["http"])
    allowed = {
        port["port"]
        for policy in manifests.of("NetworkPolicy")
        for rule in (*policy["spec"].get("ingress", ()), *policy["spec"].get("egress", ()))
        for port in rule["ports"]
    }
    assert allowed - {53} <= set(ports.values())
    routed = [rule for route in manifests.of("TLSRoute") for rule in route["spec"]["rules"]]
    assert {ref["port"] for rule in routed for ref in rule["backendRefs"]} <= {
        ports["grpc"],
        ports.get("enrolment"),
    }


def test_selectors_match_the_pods(manifests: Manifests) -> None:
    labels = {
        stateful_set["metadata"]["name"]: stateful_set["spec"]["template"]["metadata"]["labels"]
        for stateful_set in manifests.of("StatefulSet")
    }
    for stateful_set in manifests.of("StatefulSet"):
        name = stateful_set["metadata"]["name"]
        assert stateful_set["spec"]["selector"]["matchLabels"] == labels[name]
        assert (
            manifests.one("Service", stateful_set["spec"]["serviceName"])["spec"]["selector"]
            == labels[name]
        )
        assert (
            manifests.one("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"]
            == labels[name]
        )
        assert (
            manifests.one("NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"]
            == labels[name]
        )


def test_every_mount_has_a_volume_and_every_path_setting_a_mount(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stateful_set in manifests.of("StatefulSet"):
        pod = stateful_set["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {
            claim["metadata"]["name"] for claim in stateful_set["spec"]["volumeClaimTemplates"]
        }
        used = set()
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            used |= {mount["name"] for mount in container["volumeMounts"]}
        assert used == volumes
    server = server_settings(manifests.environment("fairfleet-server"), monkeypatch)
    client = client_settings(manifests.environment("fairfleet-client"), monkeypatch)
    for name, paths in {
        "fairfleet-server": (server.state_dir, server.model, server.pki, server.http.token_file),
        "fairfleet-client": (client.state_dir, client.credentials),
    }.items():
        (container,) = manifests.pod(name)["containers"]
        mounted = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
        for path in filter(None, paths):
            assert any(path.is_relative_to(mount) for mount in mounted), (
                f"{path} of {name} is in no volume"
            )


def test_state_is_below_the_root_of_a_claimed_volume(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume's root may contain lost+found, and the server refuses a directory of others."""
    server = server_settings(manifests.environment("fairfleet-server"), monkeypatch)
    client = client_settings(manifests.environment("fairfleet-client"), monkeypatch)
    for name, state in (
        ("fairfleet-server", server.state_dir),
        ("fairfleet-client", client.state_dir),
    ):
        (container,) = manifests.pod(name)["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        (claimed,) = manifests.one("StatefulSet", name)["spec"]["volumeClaimTemplates"]
        assert mounts[str(state.parent)] == claimed["metadata"]["name"] == "state"


def test_the_initial_model_fits_the_task_and_the_server_reads_it(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server_settings(manifests.environment("fairfleet-server"), monkeypatch)
    pod = manifests.pod("fairfleet-server")
    (model,), (server,) = pod["initContainers"], pod["containers"]
    flags = dict(zip(model["args"], model["args"][1:], strict=False))
    assert flags["--output"] == str(settings.model)
    assert flags["--task"] == manifests.environment("fairfleet-client")["FAIRFLEET_TASK"]
    assert model["image"] == manifests.pod("fairfleet-client")["containers"][0]["image"]
    volumes = [
        {m["mountPath"]: m["name"] for m in container["volumeMounts"]}["/model"]
        for container in (model, server)
    ]
    assert volumes == ["model", "model"]


def test_the_local_overlay_trains_like_the_compose_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both train the same task with the same plan and rule. Paths may differ."""
    local = server_settings(built("local").environment("fairfleet-server"), monkeypatch)
    composed = server_settings(compose_services()["server"]["environment"], monkeypatch)
    for part in ("name", "rounds", "rule", "round", "plan"):
        assert getattr(local, part) == getattr(composed, part)
