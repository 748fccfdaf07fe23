"""docker-compose.yml and the Dockerfile fit the code: ports, variables, volumes, commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fairfleet.common.cli.program import program
from fairfleet.common.errors import BadSettings
from fairfleet.common.pki.credentials import read_credentials
from fairfleet.common.pki.pki_folder import CA, SERVER, SERVER_KEY, PkiFolder
from fairfleet.lab import digits
from tests.deploy.settings import (
    DOCKERFILE,
    ROOT,
    client_settings,
    compose_services,
    image_environment,
    server_settings,
)


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    return compose_services()


def published(service: dict[str, Any]) -> dict[int, str]:
    """Return the host's address for each published port of the container."""
    return {int(port.rpartition(":")[2]): port.rpartition(":")[0] for port in service["ports"]}


def mounted(service: dict[str, Any]) -> dict[str, str]:
    return {volume.split(":")[1]: volume.split(":")[0] for volume in service.get("volumes", ())}


def test_the_server_listens_on_the_published_ports(
    services: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server_settings(services["server"]["environment"], monkeypatch)
    ports = published(services["server"])
    assert settings.listen == "0.0.0.0:8440"
    assert (settings.http.host, settings.http_port) == ("0.0.0.0", 8441)
    assert set(ports) == {8440, 8441}


def test_ports_are_published_on_loopback_only(
    services: dict[str, dict[str, Any]],
) -> None:
    for name, service in services.items():
        for where in published(service).values() if "ports" in service else ():
            assert where.startswith("127.0.0.1:"), name


@pytest.mark.parametrize("name", ["server", "insecure-server"])
def test_a_server_has_tls_or_is_marked_insecure(
    services: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    settings = server_settings(services[name]["environment"], monkeypatch)
    assert (settings.pki is not None, settings.insecure) == (
        (True, False) if name == "server" else (False, True)
    )
    assert services[name].get("profiles") == (None if name == "server" else ["insecure-demo"])


def test_both_servers_differ_only_in_transport_security(
    services: dict[str, dict[str, Any]],
) -> None:
    secure, insecure = (
        dict(services[name]["environment"]) for name in ("server", "insecure-server")
    )
    differ = {key for key, _ in secure.items() ^ insecure.items()}
    assert differ == {
        "FAIRFLEET_PKI",
        "FAIRFLEET_CREDENTIALS",
        "FAIRFLEET_SERVER",
        "FAIRFLEET_INSECURE",
    }


def provisioned(services: dict[str, dict[str, Any]], folder: Path) -> Path:
    """Run the command of the init container with `folder` instead of /pki; return the folder."""
    words = services["pki"]["command"].replace("/pki", str(folder)).split()
    done = CliRunner().invoke(program("pki"), words)
    assert done.exit_code == 0, done.output
    return folder


def test_each_service_mounts_only_its_own_credentials(
    services: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pki = provisioned(services, tmp_path)
    assert mounted(services["pki"]) == {
        "/pki/ca": "ca",
        "/pki/server": "server-pki",
        "/pki/operator": "operator-pki",
        "/pki/clients": "client-pki",
    }
    secret = {
        "server": {"/pki/server", "/pki/operator"},
        "client": {"/pki/clients"},
        "gpu-client": {"/pki/clients"},
    }
    for name, service in services.items():
        if name == "pki":
            continue
        places = {place for place in mounted(service) if place.startswith("/pki")}
        assert places == secret.get(name, set()), name
        for place in places:
            assert mounted(service)[place] == mounted(services["pki"])[place]
            assert any(f":{place}:ro" in volume for volume in service["volumes"]), (
                "the service only reads them"
            )
    settings = server_settings(services["server"]["environment"], monkeypatch)
    assert str(settings.pki) == "/pki/server"
    assert all((pki / "server" / name).exists() for name in (CA, SERVER, SERVER_KEY))
    operator = pki / Path(services["server"]["environment"]["FAIRFLEET_CREDENTIALS"]).relative_to(
        "/pki"
    )
    assert read_credentials(operator).address == "127.0.0.1:8440", "as it is from the host"
    server = client_settings(services["client"]["environment"], monkeypatch).server
    assert server.rpartition(":")[0] in PkiFolder(pki / "ca").server_names()


@pytest.mark.parametrize("name", ["client", "gpu-client"])
def test_every_replica_has_its_own_certificate(
    services: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    pki = provisioned(services, tmp_path)
    settings = client_settings(services[name]["environment"], monkeypatch)
    for number in (
        0,
        services["client"]["deploy"]["replicas"],
        digits.SPLITS * len(digits.CLIENTS) - 1,
    ):
        numbered = settings.numbered(number)
        assert numbered.credentials is not None
        file = pki / numbered.credentials.relative_to("/pki")
        own, access = numbered.model_copy(update={"credentials": file}).identified()
        assert (own.name, access.address) == (f"client-{number}", "server:8440")


def test_a_client_with_a_graphics_card_trains_the_same_model(
    services: dict[str, dict[str, Any]],
) -> None:
    """The digits task in torch has the same tensors as in numpy: tests/lab/test_digits.py."""
    cpu, gpu = (services[name]["environment"] for name in ("client", "gpu-client"))
    assert {key for key, _ in cpu.items() ^ gpu.items()} == {"FAIRFLEET_TASK", "FAIRFLEET_DEVICE"}
    assert gpu["FAIRFLEET_TASK"] == f"{digits.__name__}:{digits.torch_softmax.__name__}"
    assert services["gpu-client"]["profiles"] == ["gpu"]
    (card,) = services["gpu-client"]["deploy"]["resources"]["reservations"]["devices"]
    assert card["capabilities"] == ["gpu"]


def test_every_service_is_hardened_limited_and_restarted(
    services: dict[str, dict[str, Any]],
) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if name in ("pki", "model"):
            assert "restart" not in service, "they end"
            assert service["network_mode"] == "none", name
        else:
            assert service["restart"] == "unless-stopped", "also after a restart of the machine"
            assert set(service["deploy"]["resources"]["limits"]) >= {"memory", "pids"}, name


def test_the_state_and_model_of_the_server_are_in_volumes(
    services: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server_settings(services["server"]["environment"], monkeypatch)
    volumes = mounted(services["server"])
    assert volumes[str(settings.state_dir)] == "state"
    assert settings.model is not None
    assert volumes[str(settings.model.parent)] == "model" == mounted(services["model"])["/model"]
    written = services["model"]["command"][services["model"]["command"].index("--output") + 1]
    assert written == str(settings.model)


def test_clients_connect_to_the_server_and_share_a_state_folder(
    services: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = client_settings(services["client"]["environment"], monkeypatch)
    assert settings.server == "server:8440"
    assert services["client"]["environment"]["no_grpc_proxy"] == "server", (
        "a proxy does not know the name of the server"
    )
    assert settings.replica == "claim"
    assert mounted(services["client"])[str(settings.state_dir)] == "clients"
    third = settings.numbered(3)
    assert third.options["shard"] == "3"


def test_every_default_replica_has_its_own_shard(
    services: dict[str, dict[str, Any]],
) -> None:
    replicas = services["client"]["deploy"]["replicas"]
    names = [digits.client_name(str(place)) for place in range(replicas)]
    assert names == list(digits.CLIENTS)


def test_services_start_after_their_dependencies(services: dict[str, dict[str, Any]]) -> None:
    for before in ("pki", "model"):
        assert (
            services["server"]["depends_on"][before]["condition"]
            == "service_completed_successfully"
        )
    for dependent in ("client", "gpu-client", "prometheus"):
        assert services[dependent]["depends_on"]["server"]["condition"] == "service_healthy"
    assert services["grafana"]["depends_on"]["prometheus"]["condition"] == "service_healthy"
    assert (
        services["insecure-client"]["depends_on"]["insecure-server"]["condition"]
        == "service_healthy"
    )


def test_prometheus_scrapes_the_http_port_of_the_server(
    services: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server_settings(services["server"]["environment"], monkeypatch)
    folder = mounted(services["prometheus"])["/etc/prometheus"]
    config = yaml.safe_load((ROOT / folder / "prometheus.yml").read_text())
    assert all((ROOT / folder / name).exists() for name in config["rule_files"])
    (targets,) = config["scrape_configs"][0]["static_configs"]
    assert targets["targets"] == [f"server:{settings.http_port}"]


def test_grafana_has_the_dashboard_and_its_data_source(
    services: dict[str, dict[str, Any]],
) -> None:
    folders = mounted(services["grafana"])
    provisioning = ROOT / folders["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "fairfleet.yml").read_text())[
        "providers"
    ]
    dashboard = json.loads(
        (ROOT / folders[provider["options"]["path"]] / "fairfleet.json").read_text()
    )
    assert source["url"] == "http://prometheus:9090"
    assert {
        panel["datasource"]["uid"] for panel in dashboard["panels"] if panel["type"] != "row"
    } == {source["uid"]}


@pytest.mark.parametrize(
    ("service", "image"),
    [
        ("pki", "client-lite"),
        ("model", "client-lite"),
        ("server", "server"),
        ("client", "client-lite"),
        ("gpu-client", "client-cuda"),
        ("insecure-server", "server"),
        ("insecure-client", "client-lite"),
    ],
)
def test_each_build_is_a_dockerfile_target_tagged_with_the_version(
    services: dict[str, dict[str, Any]], service: str, image: str
) -> None:
    build, text = services[service]["build"], DOCKERFILE.read_text()
    assert ROOT / build["dockerfile"] == DOCKERFILE
    assert f" AS {build['target']}\n" in text
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert services[service]["image"] == f"fairfleet-{image}:{version}"
    assert build["args"]["VERSION"] == version
    assert f"ARG BASE={build['args']['BASE']}\n" in text
    if build["target"] == "client":
        torch = {"client-lite": "none", "client-cuda": "cuda"}[image]
        assert build["args"]["TORCH"] == torch
        assert f" AS torch-{torch}\n" in text


@pytest.mark.parametrize(
    ("image", "target", "torch"),
    [
        ("server", "server", None),
        ("client-lite", "client", "none"),
        ("client", "client", "cpu"),
        ("client-cuda", "client", "cuda"),
    ],
)
def test_make_builds_images_tagged_with_the_version(
    image: str, target: str, torch: str | None
) -> None:
    words = ["make", "--dry-run", "--always-make", f"image-{image}"]
    output = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.replace("\\\n", "")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"--target {target}" in output
    assert f"--tag fairfleet-{image}:{version} " in output
    assert f"VERSION={version} " in output
    assert re.search(r"REVISION=[0-9a-f]{40}", output) or not (ROOT / ".git").exists()
    assert (f"--build-arg TORCH={torch}" in output) is (torch is not None)


def test_commands_of_images_exist_in_the_program(
    services: dict[str, dict[str, Any]],
) -> None:
    commands = re.findall(r'^CMD \["(\w+)"\]', DOCKERFILE.read_text(), re.MULTILINE)
    checks = re.findall(r'CMD \["fairfleet", "(\w+)"\]', DOCKERFILE.read_text())
    assert (commands, checks) == (["server", "client"], ["health"])
    for command in {*commands, *checks, services["model"]["command"][0]}:
        assert CliRunner().invoke(program(command), [command, "--help"]).exit_code == 0


def test_image_dependencies_include_nested_extras() -> None:
    def requirements(*extras: str) -> str:
        command = [sys.executable, "docker/requirements.py", *extras]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "grpcio>=" in requirements()
    assert "SQLAlchemy" not in requirements()
    assert "prometheus-client" in requirements("server")
    assert "torch" in requirements("torch")
    for word in ("SQLAlchemy", "scikit-learn"):
        assert word in requirements("lab")
    assert "fairfleet" not in requirements("lab")


def test_every_variable_of_the_image_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "FAIRFLEET_STATE_DIR" in image_environment("client")
    server_settings({}, monkeypatch)
    client_settings({"FAIRFLEET_TASK": "a:b"}, monkeypatch)


def test_an_unknown_variable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="FAIRFLEET_LISTN"):
        server_settings({"FAIRFLEET_LISTN": "0.0.0.0:1"}, monkeypatch)
    with pytest.raises(BadSettings, match="prot"):
        server_settings({"FAIRFLEET_HTTP__PROT": "1"}, monkeypatch)
