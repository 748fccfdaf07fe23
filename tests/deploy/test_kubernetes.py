"""k8s/: built by kubectl, valid by the schemas of Kubernetes, and in line with the code's own settings.

No cluster runs here: what is checked is what a cluster would be told. Kinds that are not Kubernetes' own (gateways,
certificates, monitors) are compared with what their projects' definitions ask for, by hand; with those definitions in
a folder that FAIRFLEET_CRDS names, also by their schemas.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from fairfleet.common.identity import Identity, Role, identity_of
from fairfleet.common.pki_folder import CA, SERVER, SERVER_KEY
from fairfleet.lab import digits
from tests.deploy.manifests import BUILDS, K8S, OTHER, Manifest, Manifests, built
from tests.deploy.settings import ROOT, client_settings, compose_services, server_settings
from tests.e2e.fleet import PROGRAM

sys.path.insert(0, str(K8S))
import rules

VERSIONS = ("1.27", "1.29", "1.31", "1.33", "1.35", "1.37")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
SECURE = [build for build in BUILDS if build != "local"]
OWN = {"apps/v1", "networking.k8s.io/v1", "policy/v1", "v1"}  # of Kubernetes itself
DOCUMENT = ROOT / "docs" / "kubernetes.md"


@pytest.fixture(params=BUILDS)
def manifests(request: pytest.FixtureRequest) -> Manifests:
    return built(request.param)


@pytest.fixture(params=SECURE)
def secure(request: pytest.FixtureRequest) -> Manifests:
    return built(request.param)


# ---- schemas ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid_by_the_schema_of_kubernetes(manifests: Manifests, version: str) -> None:
    own = [manifest for manifest in manifests if manifest["apiVersion"] in OWN]
    assert len(own) >= 13
    for manifest in own:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_misspelt_field_would_be_noticed() -> None:
    wrong = yaml.safe_load(yaml.safe_dump(built("local").one("StatefulSet", "fairfleet-server")))
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def definitions(folder: Path) -> dict[tuple[str, str], Any]:
    """From apiVersion and kind to a schema, by the CustomResourceDefinitions in a folder."""
    found = {}
    for file in folder.rglob("*.yaml"):
        for crd in yaml.safe_load_all(file.read_text()):
            if crd and crd.get("kind") == "CustomResourceDefinition":
                for version in crd["spec"]["versions"]:
                    key = f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"]
                    found[key] = _closed(version["schema"]["openAPIV3Schema"]) if version["served"] else None
    return found


def _closed(schema: Any) -> Any:
    """With no fields but those that are named, as the API server prunes others."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if str(closed.get("pattern", "")).startswith("^(?"):
        del closed["pattern"]  # flags as Go writes them
    if isinstance(closed.get("properties"), dict) and "type" in closed and "additionalProperties" not in closed:
        closed["additionalProperties"] = "kind" in closed["properties"] and "spec" in closed["properties"]
    if closed.pop("x-kubernetes-int-or-string", False):
        closed.pop("type", None)
    return closed


@pytest.mark.skipif("FAIRFLEET_CRDS" not in os.environ, reason="FAIRFLEET_CRDS names no folder with definitions")
def test_every_other_manifest_is_valid_by_the_definition_of_its_project(manifests: Manifests) -> None:
    known = definitions(Path(os.environ["FAIRFLEET_CRDS"]))
    for manifest in manifests:
        if manifest["apiVersion"] not in OWN:
            schema = known[manifest["apiVersion"], manifest["kind"]]
            assert schema is not None, f"{manifest['apiVersion']} {manifest['kind']} is no longer served"
            jsonschema.validate(manifest, schema)


# ---- policy: what a linter would say ------------------------------------------------------------


def test_images_have_the_version_of_this_project_and_never_latest(manifests: Manifests) -> None:
    for name, container in manifests.containers():
        image, _, tag = container["image"].rpartition(":")
        assert tag == VERSION, name
        assert image.rpartition("/")[2].startswith("fairfleet-"), name


def test_every_container_says_what_it_needs_and_how_much_memory_it_may_take(manifests: Manifests) -> None:
    for name, container in manifests.containers():
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), name
        assert "memory" in container["resources"]["limits"], name


