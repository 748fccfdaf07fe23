"""The content of the images."""

from __future__ import annotations

import signal
import tomllib
from pathlib import Path

import pytest

from tests.containers.engine import ROOT, Engine, base_image
from tests.containers.images import IMAGES, VERSION, build_images
from tests.support.fleet import until

pytestmark = pytest.mark.containers
LARGEST_MB = {"server": 570, "client-lite": 375, "client": 1300}
ALONE = (
    "--rm",
    "--network",
    "none",
    "--read-only",
    "--cap-drop",
    "ALL",
    "--security-opt",
    "no-new-privileges",
)


def name(image: str, version: str = VERSION) -> str:
    return f"fairfleet-{image}:{version}"


def inside(docker: Engine, image: str, *command: str) -> str:
    entry, *rest = command
    return docker.run("run", *ALONE, "--entrypoint", entry, name(image), *rest)


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_an_unprivileged_user_and_no_compiler(docker: Engine, image: str) -> None:
    assert inside(docker, image, "id", "-u") == "10001"
    look = (
        "for tool in gcc cc g++ make git curl; do command -v $tool; done; "
        "test ! -e /opt/fairfleet/bin/pip"
    )
    assert inside(docker, image, "sh", "-c", look) == ""


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_contains_no_build_files(docker: Engine, image: str) -> None:
    places = "/src /wanted /wheel /wheels /mnt/* /run/secrets/* /etc/pip.conf /root/.cache"
    look = f"for left in {places}; do test ! -e $left || echo $left; done"
    assert inside(docker, image, "sh", "-c", look) == ""


@pytest.mark.parametrize("image", IMAGES)
def test_the_size_of_an_image_is_bounded(docker: Engine, image: str) -> None:
    megabytes = docker.inspect(name(image))["Size"] / 1e6
    print(f"{name(image)}: {megabytes:.0f} MB")
    assert megabytes < LARGEST_MB[image]


def test_torch_is_in_the_torch_image_only_and_works(docker: Engine) -> None:
    for image in ("server", "client-lite"):
        output = inside(
            docker, image, "python", "-c", "import importlib.util as u; print(u.find_spec('torch'))"
        )
        assert output == "None"
    task = ("--task", "fairfleet.lab.digits:torch_mlp", "-o", "shard=9", "-o", "data=/opt/digits")
    said = docker.run(
        "run", *ALONE, "--tmpfs", "/tmp", name("client"), "init", *task, "--output", "/tmp/mlp"
    )
    assert "2,410 parameters" in said


def test_a_mounted_task_is_found(docker: Engine) -> None:
    mount = ("--volume", f"{ROOT / 'tests' / 'support'}:/tasks:ro", "--network", "none", "--rm")
    said = docker.run(
        "run", *mount, name("client-lite"), "init", "--task", "tasks:shift", "--output", "/model/m"
    )
    assert "1,003 parameters" in said


def test_a_server_without_a_model_says_what_to_do(docker: Engine) -> None:
    done = docker.attempt(
        "run", "--rm", "--network", "none", "--env", "FAIRFLEET_INSECURE=true", name("server")
    )
    assert done.returncode == 2
    assert "fairfleet init" in done.stderr


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_descriptive_labels(docker: Engine, image: str) -> None:
    said = docker.inspect(name(image))["Config"]["Labels"]
    prefix = "org.opencontainers.image."
    assert said[f"{prefix}title"] == (
        "FairFleet server" if image == "server" else "FairFleet client"
    )
    assert said[f"{prefix}version"] == VERSION
    assert said[f"{prefix}licenses"] == "Apache-2.0"
    assert {f"{prefix}revision", f"{prefix}source", f"{prefix}description"} <= set(said)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert inside(docker, image, "fairfleet", "--version") == f"fairfleet {declared}"


def test_the_first_process_forwards_signals_and_reaps_orphans(docker: Engine) -> None:
    """Python as process 1 would ignore SIGTERM before it has a handler, and keep zombies."""
    orphan = (
        "import os, time\nif os.fork() == 0:\n    os.fork() or os._exit(0)\n"
        "    time.sleep(0.2)\n    os._exit(0)\n"
    )
    sleep = orphan + "os.wait()\nprint('waiting', flush=True)\ntime.sleep(600)"
    words = (
        "--detach",
        "--network",
        "none",
        "--read-only",
        "--entrypoint",
        "dumb-init",
        name("client-lite"),
    )
    container = docker.run("run", *words, "--single-child", "--", "python", "-c", sleep)
    try:
        until(lambda: "waiting" in docker.run("logs", container), "the program to run")

        def processes() -> list[str]:
            return docker.run("exec", container, "sh", "-c", "cat /proc/[0-9]*/stat").splitlines()

        until(
            lambda: not any(") Z " in line for line in processes()), "the orphans to be buried", 10
        )
        docker.run("stop", "-t", "60", container)
        assert docker.inspect(container)["State"]["ExitCode"] == 128 + signal.SIGTERM
    finally:
        docker.run("rm", "--force", container)


@pytest.mark.parametrize("image", ["server", "client-lite"])
def test_a_change_of_code_keeps_the_layers_of_dependencies(docker: Engine, image: str) -> None:
    """Images with other code differ in the last layer only."""

    def layers(version: str) -> list[str]:
        layer_ids: list[str] = docker.inspect(name(image, version))["RootFS"]["Layers"]
        return layer_ids

    def change(folder: Path) -> None:
        with (folder / "common/fairfleet/common/cli/main.py").open("a") as file:
            file.write("# changed\n")
        with (folder / "constraints.txt").open("a") as file:
            file.write("colorama==0.4.6\n")  # a file of a tool that no image has

    build_images(docker, base_image(docker), images=[image], version="changed", change=change)
    before, after = layers(VERSION), layers("changed")
    assert before[:-1] == after[:-1]
    assert before[-1] != after[-1]
