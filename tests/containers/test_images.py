"""What is in the images, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.containers.engine import ROOT, Engine, base_image
from tests.containers.images import TARGETS, build_images

pytestmark = pytest.mark.containers
LARGEST_MB = {"server": 450, "client-lite": 420, "client": 1400}


def inside(docker: Engine, target: str, *command: str) -> str:
    entry, *rest = command
    return docker.run("run", "--rm", "--network", "none", "--entrypoint", entry, f"fairfleet-{target}", *rest)


@pytest.mark.parametrize("target", TARGETS)
def test_nobody_in_an_image_is_root_and_it_has_no_compiler(docker: Engine, target: str) -> None:
    assert inside(docker, target, "id", "-u") == "10001"
    look = "for tool in gcc cc g++ make git curl; do command -v $tool; done; test ! -e /opt/fairfleet/bin/pip"
    assert inside(docker, target, "sh", "-c", look) == ""


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_of_the_build_is_left_in_an_image(docker: Engine, target: str) -> None:
    places = "/src /wanted /wheel /wheels /mnt/* /run/secrets/* /etc/pip.conf /root/.cache"
    look = f"for left in {places}; do test ! -e $left || echo $left; done"
    assert inside(docker, target, "sh", "-c", look) == ""


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_no_larger_than_it_was(docker: Engine, target: str) -> None:
    megabytes = docker.inspect(f"fairfleet-{target}")["Size"] / 1e6
    print(f"fairfleet-{target}: {megabytes:.0f} MB")
    assert megabytes < LARGEST_MB[target]


def test_torch_is_in_the_client_image_alone_and_works_there(docker: Engine) -> None:
    for target in ("server", "client-lite"):
        found = inside(docker, target, "python", "-c", "import importlib.util as u; print(u.find_spec('torch'))")
        assert found == "None"
    task = ("--task", "fairfleet.lab.digits:torch_mlp", "-o", "shard=9", "-o", "data=/opt/digits")
    said = inside(docker, "client", "fairfleet", "init", *task, "--output", "/model/mlp.safetensors")
    assert "2,410 parameters" in said


def test_a_task_of_ones_own_is_found_where_it_is_mounted(docker: Engine) -> None:
    mount = ("--volume", f"{ROOT / 'tests' / 'e2e'}:/tasks:ro", "--network", "none", "--rm")
    said = docker.run("run", *mount, "fairfleet-client-lite", "init", "--task", "tasks:shift", "--output", "/model/m")
    assert "1,003 parameters" in said


def test_a_server_without_a_model_says_what_to_do(docker: Engine) -> None:
    done = docker.attempt("run", "--rm", "--network", "none", "--env", "FAIRFLEET_INSECURE=true", "fairfleet-server")
    assert done.returncode == 2
    assert "fairfleet init" in done.stderr


def test_a_change_of_code_leaves_the_dependencies_alone(docker: Engine, tmp_path: Path) -> None:
    """The layers of an image with other code are the same but for the last one."""

    def layers(name: str) -> list[str]:
        found: list[str] = docker.inspect(name)["RootFS"]["Layers"]
        return found

    def change(folder: Path) -> None:
        with (folder / "server/fairfleet/server/serve.py").open("a") as file:
            file.write("# changed\n")

    build_images(docker, base_image(docker), targets=["server"], suffix="-changed", change=change)
    before, after = layers("fairfleet-server"), layers("fairfleet-server-changed")
    assert before[:-1] == after[:-1]
    assert before[-1] != after[-1]
