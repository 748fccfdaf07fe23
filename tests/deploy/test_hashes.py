"""The images' dependencies are pinned with hashes, at the versions of constraints.txt."""

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
    """Return the script docker/hashes.py as a module."""
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
def test_a_layer_has_all_dependencies_at_the_constrained_versions(
    hashes: ModuleType, layer: str
) -> None:
    """If this fails after a change of pyproject.toml or constraints.txt: run docker/hashes.py."""
    assert set(hashes.layers()) == set(LAYERS)
    versions = hashes.pins()
    assert pinned(layer) == {
        name: versions[name] for name in hashes.closure(hashes.layers()[layer])
    }


@pytest.mark.parametrize("layer", LAYERS)
def test_every_line_has_a_hash_and_no_index(layer: str) -> None:
    text = (FOLDER / f"requirements-{layer}.txt").read_text()
    lines = [words for words in text.replace("\\\n", "").splitlines() if not words.startswith("#")]
    for words in lines:
        assert re.fullmatch(r"[a-z0-9-]+==\S+( +--hash=sha256:[0-9a-f]{64})+", words), words
    assert "://" not in text
    assert "index" not in text


def test_image_builds_require_hashes_except_for_pytorch_from_its_index() -> None:
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip --python \S+ install [^&;\n]*", text)
    from_index = [words for words in installs if "--no-index" not in words]
    unchecked = [words for words in from_index if "--require-hashes" not in words]
    assert len(from_index) == 8
    assert len(unchecked) == 2
    assert all(words.split()[-2:] == ["-r", "/tmp/torch.txt"] for words in unchecked)
    assert "--hash=sha256:$TORCH_SHA256" in text
    assert not re.search(r"pip wheel|pip install", text), (
        "each goes into the environment, and with hashes"
    )
    for layer in LAYERS:
        assert f"source=docker/requirements-{layer}.txt" in text


def test_images_pin_pytorch_like_the_constraints_on_every_platform(hashes: ModuleType) -> None:
    """If this fails after a change of constraints.txt: run docker/hashes.py."""
    assert (FOLDER / "torch.txt").read_text() == hashes.torch_pins()
    pins = [
        Requirement(line) for line in hashes.torch_pins().splitlines() if not line.startswith("#")
    ]

    def version(machine: str) -> list[str]:
        return [
            str(pin.specifier)
            for pin in pins
            if pin.marker and pin.marker.evaluate({"platform_machine": machine})
        ]

    assert version("x86_64") == version("arm64") == ["==2.13.0"]
    assert version("aarch64") == ["==2.8.0"], "newer ones there need the libraries of CUDA"


def test_the_layer_before_pytorch_has_its_dependencies(hashes: ModuleType) -> None:
    """The libraries of its CUDA builds are not included; the CPU build does not need them."""
    needs = [Requirement(text) for text in requires("torch") or []]
    usual = {
        canonicalize_name(need.name)
        for need in needs
        if need.marker is None or need.marker.evaluate({"extra": ""})
    }
    libraries = {name for name in usual if name.startswith(("nvidia-", "cuda-", "triton"))}
    assert usual - libraries <= set(hashes.TORCH_NEEDS)
