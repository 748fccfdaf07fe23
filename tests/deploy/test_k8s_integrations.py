"""Manifests for other projects: Prometheus, gateways, ingresses and cert-manager."""

from __future__ import annotations

import sys

import pytest

from fairfleet.common.pki.identity import Identity, Role, identity_of
from fairfleet.common.pki.pki_folder import CA, SERVER, SERVER_KEY
from tests.deploy.manifests import BUILDS, K8S, OTHER, Manifest, Manifests, built
from tests.deploy.settings import client_settings, server_settings

sys.path.insert(0, str(K8S))
import rules

SECURE = [build for build in BUILDS if build != "local"]


def test_rules_and_alerts_equal_those_of_the_compose_file() -> None:
    assert rules.OUTPUT.read_text() == rules.text(), "run `python k8s/rules.py`"
    for build in SECURE:
        (rule,) = built(build).of("PrometheusRule")
        assert rule["apiVersion"] == "monitoring.coreos.com/v1"
        assert rule["spec"]["groups"] == rules.rule()["spec"]["groups"]


def test_the_service_monitor_uses_the_http_port_and_the_token(
    secure: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = secure.one("ServiceMonitor", "fairfleet")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    service = secure.one("Service", "fairfleet-server")
    labels = monitor["spec"]["selector"]["matchLabels"]
    assert labels.items() <= service["metadata"]["labels"].items()
    # The alerts use this label.
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "fairfleet"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert endpoint["path"] == "/metrics"
    shown = endpoint["authorization"]["credentials"]
    settings = server_settings(secure.environment("fairfleet-server"), monkeypatch)
    token = settings.http.token_file
    assert token is not None
    (server,) = secure.pod("fairfleet-server")["containers"]
    (mount,) = [
        mount for mount in server["volumeMounts"] if mount["mountPath"] == str(token.parent)
    ]
    (volume,) = [
        volume
        for volume in secure.pod("fairfleet-server")["volumes"]
        if volume["name"] == mount["name"]
    ]
    assert (volume["secret"]["secretName"], token.name) == (shown["name"], shown["key"])


def gateway_host(manifests: Manifests) -> str:
    (host,) = {
        listener["hostname"]
        for listener in manifests.one("Gateway", "fairfleet")["spec"]["listeners"]
    }
    return str(host)


@pytest.mark.parametrize("build", ["production", "gpu"])
def test_the_gateway_passes_tls_through_to_the_server(build: str) -> None:
    manifests = built(build)
    gateway = manifests.one("Gateway", "fairfleet")
    assert gateway["apiVersion"] == "gateway.networking.k8s.io/v1"
    listeners = {listener["name"]: listener for listener in gateway["spec"]["listeners"]}
    routes = manifests.of("TLSRoute")
    assert len(routes) == len(listeners) == 2
    for route in routes:
        assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
        (parent,), (rule,) = route["spec"]["parentRefs"], route["spec"]["rules"]
        listener = listeners[parent["sectionName"]]
        assert parent["name"] == "fairfleet"
        assert (listener["protocol"], listener["tls"]) == ("TLS", {"mode": "Passthrough"})
        assert route["spec"]["hostnames"] == [gateway_host(manifests)]
        (backend,) = rule["backendRefs"]
        assert backend["name"] == "fairfleet-server"
        # Then the address in a token or a file is valid inside and outside the cluster.
        assert backend["port"] == listener["port"]


def test_the_ingress_passes_tls_through_to_the_server() -> None:
    manifests = built(OTHER)
    ingress = manifests.one("Ingress", "fairfleet")
    assert (
        ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/ssl-passthrough"] == "true"
    )
    assert "tls" not in ingress["spec"]  # The ingress does not terminate TLS.
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    named = path["backend"]["service"]
    ports = [port["name"] for port in manifests.one("Service", named["name"])["spec"]["ports"]]
    assert named["port"]["name"] in ports
    assert rule["host"] in manifests.one("Certificate", "fairfleet-server")["spec"]["dnsNames"]


def test_cert_manager_issues_certificates_with_the_right_identities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifests = built(OTHER)
    for kind in ("Issuer", "Certificate"):
        assert {manifest["apiVersion"] for manifest in manifests.of(kind)} == {"cert-manager.io/v1"}
    issuers = {issuer["metadata"]["name"]: issuer["spec"] for issuer in manifests.of("Issuer")}
    for certificate in manifests.of("Certificate"):
        assert certificate["spec"]["issuerRef"]["name"] in issuers
    ca = manifests.one("Certificate", "fairfleet-ca")["spec"]
    assert ca["isCA"] is True
    assert issuers["fairfleet"]["ca"]["secretName"] == ca["secretName"]

    settings = client_settings(manifests.environment("fairfleet-client"), monkeypatch)
    server = manifests.one("Certificate", "fairfleet-server")["spec"]
    assert settings.server.rpartition(":")[0] in server["dnsNames"]
    assert "server auth" in server["usages"]
    (volume,) = [
        volume for volume in manifests.pod("fairfleet-server")["volumes"] if volume["name"] == "pki"
    ]
    assert volume["secret"]["secretName"] == server["secretName"]
    assert {item["path"] for item in volume["secret"]["items"]} == {CA, SERVER, SERVER_KEY}
    assert {item["key"] for item in volume["secret"]["items"]} == {"ca.crt", "tls.crt", "tls.key"}

    operator = manifests.one("Certificate", "fairfleet-operator")["spec"]
    assert identity_of(operator["uris"]) == Identity(Role.OPERATOR, "operator")
    (volume,) = [
        volume
        for volume in manifests.pod("fairfleet-client")["volumes"]
        if volume["name"] == "credentials"
    ]
    attributes: Manifest = volume["csi"]["volumeAttributes"]
    uri = attributes["csi.cert-manager.io/uri-sans"].replace("${POD_NAME}", "fairfleet-client-3")
    assert identity_of([uri]) == Identity(Role.CLIENT, settings.numbered(3).name)
    assert attributes["csi.cert-manager.io/issuer-name"] in issuers
    for usages in (operator["usages"], attributes["csi.cert-manager.io/key-usages"].split(",")):
        assert "client auth" in usages
