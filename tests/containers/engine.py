"""A Docker engine for tests: the machine's own if it answers, else one in a folder of its own.

`NoEngine` says why no engine can run. What is slow to build (base image, layers, plugins) is cached
between runs.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.fleet import until
from tests.support.paths import ROOT

BASE = "python:3.11-slim"
OWN_BASE = "fairfleet-test-base"
DEBIAN = "bookworm"  # whose Python is 3.11
PACKAGES = "python3,python3-pip,python3-venv,ca-certificates"
FORGET = 'rm -rf "$1"/etc/apt/sources.list* "$1"/etc/resolv.conf'  # package sources


class NoEngine(Exception):
    """Raised with the reason why no container can run on this machine."""


class Engine:
    def __init__(self, environment: Mapping[str, str], own: bool) -> None:
        self.own = own  # started by us
        self._environment = {**os.environ, "DOCKER_BUILDKIT": "1", **environment}

    def run(self, *words: str, seconds: float = 120, **more: str) -> str:
        """Run `docker <words>` with these variables in its environment; return its output."""
        done = self.attempt(*words, seconds=seconds, **more)
        assert done.returncode == 0, (
            f"docker {' '.join(words)}: {done.stdout[-3000:]}{done.stderr[-6000:]}"
        )
        return done.stdout.strip()

    def attempt(
        self, *words: str, seconds: float = 120, **more: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["docker", *words],
            cwd=ROOT,
            env=self._environment | more,
            text=True,
            capture_output=True,
            timeout=seconds,
            check=False,
        )

    def make(self, folder: Path, *words: str) -> None:
        """Run `make <words>` in a folder, for targets that call docker."""
        command = ["make", "--directory", str(folder), *words]
        done = subprocess.run(
            command,
            env=self._environment,
            text=True,
            capture_output=True,
            timeout=1500,
            check=False,
        )
        assert done.returncode == 0, (
            f"{' '.join(words)}: {done.stdout[-3000:]}{done.stderr[-6000:]}"
        )

    def inspect(self, *words: str) -> Any:
        return json.loads(self.run("inspect", *words))[0]

    def answers(self) -> bool:
        return self.attempt("info", seconds=20).returncode == 0


@contextmanager
def engine() -> Iterator[Engine]:
    if not shutil.which("docker"):
        raise NoEngine("docker is not installed: scripts/install-test-packages")
    docker = Engine({}, own=False)
    if docker.answers():
        if (
            docker.attempt("compose", "version").returncode
            or docker.attempt("buildx", "version").returncode
        ):
            raise NoEngine("the Docker engine here has no compose v2 or no buildx")
        yield docker
    else:
        with _cache() as cache, _own_engine(cache) as started:
            yield started


@contextmanager
def _own_engine(cache: Path) -> Iterator[Engine]:
    if not shutil.which("dockerd"):
        raise NoEngine(
            "no Docker engine answers and dockerd is not installed: scripts/install-test-packages"
        )
    if os.getuid() != 0:
        raise NoEngine("no Docker engine answers, and only root can start one")
    config = cache / "config"
    install = [ROOT / "scripts/install-docker-plugins", config]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoEngine(f"compose and buildx cannot be had: {done.stderr[-300:]}")
    with tempfile.TemporaryDirectory(prefix="ff-") as folder:  # a socket's path must be short
        socket = f"unix://{folder}/docker.sock"
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    "dockerd",
                    "--host",
                    socket,
                    "--data-root",
                    cache / "data",
                    "--exec-root",
                    f"{folder}/exec",
                    "--pidfile",
                    f"{folder}/pid",
                    "--bridge",
                    "none",
                ],
                stdout=log,
                stderr=log,
            )
        started = Engine({"DOCKER_HOST": socket, "DOCKER_CONFIG": str(config)}, own=True)
        try:
            until(lambda: started.answers() or process.poll() is not None, "the Docker engine")
            if process.poll() is not None:
                raise NoEngine(
                    f"dockerd does not run here: {(Path(folder) / 'log').read_text()[-500:]}"
                )
            yield started
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def _cache() -> Iterator[Path]:
    """Hold the cache between runs, for one run at a time."""
    folder = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve()
        / "fairfleet-containers"
    )
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def base_image(engine: Engine) -> str:
    """Return the image to build on.

    An engine of our own has none, and perhaps no registry, so the image is made from packages.
    """
    for name in (BASE, OWN_BASE):
        if engine.attempt("image", "inspect", name).returncode == 0:
            return name
    if not engine.own:
        return BASE  # the build pulls the image
    if not shutil.which("mmdebstrap"):
        raise NoEngine("mmdebstrap is not installed: scripts/install-test-packages")
    with tempfile.TemporaryDirectory(prefix="ff-") as folder:
        tar = Path(folder) / "base.tar"
        make_base(tar, "--variant=minbase", f"--include={PACKAGES}", f"--customize-hook={FORGET}")
        engine.run("import", str(tar), OWN_BASE, seconds=300)
    return OWN_BASE


def make_base(tar: Path, *options: str) -> None:
    """Make the base image with mmdebstrap, from the archive that apt uses.

    Manuals and translations are left out.
    """
    ask = ["apt-get", "indextargets", "--format", "$(SITE)"]
    sites = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()
    archive = next(site for site in sites if "security" not in site)
    excluded = [
        f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("doc", "man", "locale")
    ]
    subprocess.run(
        ["mmdebstrap", "--quiet", *excluded, *options, DEBIAN, tar, archive],
        check=True,
        timeout=900,
    )
