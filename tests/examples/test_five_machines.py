"""compose.yaml of the five machines: its services as real processes with TLS, and its isolation.

Each service runs as a process with the service's own variables. Its mounts become paths of this
machine, and its ports free ones. Images are tested in tests/containers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from fairfleet.common.tensors import Model
from tests.deploy.settings import (
    DEFAULT,
    client_settings,
    image_environment,
    server_settings,
)
from tests.examples.support import EXAMPLES, REAL, accuracies, copied, needs_real_data, run_python
from tests.support.fleet import free_port, until
from tests.support.paths import ROOT

MACHINES = [f"machine-{number}" for number in range(5)]
Services = dict[str, dict[str, Any]]


def services() -> Services:
    """Return the services as they are when nothing is set in the environment."""
    text = (EXAMPLES / "five-machines" / "compose.yaml").read_text("utf-8")
    read: Services = yaml.safe_load(DEFAULT.sub(r"\1", text))["services"]
    return read


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return the path on the host for each path in the container."""
    return {volume.split(":")[1]: volume.split(":")[0] for volume in service["volumes"]}


def test_there_are_a_server_and_five_machines() -> None:
    assert sorted(services()) == [*MACHINES, "server"]


def test_a_machine_shares_neither_files_nor_networks_with_another() -> None:
    described = services()
    sources = [
        source
        for name in MACHINES
        for source in mounts(described[name]).values()
        if source != "./task.py"
    ]
    assert len(sources) == len(set(sources)) == 3 * len(MACHINES)
    networks = [described[name]["networks"] for name in MACHINES]
    assert networks == [[name] for name in MACHINES]
    assert described["server"]["networks"] == MACHINES


def test_nobody_mounts_the_key_of_the_certificate_authority() -> None:
    for name, service in services().items():
        for source in mounts(service).values():
            assert source.startswith(("./machines/", "./task.py")), (name, source)
            assert source.rstrip("/") not in ("./machines", "./machines/pki"), name
            assert not source.startswith("./machines/pki/ca"), name


def test_every_service_is_hardened_and_published_on_loopback_only() -> None:
    for service in services().values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_images_and_settings_are_those_of_this_version(monkeypatch: pytest.MonkeyPatch) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    for name, service in services().items():
        assert service["image"].endswith(f":{version}")
        read = server_settings if name == "server" else client_settings
        read(service["environment"], monkeypatch)


def test_it_is_a_valid_compose_file() -> None:
    command = [Path(sys.executable).with_name("check-jsonschema"), "--builtin-schema"]
    file = EXAMPLES / "five-machines" / "compose.yaml"
    done = subprocess.run(
        [*command, "vendor.compose-spec", file], text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_files_of_an_earlier_run_are_not_touched(tmp_path: Path) -> None:
    example = copied("five-machines", tmp_path)
    (example / "machines").mkdir()
    done = subprocess.run(
        [sys.executable, "prepare.py"], cwd=example, text=True, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert "machines exists already; remove it to begin anew" in done.stderr


class Machines:
    """The services of the example as processes on this machine."""

    def __init__(self, example: Path) -> None:
        self._example, self._address = example, f"127.0.0.1:{free_port()}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        service = services()[name]
        program = "server" if name == "server" else "client"
        command = [sys.executable, "-m", "fairfleet.common.cli", program]
        with (self._example / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command,
                cwd=self._example,
                env=self._environment(name, service, program),
                stdout=log,
                stderr=log,
            )

    def _environment(self, name: str, service: dict[str, Any], target: str) -> dict[str, str]:
        """Return the variables of image and service, with paths and ports of this machine."""
        paths = mounts(service)

        def on_host(value: str) -> str:
            for inside, source in sorted(paths.items(), reverse=True):
                if value == inside or value.startswith(f"{inside}/"):
                    return f"{self._example / source}{value.removeprefix(inside)}"
            assert not value.startswith("/"), f"{name} does not mount {value}"
            return value

        variables = {**image_environment(target), **service["environment"]}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("FAIRFLEET_")}
        ours = {k: on_host(str(v)) for k, v in variables.items() if k.startswith("FAIRFLEET_")}
        ours |= {"FAIRFLEET_SERVER": self._address}  # the name `server` exists in compose only
        if name == "server":
            ours |= {"FAIRFLEET_LISTEN": self._address, "FAIRFLEET_HTTP__PORT": "0"}
        return inherited | ours | {"OPENBLAS_NUM_THREADS": "1"}

    def status(self) -> str:
        """Return the status that the operator sees; nothing while the server starts."""
        words = ["status", "--server", self._address]
        credentials = self._example / "machines" / "pki" / "operator" / "operator.fleet"
        done = subprocess.run(
            [sys.executable, "-m", "fairfleet.common.cli", *words, "--credentials", credentials],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout if done.returncode == 0 else ""

    def log(self, name: str) -> str:
        return (self._example / f"{name}.log").read_text("utf-8")


@contextmanager
def running(example: Path) -> Iterator[Machines]:
    """Yield the machines of an example; all of them end with the block."""
    machines = Machines(example)
    try:
        for name in ("server", *MACHINES):
            machines.start(name)
        yield machines
    finally:
        for process in machines.processes.values():
            process.kill()
            process.wait()


def train(example: Path) -> dict[str, float]:
    """Let the five machines train to the end; return their accuracies in percent."""
    with running(example) as machines:
        clients = [machines.processes[name] for name in MACHINES]
        until(lambda: all(p.poll() is not None for p in clients), "the machines to end", 120)
        assert [process.returncode for process in clients] == [0] * 5, machines.log("machine-0")
        status = machines.status()
    assert "40 rounds of 40 done" in status
    return accuracies(status)


@pytest.mark.slow
def test_five_machines_train_with_tls_and_each_keeps_the_model(tmp_path: Path) -> None:
    example = copied("five-machines", tmp_path)
    run_python(example, "prepare.py")
    by_machine = train(example)
    assert len(by_machine) == 5
    assert min(by_machine.values()) > 75
    models = [
        Model.load(example / "machines" / name / "model.safetensors")[0].parameters
        for name in MACHINES
    ]
    initial = Model.load(example / "machines" / "model.safetensors")[0].parameters
    assert all((model == models[0]).all() for model in models)
    assert (models[0] != initial).any()


@pytest.mark.slow
def test_a_machine_without_credentials_is_not_let_in(tmp_path: Path) -> None:
    example = copied("five-machines", tmp_path)
    run_python(example, "prepare.py")
    machines = Machines(example)
    other = copied("five-machines", tmp_path / "other")
    run_python(other, "prepare.py")  # with another certificate authority
    stolen = other / "machines" / "pki" / "clients" / "client-0.fleet"
    stolen.replace(example / "machines" / "pki" / "clients" / "client-0.fleet")
    try:
        machines.start("server")
        until(machines.status, "the server")
        machines.start("machine-0")
        machines.start("machine-1")
        until(lambda: "client-1" in machines.status(), "a machine that is let in")
        assert "client-0" not in machines.status()
    finally:
        for process in machines.processes.values():
            process.kill()
            process.wait()


@pytest.mark.slow
@needs_real_data
def test_it_trains_on_fashion_mnist(tmp_path: Path) -> None:
    example = copied("five-machines", tmp_path)
    run_python(example, "prepare.py", "--data-dir", REAL)
    assert min(train(example).values()) > 50
