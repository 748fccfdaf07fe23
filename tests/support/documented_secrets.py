"""The secrets that an operator creates according to the documentation."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.deploy.settings import ROOT
from tests.support.fleet import PROGRAM

DOCUMENT = ROOT / "docs" / "how-to" / "kubernetes.md"


def documented_secrets(folder: Path) -> dict[str, dict[str, bytes]]:
    """Run the commands of the document with a fake kubectl, and return the files of each secret."""
    block = next(
        part for part in DOCUMENT.read_text().split("```")[1::2] if "fairfleet pki init" in part
    )
    folder.mkdir()
    (folder / "fairfleet").write_text(f'#!/bin/sh\nexec {" ".join(PROGRAM)} "$@"\n')
    (folder / "kubectl").write_text('#!/bin/sh\necho kubectl "$@" >> calls\n')
    for program in ("fairfleet", "kubectl"):
        (folder / program).chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    script = block.removeprefix("sh")
    subprocess.run(
        ["bash", "-euc", script], cwd=folder, env=environment, capture_output=True, check=True
    )
    secrets: dict[str, dict[str, bytes]] = {}
    for line in (folder / "calls").read_text().splitlines():
        _, separator, arguments = line.partition("create secret generic ")
        if separator:
            name, *sources = arguments.split()
            secrets[name] = {}
            for source in sources:
                kind, _, value = source.removeprefix("--from-").partition("=")
                if kind == "literal":
                    key, _, content = value.partition("=")
                    secrets[name][key] = content.encode()
                else:
                    path = folder / value
                    files = list(path.iterdir()) if path.is_dir() else [path]
                    secrets[name] |= {file.name: file.read_bytes() for file in files}
    return secrets
