"""Print what the project needs with the given extras, one requirement a line.

    python docker/requirements.py server torch

An image installs these in a layer of their own, below the layer with the project's code.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any


def requirements(project: dict[str, Any], extras: list[str]) -> list[str]:
    """Return the requirements of a project's metadata with these extras, sorted.

    An extra may name others of the same project, as in `fairfleet[server]`: their requirements
    take its place.
    """
    optional = project["optional-dependencies"]
    collected = set(project["dependencies"])
    for extra in extras:
        for requirement in optional[extra]:
            nested = re.fullmatch(rf"{project['name']}\[(.*)\]", requirement)
            collected |= (
                set(requirements(project, nested[1].split(","))) if nested else {requirement}
            )
    return sorted(collected)


if __name__ == "__main__":
    metadata = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    print("\n".join(requirements(metadata, sys.argv[1:])))
