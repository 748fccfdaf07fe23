"""The images' dependencies are pinned with hashes, and these pins are those of constraints.txt."""

from __future__ import annotations

import re
import sys
from importlib.metadata import requires
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.settings import ROOT

FOLDER = ROOT / "docker"
LAYERS = ("build", "core", "image", "lab", "server", "torch")


@pytest.fixture(scope="module")
def hashes() -> ModuleType:
    """docker/hashes.py, which is a script and in no package."""
    sys.path.insert(0, str(FOLDER))
    try:
        import hashes

        return hashes
    finally:
        sys.path.remove(str(FOLDER))


def pinned(layer: str) -> dict[str, str]:
    text = (FOLDER / f"requirements-{layer}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_has_what_its_packages_need_at_the_versions_of_the_constraints(hashes: ModuleType, layer: str) -> None:
    """If this fails after a change of pyproject.toml or constraints.txt: run docker/hashes.py."""
    assert set(hashes.layers()) == set(LAYERS)
    versions = hashes.pins()
    assert pinned(layer) == {name: versions[name] for name in hashes.closure(hashes.layers()[layer])}


@pytest.mark.parametrize("layer", LAYERS)
def test_every_line_has_a_hash_and_none_says_where_it_came_from(layer: str) -> None:
    text = (FOLDER / f"requirements-{layer}.txt").read_text()
    wanted = [words for words in text.replace("\\\n", "").splitlines() if not words.startswith("#")]
    for words in wanted:
        assert re.fullmatch(r"[a-z0-9-]+==\S+( +--hash=sha256:[0-9a-f]{64})+", words), words
    assert "://" not in text
    assert "index" not in text


def test_every_installation_in_the_images_checks_hashes_but_pytorchs_without_one() -> None:
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip --python \S+ install [^&;\n]*", text)
    from_index = [words for words in installs if "--no-index" not in words]
    unchecked = [words for words in from_index if "--require-hashes" not in words]
    assert len(from_index) == 8
    assert len(unchecked) == 2
    assert all(words.split()[-2:] == ["-r", "/tmp/torch.txt"] for words in unchecked)
    assert "--hash=sha256:$TORCH_SHA256" in text
    assert not re.search(r"pip wheel|pip install", text), "each goes into the environment, and with hashes"
    for layer in LAYERS:
        assert f"source=docker/requirements-{layer}.txt" in text


def test_the_images_pytorch_is_that_of_the_constraints_on_every_machine(hashes: ModuleType) -> None:
    """If this fails after a change of constraints.txt: run docker/hashes.py."""
    assert (FOLDER / "torch.txt").read_text() == hashes.torch_pins()
    pins = [Requirement(line) for line in hashes.torch_pins().splitlines() if not line.startswith("#")]

    def version(machine: str) -> list[str]:
        return [str(pin.specifier) for pin in pins if pin.marker and pin.marker.evaluate({"platform_machine": machine})]

    assert version("x86_64") == version("arm64") == ["==2.13.0"]
    assert version("aarch64") == ["==2.8.0"], "newer ones there need the libraries of CUDA"


def test_what_pytorch_needs_is_what_the_layer_before_it_has(hashes: ModuleType) -> None:
    """Beside the libraries of its CUDA builds, which the CPU build does without."""
    needs = [Requirement(text) for text in requires("torch") or []]
    usual = {
        canonicalize_name(need.name) for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})
    }
    libraries = {name for name in usual if name.startswith(("nvidia-", "cuda-", "triton"))}
    assert usual - libraries <= set(hashes.TORCH_NEEDS)
