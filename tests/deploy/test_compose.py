"""docker-compose.yml and the Dockerfile say what the code reads: ports, variables, volumes, commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fairfleet.common.cli import program
from fairfleet.common.errors import BadSettings
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
    """By the container's port: where the host publishes it."""
    return {int(port.rpartition(":")[2]): port.rpartition(":")[0] for port in service["ports"]}


def mounted(service: dict[str, Any]) -> dict[str, str]:
    return {volume.split(":")[1]: volume.split(":")[0] for volume in service["volumes"]}


def test_the_server_listens_where_its_ports_are_published(
    services: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server_settings(services["server"]["environment"], monkeypatch)
    ports = published(services["server"])
    assert settings.listen == "0.0.0.0:8440"
    assert (settings.http.host, settings.http_port) == ("0.0.0.0", 8441)
    assert set(ports) == {8440, 8441}
    assert all(where.startswith("127.0.0.1:") for where in ports.values()), "in the clear: not for other machines"


def test_the_servers_state_and_model_lie_in_volumes(
    services: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server_settings(services["server"]["environment"], monkeypatch)
    volumes = mounted(services["server"])
    assert volumes[str(settings.state_dir)] == "state"
    assert settings.model is not None
    assert volumes[str(settings.model.parent)] == "model" == mounted(services["model"])["/model"]
    written = services["model"]["command"][services["model"]["command"].index("--output") + 1]
    assert written == str(settings.model)


def test_the_clients_dial_the_server_and_share_the_folder_in_which_they_claim_their_number(
    services: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = client_settings(services["client"]["environment"], monkeypatch)
    assert settings.server == "server:8440"
    assert services["client"]["environment"]["no_grpc_proxy"] == "server", "a proxy knows no server of ours"
    assert settings.replica == "claim"
    assert mounted(services["client"])[str(settings.state_dir)] == "clients"
    third = settings.numbered(3)
    assert third.name == "client-3"
    assert third.options["shard"] == "3"


def test_every_replica_by_default_has_a_part_of_the_data_of_its_own(services: dict[str, dict[str, Any]]) -> None:
    replicas = services["client"]["deploy"]["replicas"]
    names = [digits.client_name(str(place)) for place in range(replicas)]
    assert names == list(digits.CLIENTS)


def test_nobody_starts_before_what_it_needs(services: dict[str, dict[str, Any]]) -> None:
    assert services["server"]["depends_on"]["model"]["condition"] == "service_completed_successfully"
    for dependent in ("client", "prometheus"):
        assert services[dependent]["depends_on"]["server"]["condition"] == "service_healthy"


def test_prometheus_scrapes_the_port_that_the_server_has(
    services: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server_settings(services["server"]["environment"], monkeypatch)
    folder = mounted(services["prometheus"])["/etc/prometheus"]
    config = yaml.safe_load((ROOT / folder / "prometheus.yml").read_text())
    assert all((ROOT / folder / name).exists() for name in config["rule_files"])
    (targets,) = config["scrape_configs"][0]["static_configs"]
    assert targets["targets"] == [f"server:{settings.http_port}"]


def test_grafana_is_given_the_dashboard_and_the_prometheus_that_it_asks(services: dict[str, dict[str, Any]]) -> None:
    folders = mounted(services["grafana"])
    provisioning = ROOT / folders["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "fairfleet.yml").read_text())["providers"]
    dashboard = json.loads((ROOT / folders[provider["options"]["path"]] / "fairfleet.json").read_text())
    assert source["url"] == "http://prometheus:9090"
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"] if panel["type"] != "row"} == {source["uid"]}


@pytest.mark.parametrize("service", ["model", "server", "client"])
def test_what_is_built_is_a_target_of_the_dockerfile(services: dict[str, dict[str, Any]], service: str) -> None:
    build = services[service]["build"]
    assert ROOT / build["dockerfile"] == DOCKERFILE
    assert f" AS {build['target']}\n" in DOCKERFILE.read_text()
    assert services[service]["image"] == f"fairfleet-{build['target']}"


def test_the_images_commands_are_commands_of_the_program(services: dict[str, dict[str, Any]]) -> None:
    commands = re.findall(r'^CMD \["(\w+)"\]', DOCKERFILE.read_text(), re.MULTILINE)
    checks = re.findall(r'CMD \["fairfleet", "(\w+)"\]', DOCKERFILE.read_text())
    assert (commands, checks) == (["server", "client", "client"], ["health"])
    for command in {*commands, *checks, services["model"]["command"][0]}:
        assert CliRunner().invoke(program(command), [command, "--help"]).exit_code == 0


def test_the_dependencies_of_an_image_are_those_of_the_extra_and_of_the_extras_it_names() -> None:
    def wanted(*extras: str) -> str:
        command = [sys.executable, "docker/requirements.py", *extras]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "grpcio>=" in wanted()
    assert "SQLAlchemy" not in wanted()
    assert "prometheus-client" in wanted("server")
    assert "torch" in wanted("torch")
    for word in ("SQLAlchemy", "scikit-learn"):
        assert word in wanted("lab")
    assert "fairfleet" not in wanted("lab")


def test_every_variable_of_the_image_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "FAIRFLEET_STATE_DIR" in image_environment("client")
    server_settings({}, monkeypatch)
    client_settings({"FAIRFLEET_TASK": "a:b"}, monkeypatch)


def test_a_variable_that_is_no_setting_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="FAIRFLEET_LISTN"):
        server_settings({"FAIRFLEET_LISTN": "0.0.0.0:1"}, monkeypatch)
    with pytest.raises(BadSettings, match="prot"):
        server_settings({"FAIRFLEET_HTTP__PROT": "1"}, monkeypatch)
