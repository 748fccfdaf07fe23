"""Each pod of k8s/ has its own name, data and credentials."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fairfleet.common.pki.pki_folder import CA, SERVER, SERVER_KEY
from fairfleet.lab import digits
from tests.deploy.manifests import K8S, Manifests, built
from tests.deploy.settings import client_settings, server_settings

sys.path.insert(0, str(K8S))
from tests.support.documented_secrets import DOCUMENT, documented_secrets


def test_a_client_has_the_name_of_its_pod_and_its_own_shard(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = client_settings(manifests.environment("fairfleet-client"), monkeypatch)
    assert settings.replica == "hostname"
    replicas = manifests.one("StatefulSet", "fairfleet-client")["spec"]["replicas"]
    numbered = [settings.numbered(number) for number in range(replicas)]
    assert [client.name for client in numbered] == [
        f"fairfleet-client-{number}" for number in range(replicas)
    ]
    assert [digits.client_name(client.options["shard"]) for client in numbered] == list(
        digits.CLIENTS
    )[:replicas]
    host, _, port = settings.server.rpartition(":")
    assert int(port) in [port["port"] for port in manifests.one("Service", host)["spec"]["ports"]]


def test_all_pods_have_certificates_or_the_overlay_is_insecure(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = server_settings(manifests.environment("fairfleet-server"), monkeypatch)
    client = client_settings(manifests.environment("fairfleet-client"), monkeypatch)
    secure = manifests is not built("local")
    assert server.insecure is client.insecure is not secure
    assert bool(server.pki) is bool(client.credentials) is secure


def test_the_base_alone_is_refused_by_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (K8S / "base" / "server.env").read_text().splitlines()
    settings = server_settings(dict(line.split("=", 1) for line in lines), monkeypatch)
    assert not settings.insecure
    assert settings.pki is None


@pytest.mark.parametrize("build", ["production", "gpu"])
def test_each_pod_mounts_only_its_own_credentials(
    build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = built(build)
    settings = client_settings(manifests.environment("fairfleet-client"), monkeypatch)
    (container,) = manifests.pod("fairfleet-client")["containers"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "credentials"]
    assert mount["mountPath"] == str(settings.credentials)
    assert mount["subPathExpr"] == "$(POD_NAME).fleet"
    (variable,) = container["env"]
    assert variable == {
        "name": "POD_NAME",
        "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
    }


def test_every_secret_is_created_by_a_documented_command_or_cert_manager(
    secure: Manifests,
) -> None:
    issued = {certificate["spec"]["secretName"] for certificate in secure.of("Certificate")}
    text = DOCUMENT.read_text()
    for name, pod in secure.pods():
        for volume in pod["volumes"]:
            secret = volume.get("secret", {}).get("secretName")
            assert secret is None or secret in issued or f"secret generic {secret} " in text, (
                f"{secret} of {name}"
            )


@pytest.mark.slow
def test_documented_commands_create_the_mounted_secrets(tmp_path: Path) -> None:
    secrets = documented_secrets(tmp_path / "operator")
    production = built("production")
    replicas = production.one("StatefulSet", "fairfleet-client")["spec"]["replicas"]
    assert secrets["fairfleet-server-pki"].keys() == {CA, SERVER, SERVER_KEY}
    assert secrets["fairfleet-client-credentials"].keys() == {
        f"fairfleet-client-{n}.fleet" for n in range(replicas)
    }
    assert len(secrets["fairfleet-http-token"]["token"]) == 32
    mounted = {
        v["secret"]["secretName"]
        for _, pod in production.pods()
        for v in pod["volumes"]
        if "secret" in v
    }
    assert mounted == secrets.keys()
