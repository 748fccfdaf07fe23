"""Containers for arm64 on another machine: the kernel runs their programs with qemu.

`NoEmulation` says why this is impossible. The base image consists of packages that are only
unpacked, since their installation under emulation would take a quarter of an hour.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.containers.engine import FORGET, OWN_BASE, PACKAGES, Engine, NoEngine, make_base

PLATFORM = "linux/arm64"
BASE = f"{OWN_BASE}-arm64"
FORMATS = Path("/proc/sys/fs/binfmt_misc")
QEMU = Path(
    "/usr/lib/binfmt.d/qemu-aarch64.conf"
)  # how the kernel recognises a program for arm64, and what runs it
ESSENTIAL = "apt,base-files,base-passwd,bash,coreutils,dash,findutils,grep,libc-bin,passwd,sed"
# The effects of the packages' scripts that the Dockerfile needs.
SETTLE = """
for file in passwd group; do cp "$1/usr/share/base-passwd/$file.master" "$1/etc/$file"; done
cat "$1"/usr/share/ca-certificates/mozilla/*.crt > "$1/etc/ssl/certs/ca-certificates.crt"
"""


class NoEmulation(NoEngine):
    """Raised with the reason why no container for arm64 can run on this machine."""


@contextmanager
def emulation() -> Iterator[None]:
    """Enable emulation while the block runs, unless the kernel is arm64 or has it already."""
    if platform.machine() == "aarch64" or (FORMATS / "qemu-aarch64").exists():
        yield
        return
    if not QEMU.exists():
        raise NoEmulation("qemu for arm64 is not installed: scripts/install-test-packages")
    if os.getuid() != 0:
        raise NoEmulation("the kernel does not know of qemu for arm64, and only root can tell it")
    with _mounted():
        (FORMATS / "register").write_text(QEMU.read_text().strip())
        try:
            yield
        finally:
            (FORMATS / "qemu-aarch64").write_text("-1")


@contextmanager
def _mounted() -> Iterator[None]:
    if (FORMATS / "register").exists():
        yield
        return
    mount = ["mount", "-t", "binfmt_misc", "binfmt_misc", FORMATS]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoEmulation(f"this kernel cannot hand programs to qemu: {done.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", FORMATS], check=True)


def base_image(engine: Engine) -> str:
    if engine.attempt("image", "inspect", BASE).returncode == 0:
        return BASE
    if not engine.own:
        raise NoEmulation("a base image for arm64 is made for an engine of our own only")
    if not shutil.which("mmdebstrap"):
        raise NoEmulation("mmdebstrap is not installed: scripts/install-test-packages")
    with tempfile.TemporaryDirectory(prefix="ff-") as folder:
        make_base(
            Path(folder) / "base.tar",
            "--variant=extract", "--architectures=arm64", f"--include={PACKAGES},{ESSENTIAL}",
            "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr", f"--extract-hook={SETTLE}{FORGET}",
        )  # fmt: skip
        # `docker import --platform` of older engines keeps the machine's own platform.
        (Path(folder) / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
        engine.run("build", "--platform", PLATFORM, "--tag", BASE, folder, seconds=300)
    return BASE
