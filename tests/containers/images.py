"""Builds the three images with `make`.

It uses the package index, certificate and wheels of this machine if there are any.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.containers.engine import ROOT, Engine

IMAGES = ("server", "client-lite", "client")
VERSION = "test"  # the tag of the images
CERTIFICATE = "/run/secrets/ca.pem"  # where the Dockerfile mounts it


def build_images(
    engine: Engine,
    base: str,
    images: Iterable[str] = IMAGES,
    version: str = VERSION,
    change: Callable[[Path], None] = lambda folder: None,
    more: Iterable[str] = (),
) -> None:
    """Build from the current files, or as `change` alters them, with options for `docker build`."""
    with _context() as folder, _pip_secrets(folder.parent) as secrets:
        change(folder)
        words = ["--progress", "plain", "--build-arg", f"BASE={base}", *secrets, *more]
        if engine.own:
            words += ["--network", "host"]
        engine.make(
            folder,
            *(f"image-{image}" for image in images),
            f"VERSION={version}",
            f"BUILD={' '.join(words)}",
        )


@contextmanager
def _context() -> Iterator[Path]:
    """Return the files of the repository, and the wheels that pip would find on this machine."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    with tempfile.TemporaryDirectory(prefix="ff-build-") as temporary:
        folder = Path(temporary) / "context"
        for name in filter(None, listed.stdout.decode().split("\n")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        for wheel in _torch_wheels():
            shutil.copy(wheel, folder / "docker" / "wheels")
        yield folder


def _torch_wheels() -> list[Path]:
    folders = [Path(word) for value in _pip_settings("find-links") for word in value.split()]
    return [wheel for folder in dict.fromkeys(folders) for wheel in folder.glob("torch-*.whl")]


@contextmanager
def _pip_secrets(folder: Path) -> Iterator[list[str]]:
    """Return the build arguments for this machine's index and certificate, if it has any."""
    lines = [f"index-url = {value}" for value in _pip_settings("index-url")[:1]]
    arguments = []
    if certificates := _pip_settings("cert"):
        lines.append(f"cert = {CERTIFICATE}")
        arguments += ["--secret", f"id=ca,src={certificates[0]}"]
    if lines:
        file = folder / "pip.conf"
        file.write_text("\n".join(["[global]", *lines, ""]))
        arguments += ["--secret", f"id=pipconf,src={file}"]
    yield arguments


def _pip_settings(name: str) -> list[str]:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    return re.findall(rf"^\S+\.{name}='(.*)'$", listed.stdout, re.MULTILINE)
