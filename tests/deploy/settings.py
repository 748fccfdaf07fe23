"""The settings of a container's environment, read by the same code as in the container."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from fairfleet.client.settings import ClientSettings
from fairfleet.common.cli.settings import PREFIX, S, read_settings
from fairfleet.server.settings import ServerSettings
from tests.support.paths import ROOT

DOCKERFILE = ROOT / "docker" / "Dockerfile"
DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")
# Commands such as `health`, `status` and `watch` read these in a server's container.
OF_COMMANDS = {"FAIRFLEET_CREDENTIALS", "FAIRFLEET_SERVER"}


def read_as(kind: type[S], environment: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> S:
    """Return the settings, after a check that every variable of ours is a setting.

    The program ignores unknown names, because other programs use the environment too.
    """
    with monkeypatch.context() as context:
        for name, value in environment.items():
            context.setenv(name, str(value))
        settings = read_settings(kind, None, {})
    for name in environment:
        field = name.removeprefix(PREFIX).lower().split("__")[0]
        assert not name.startswith(PREFIX) or field in kind.model_fields, (
            f"{name} is no setting of {kind.__name__}"
        )
    return settings


def image_environment(target: str) -> dict[str, str]:
    """Return the variables that the Dockerfile sets in a target and in its base stages."""
    stages: dict[str, dict[str, str]] = {}
    current: dict[str, str] = {}
    for line in DOCKERFILE.read_text().replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["FROM"]:
            current = stages[words[3]] = dict(stages.get(words[1], {}))
        elif words[:1] == ["ENV"]:
            current.update(word.split("=", 1) for word in words[1:])
    return stages[target]


def compose_services() -> dict[str, dict[str, Any]]:
    """Return the services as they are when nothing is set in the environment."""
    text = DEFAULT.sub(r"\1", (ROOT / "docker-compose.yml").read_text())
    services: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return services


def server_settings(
    environment: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> ServerSettings:
    own = {name: value for name, value in environment.items() if name not in OF_COMMANDS}
    return read_as(ServerSettings, image_environment("server") | own, monkeypatch)


def client_settings(
    environment: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> ClientSettings:
    return read_as(ClientSettings, image_environment("client") | dict(environment), monkeypatch)
