"""What is in the images, and what is not."""

from __future__ import annotations

import signal
import tomllib
from pathlib import Path

import pytest

from tests.containers.engine import ROOT, Engine, base_image
from tests.containers.images import IMAGES, VERSION, build_images
from tests.e2e.fleet import until

pytestmark = pytest.mark.containers
LARGEST_MB = {"server": 400, "client-lite": 375, "client": 1300}
ALONE = ("--rm", "--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")


def name(image: str, version: str = VERSION) -> str:
    return f"fairfleet-{image}:{version}"


def inside(docker: Engine, image: str, *command: str) -> str:
    entry, *rest = command
    return docker.run("run", *ALONE, "--entrypoint", entry, name(image), *rest)


@pytest.mark.parametrize("image", IMAGES)
def test_nobody_in_an_image_is_root_and_it_has_no_compiler(docker: Engine, image: str) -> None:
    assert inside(docker, image, "id", "-u") == "10001"
    look = "for tool in gcc cc g++ make git curl; do command -v $tool; done; test ! -e /opt/fairfleet/bin/pip"
    assert inside(docker, image, "sh", "-c", look) == ""


@pytest.mark.parametrize("image", IMAGES)
def test_nothing_of_the_build_is_left_in_an_image(docker: Engine, image: str) -> None:
    places = "/src /wanted /wheel /wheels /mnt/* /run/secrets/* /etc/pip.conf /root/.cache"
    look = f"for left in {places}; do test ! -e $left || echo $left; done"
    assert inside(docker, image, "sh", "-c", look) == ""


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_no_larger_than_it_was(docker: Engine, image: str) -> None:
    megabytes = docker.inspect(name(image))["Size"] / 1e6
    print(f"{name(image)}: {megabytes:.0f} MB")
    assert megabytes < LARGEST_MB[image]


def test_torch_is_in_the_client_image_alone_and_works_there(docker: Engine) -> None:
    for image in ("server", "client-lite"):
        found = inside(docker, image, "python", "-c", "import importlib.util as u; print(u.find_spec('torch'))")
        assert found == "None"
    task = ("--task", "fairfleet.lab.digits:torch_mlp", "-o", "shard=9", "-o", "data=/opt/digits")
    said = docker.run("run", *ALONE, "--tmpfs", "/tmp", name("client"), "init", *task, "--output", "/tmp/mlp")
    assert "2,410 parameters" in said


def test_a_task_of_ones_own_is_found_where_it_is_mounted(docker: Engine) -> None:
    mount = ("--volume", f"{ROOT / 'tests' / 'e2e'}:/tasks:ro", "--network", "none", "--rm")
    said = docker.run("run", *mount, name("client-lite"), "init", "--task", "tasks:shift", "--output", "/model/m")
    assert "1,003 parameters" in said


def test_a_server_without_a_model_says_what_to_do(docker: Engine) -> None:
    done = docker.attempt("run", "--rm", "--network", "none", "--env", "FAIRFLEET_INSECURE=true", name("server"))
    assert done.returncode == 2
    assert "fairfleet init" in done.stderr


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_says_what_it_is(docker: Engine, image: str) -> None:
    said = docker.inspect(name(image))["Config"]["Labels"]
    prefix = "org.opencontainers.image."
    assert said[f"{prefix}title"] == ("FairFleet server" if image == "server" else "FairFleet client")
    assert said[f"{prefix}version"] == VERSION
    assert said[f"{prefix}licenses"] == "Apache-2.0"
    assert {f"{prefix}revision", f"{prefix}source", f"{prefix}description"} <= set(said)
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert inside(docker, image, "fairfleet", "--version") == f"fairfleet {told}"


def test_the_first_process_passes_signals_on_at_once_and_buries_orphans(docker: Engine) -> None:
    """A Python that is process 1 would not hear SIGTERM before it has a handler, and would keep dead processes."""
    orphan = "import os, time\nif os.fork() == 0:\n    os.fork() or os._exit(0)\n    time.sleep(0.2)\n    os._exit(0)\n"
    sleep = orphan + "os.wait()\nprint('waiting', flush=True)\ntime.sleep(600)"
    words = ("--detach", "--network", "none", "--read-only", "--entrypoint", "dumb-init", name("client-lite"))
    container = docker.run("run", *words, "--single-child", "--", "python", "-c", sleep)
    try:
        until(lambda: "waiting" in docker.run("logs", container), "the program to run")

        def processes() -> list[str]:
            return docker.run("exec", container, "sh", "-c", "cat /proc/[0-9]*/stat").splitlines()

        until(lambda: not any(") Z " in line for line in processes()), "the orphans to be buried", 10)
        docker.run("stop", "-t", "60", container)
        assert docker.inspect(container)["State"]["ExitCode"] == 128 + signal.SIGTERM
    finally:
        docker.run("rm", "--force", container)


@pytest.mark.parametrize("image", ["server", "client-lite"])
def test_a_change_of_code_leaves_the_dependencies_alone(docker: Engine, image: str) -> None:
    """The layers of an image with other code are the same but for the last one."""

    def layers(version: str) -> list[str]:
        found: list[str] = docker.inspect(name(image, version))["RootFS"]["Layers"]
        return found

    def change(folder: Path) -> None:
        with (folder / "common/fairfleet/common/cli.py").open("a") as file:
            file.write("# changed\n")
        with (folder / "constraints.txt").open("a") as file:
            file.write("colorama==0.4.6\n")  # of a tool that no image has

    build_images(docker, base_image(docker), images=[image], version="changed", change=change)
    before, after = layers(VERSION), layers("changed")
    assert before[:-1] == after[:-1]
    assert before[-1] != after[-1]