def test_pods_keep_to_the_restricted_standard_and_to_a_root_that_they_cannot_write_to(manifests: Manifests) -> None:
    (namespace,) = manifests.of("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    allowed = {"configMap", "csi", "emptyDir", "secret"}
    for name, pod in manifests.pods():
        context = pod["securityContext"]
        assert (context["runAsNonRoot"], context["seccompProfile"]) == (True, {"type": "RuntimeDefault"}), name
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


def test_everything_is_in_the_namespace(manifests: Manifests) -> None:
    for manifest in manifests:
        if manifest["kind"] != "Namespace":
            assert manifest["metadata"]["namespace"] == "fairfleet", manifest["metadata"]["name"]


def test_whatever_listens_is_probed_over_http_which_needs_no_certificate(manifests: Manifests) -> None:
    for name, pod in manifests.pods():
        (container,) = pod["containers"]
        probes = {key: container[key]["httpGet"] for key in container if key.endswith("Probe")}
        if "ports" in container:
            ready, alive = {"path": "/readyz", "port": "http"}, {"path": "/healthz", "port": "http"}
            assert probes == {"startupProbe": ready, "readinessProbe": ready, "livenessProbe": alive}, name
        else:
            assert not probes, name


# ---- what is said twice agrees ------------------------------------------------------------------


def test_ports_are_those_the_server_listens_on(manifests: Manifests, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = server_settings(manifests.environment("fairfleet-server"), monkeypatch)
    wanted = {"grpc": int(settings.listen.rpartition(":")[2]), "http": settings.http_port}
    if settings.enrolment:
        wanted["enrolment"] = int(settings.enrolment.rpartition(":")[2])
    (server,) = manifests.pod("fairfleet-server")["containers"]
    assert {port["name"]: port["containerPort"] for port in server["ports"]} == wanted
    service = manifests.one("Service", "fairfleet-server")["spec"]["ports"]
    assert {port["targetPort"]: port["port"] for port in service} == wanted
    template = manifests.one("StatefulSet", "fairfleet-server")["spec"]["template"]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(wanted["http"])
    allowed = {
        port["port"]
        for policy in manifests.of("NetworkPolicy")
        for rule in (*policy["spec"].get("ingress", ()), *policy["spec"].get("egress", ()))
        for port in rule["ports"]
    }
    assert allowed - {53} <= set(wanted.values())
    routed = [rule for route in manifests.of("TLSRoute") for rule in route["spec"]["rules"]]
    assert {ref["port"] for rule in routed for ref in rule["backendRefs"]} <= {wanted["grpc"], wanted.get("enrolment")}


def test_nobody_is_let_in_or_out_but_by_a_rule(manifests: Manifests) -> None:
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


def test_selectors_match_the_pods(manifests: Manifests) -> None:
    labels = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"] for one in manifests.of("StatefulSet")
    }
    for one in manifests.of("StatefulSet"):
        name = one["metadata"]["name"]
        assert one["spec"]["selector"]["matchLabels"] == labels[name]
        assert manifests.one("Service", one["spec"]["serviceName"])["spec"]["selector"] == labels[name]
        assert manifests.one("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"] == labels[name]
        assert manifests.one("NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"] == labels[name]


def test_every_mount_has_its_volume_and_every_setting_that_is_a_path_its_mount(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in manifests.of("StatefulSet"):
        pod = one["spec"]["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in one["spec"]["volumeClaimTemplates"]}
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
            assert any(path.is_relative_to(mount) for mount in mounted), f"{path} of {name} is in no volume"


def test_state_lies_in_a_claimed_volume_below_its_root(manifests: Manifests, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume's root may hold lost+found, and the server takes only a directory of its own."""
    server = server_settings(manifests.environment("fairfleet-server"), monkeypatch)
    client = client_settings(manifests.environment("fairfleet-client"), monkeypatch)
    for name, state in (("fairfleet-server", server.state_dir), ("fairfleet-client", client.state_dir)):
        (container,) = manifests.pod(name)["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        (claimed,) = manifests.one("StatefulSet", name)["spec"]["volumeClaimTemplates"]
        assert mounts[str(state.parent)] == claimed["metadata"]["name"] == "state"


def test_the_model_is_that_of_the_clients_task_and_written_where_the_server_reads_it(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server_settings(manifests.environment("fairfleet-server"), monkeypatch)
    pod = manifests.pod("fairfleet-server")
    (model,), (server,) = pod["initContainers"], pod["containers"]
    told = dict(zip(model["args"], model["args"][1:], strict=False))
    assert told["--output"] == str(settings.model)
    assert told["--task"] == manifests.environment("fairfleet-client")["FAIRFLEET_TASK"]
    assert model["image"] == manifests.pod("fairfleet-client")["containers"][0]["image"]
    at = [{m["mountPath"]: m["name"] for m in container["volumeMounts"]}["/model"] for container in (model, server)]
    assert at == ["model", "model"]


def test_the_federation_is_the_one_of_the_compose_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is trained, how and by which rule; not where things lie."""
    told = server_settings(built("local").environment("fairfleet-server"), monkeypatch)
    composed = server_settings(compose_services()["server"]["environment"], monkeypatch)
    for part in ("name", "rounds", "rule", "round", "plan"):
        assert getattr(told, part) == getattr(composed, part)


# ---- who is who ---------------------------------------------------------------------------------


def test_a_client_is_its_pod_with_a_part_of_the_data_of_its_own(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = client_settings(manifests.environment("fairfleet-client"), monkeypatch)
    assert settings.replica == "hostname"
    replicas = manifests.one("StatefulSet", "fairfleet-client")["spec"]["replicas"]
    numbered = [settings.numbered(number) for number in range(replicas)]
    assert [one.name for one in numbered] == [f"fairfleet-client-{number}" for number in range(replicas)]
    assert [digits.client_name(one.options["shard"]) for one in numbered] == list(digits.CLIENTS)[:replicas]
    host, _, port = settings.server.rpartition(":")
    assert int(port) in [port["port"] for port in manifests.one("Service", host)["spec"]["ports"]]


def test_either_everybody_has_a_certificate_or_the_overlay_says_that_it_is_insecure(
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
def test_each_pod_sees_its_own_credentials_only(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = built(build)
    settings = client_settings(manifests.environment("fairfleet-client"), monkeypatch)
    (container,) = manifests.pod("fairfleet-client")["containers"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "credentials"]
    assert mount["mountPath"] == str(settings.credentials)
    assert mount["subPathExpr"] == "$(POD_NAME).fleet"
    (variable,) = container["env"]
    assert variable == {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}


def test_every_secret_is_made_by_a_command_of_the_document_or_by_cert_manager(secure: Manifests) -> None:
    made = {certificate["spec"]["secretName"] for certificate in secure.of("Certificate")}
    text = DOCUMENT.read_text()
    for name, pod in secure.pods():
        for volume in pod["volumes"]:
            secret = volume.get("secret", {}).get("secretName")
            assert secret is None or secret in made or f"secret generic {secret} " in text, f"{secret} of {name}"


def documented_secrets(folder: Path) -> dict[str, dict[str, bytes]]:
    """By secret its files: the document's lines, run with a kubectl that only writes down what it is asked for."""
    block = next(part for part in DOCUMENT.read_text().split("```")[1::2] if "fairfleet pki init" in part)
    folder.mkdir()
    (folder / "fairfleet").write_text(f'#!/bin/sh\nexec {" ".join(PROGRAM)} "$@"\n')
    (folder / "kubectl").write_text('#!/bin/sh\necho kubectl "$@" >> asked\n')
    for program in ("fairfleet", "kubectl"):
        (folder / program).chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    script = block.removeprefix("sh")
    subprocess.run(["bash", "-euc", script], cwd=folder, env=environment, capture_output=True, check=True)
    secrets: dict[str, dict[str, bytes]] = {}
    for line in (folder / "asked").read_text().splitlines():
        _, found, told = line.partition("create secret generic ")
        if found:
            name, *sources = told.split()
            secrets[name] = {}
            for source in sources:
                kind, _, value = source.removeprefix("--from-").partition("=")
                if kind == "literal":
                    key, _, content = value.partition("=")
                    secrets[name][key] = content.encode()
                else:
                    path = folder / value
                    files = list(path.iterdir()) if path.is_dir() else [path]
                    secrets[name] |= {file.name: file.read_bytes() for file in files}
    return secrets


def test_the_documents_commands_make_what_is_mounted(tmp_path: Path) -> None:
    secrets = documented_secrets(tmp_path / "operator")
    production = built("production")
    replicas = production.one("StatefulSet", "fairfleet-client")["spec"]["replicas"]
    assert secrets["fairfleet-server-pki"].keys() == {CA, SERVER, SERVER_KEY}
    assert secrets["fairfleet-client-credentials"].keys() == {f"fairfleet-client-{n}.fleet" for n in range(replicas)}
    assert len(secrets["fairfleet-http-token"]["token"]) == 32
    mounted = {v["secret"]["secretName"] for _, pod in production.pods() for v in pod["volumes"] if "secret" in v}
    assert mounted == secrets.keys()


# ---- kinds of other projects --------------------------------------------------------------------


def test_rules_and_alerts_are_those_of_the_compose_files_prometheus() -> None:
    assert rules.OUTPUT.read_text() == rules.text(), "run `python k8s/rules.py`"
    for build in SECURE:
        (rule,) = built(build).of("PrometheusRule")
        assert rule["apiVersion"] == "monitoring.coreos.com/v1"
        assert rule["spec"]["groups"] == rules.rule()["spec"]["groups"]


def test_the_monitor_finds_the_servers_port_and_shows_the_token(
    secure: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = secure.one("ServiceMonitor", "fairfleet")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    service = secure.one("Service", "fairfleet-server")
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "fairfleet"  # which alerts ask for
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert endpoint["path"] == "/metrics"
    shown = endpoint["authorization"]["credentials"]
    settings = server_settings(secure.environment("fairfleet-server"), monkeypatch)
    token = settings.http.token_file
    assert token is not None
    (server,) = secure.pod("fairfleet-server")["containers"]
    (mount,) = [mount for mount in server["volumeMounts"] if mount["mountPath"] == str(token.parent)]
    (volume,) = [one for one in secure.pod("fairfleet-server")["volumes"] if one["name"] == mount["name"]]
    assert (volume["secret"]["secretName"], token.name) == (shown["name"], shown["key"])


def gateway_host(manifests: Manifests) -> str:
    (host,) = {listener["hostname"] for listener in manifests.one("Gateway", "fairfleet")["spec"]["listeners"]}
    return str(host)


@pytest.mark.parametrize("build", ["production", "gpu"])
def test_the_gateway_passes_tls_on_unopened_to_the_server(build: str) -> None:
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
        assert backend["port"] == listener["port"]  # so that a token's and a file's address holds inside and outside


def test_the_ingress_passes_tls_on_unopened_to_the_server() -> None:
    manifests = built(OTHER)
    ingress = manifests.one("Ingress", "fairfleet")
    assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/ssl-passthrough"] == "true"
    assert "tls" not in ingress["spec"]  # nothing is ended there
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    named = path["backend"]["service"]
    ports = [port["name"] for port in manifests.one("Service", named["name"])["spec"]["ports"]]
    assert named["port"]["name"] in ports
    assert rule["host"] in manifests.one("Certificate", "fairfleet-server")["spec"]["dnsNames"]


def test_cert_manager_certifies_everybody_as_who_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = built(OTHER)
    for kind in ("Issuer", "Certificate"):
        assert {one["apiVersion"] for one in manifests.of(kind)} == {"cert-manager.io/v1"}
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
    (volume,) = [one for one in manifests.pod("fairfleet-server")["volumes"] if one["name"] == "pki"]
    assert volume["secret"]["secretName"] == server["secretName"]
    assert {item["path"] for item in volume["secret"]["items"]} == {CA, SERVER, SERVER_KEY}
    assert {item["key"] for item in volume["secret"]["items"]} == {"ca.crt", "tls.crt", "tls.key"}

    operator = manifests.one("Certificate", "fairfleet-operator")["spec"]
    assert identity_of(operator["uris"]) == Identity(Role.OPERATOR, "operator")
    (volume,) = [one for one in manifests.pod("fairfleet-client")["volumes"] if one["name"] == "credentials"]
    asked: Manifest = volume["csi"]["volumeAttributes"]
    uri = asked["csi.cert-manager.io/uri-sans"].replace("${POD_NAME}", "fairfleet-client-3")
    assert identity_of([uri]) == Identity(Role.CLIENT, settings.numbered(3).name)
    assert asked["csi.cert-manager.io/issuer-name"] in issuers
    for usages in (operator["usages"], asked["csi.cert-manager.io/key-usages"].split(",")):
        assert "client auth" in usages
