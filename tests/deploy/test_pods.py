"""The pods of k8s/overlays/production as local processes, with their settings, files and probes.

Volumes are folders. Secrets are created with the commands of docs/how-to/kubernetes.md. The name of
a pod is the host name in its own namespace. Users, read-only roots and network policies, which only
a kubelet provides, are not tested.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairfleet.lab.digits import write_shards
from tests.deploy.manifests import Manifest, built
from tests.support.documented_secrets import documented_secrets
from tests.support.fleet import Fleet, free_port, until

PROGRAM = [sys.executable, "-m", "fairfleet.common.cli"]


def can_name_hosts() -> bool:
    words = ["unshare", "--uts", "hostname", "pod-0"]
    return (
        bool(shutil.which("unshare"))
        and subprocess.run(words, capture_output=True, check=False).returncode == 0
    )


pytestmark = pytest.mark.skipif(not can_name_hosts(), reason="a separate host name needs root")


class Node:
    """A machine for pods: a folder for every volume, and a free port for each of the manifests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifests = built("production")
        self.secrets = documented_secrets(folder / "operator")
        self.ports = {8440: free_port(), 8441: free_port(), 8442: free_port()}
        self.processes: list[subprocess.Popen[bytes]] = []
        write_shards(folder / "digits")

    def mount(self, name: str, pod: Manifest, container: Manifest) -> dict[str, Path]:
        """Return the local folders of a container's mounts, by their paths in the container."""
        mounted = {"/opt/digits": self.folder / "digits"}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for mount in container["volumeMounts"]:
            volume = volumes.get(mount["name"], {})
            folder = self.folder / name / mount["name"]
            folder.mkdir(parents=True, exist_ok=True)
            if "secret" in volume:
                for key, content in self.secrets[volume["secret"]["secretName"]].items():
                    (folder / key).unlink(missing_ok=True)
                    (folder / key).write_bytes(content)
                    (folder / key).chmod(volume["secret"]["defaultMode"])
            own = mount.get("subPathExpr", "").replace("$(POD_NAME)", name)
            mounted[mount["mountPath"]] = folder / own if own else folder
        return mounted

    def words(self, text: str, mounted: dict[str, Path]) -> str:
        text = text.replace("0.0.0.0", "127.0.0.1").replace("fairfleet-server:", "127.0.0.1:")
        for port, local_port in self.ports.items():
            text = text.replace(str(port), str(local_port))
        for path in sorted(mounted, key=len, reverse=True):
            if text.startswith(path) or f"={path}" in text:
                return text.replace(path, str(mounted[path]), 1)
        return text

    def start(self, component: str, ordinal: int) -> None:
        name = f"fairfleet-{component}-{ordinal}"
        pod = self.manifests.pod(f"fairfleet-{component}")
        variables = self.manifests.environment(f"fairfleet-{component}")
        for container in pod.get("initContainers", ()):
            mounted = self.mount(name, pod, container)
            words = [self.words(word, mounted) for word in container["args"]]
            subprocess.run([*PROGRAM, *words], check=True, capture_output=True)
        (container,) = pod["containers"]
        mounted = self.mount(name, pod, container)
        environment = os.environ | {
            key: self.words(value, mounted) for key, value in variables.items()
        }
        command = [
            "unshare",
            "--uts",
            "sh",
            "-c",
            f'hostname {name} && exec "$@"',
            "pod",
            *PROGRAM,
            *container["args"],
        ]
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            )

    def probe(self, which: str) -> int:
        (container,) = self.manifests.pod("fairfleet-server")["containers"]
        url = f"http://127.0.0.1:{self.ports[8441]}{container[which]['httpGet']['path']}"
        try:
            with urllib.request.urlopen(
                url, timeout=container[which].get("timeoutSeconds", 1)
            ) as answer:
                return int(answer.status)
        except OSError:
            return 0

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    try:
        yield node
    finally:
        node.end()


@pytest.mark.slow
def test_production_pods_train_together_each_with_its_own_certificate(
    node: Node, tmp_path: Path
) -> None:
    node.start("server", 0)
    for which in ("startupProbe", "livenessProbe", "readinessProbe"):
        until(lambda which=which: node.probe(which) == 200, f"the {which}")  # type: ignore[misc]
    for ordinal in range(3):
        node.start("client", ordinal)
    fleet = Fleet(tmp_path)  # It only reads the state directory.
    fleet.state = tmp_path / "fairfleet-server-0" / "state" / "federation"

    def took_part() -> set[Any]:
        return {c["client"] for record in fleet.records() for c in record["contributions"]}

    until(lambda: fleet.version() >= 3 and len(took_part()) == 3, "three clients and rounds")
    assert took_part() == {f"fairfleet-client-{ordinal}" for ordinal in range(3)}
    log = (tmp_path / "fairfleet-server-0.log").read_text()
    assert "INSECURE" not in log
    # The overlay sets JSON logs.
    assert all(line.startswith("{") for line in log.splitlines() if "severity" in line)
