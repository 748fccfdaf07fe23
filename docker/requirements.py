"""Prints what the project needs with the given extras, so that an image's dependencies are a layer before its code.

python docker/requirements.py server torch
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any


def requirements(project: dict[str, Any], extras: list[str]) -> list[str]:
    """An extra may name others of this project, as in `fairfleet[server]`: they are put in its place."""
    optional = project["optional-dependencies"]
    found = list(project["dependencies"])
    for extra in extras:
        for requirement in optional[extra]:
            own = re.fullmatch(rf"{project['name']}\[(.*)\]", requirement)
            found += requirements(project, own[1].split(",")) if own else [requirement]
    return sorted(set(found))


if __name__ == "__main__":
    here = Path("pyproject.toml")
    print("\n".join(requirements(tomllib.loads(here.read_text(encoding="utf-8"))["project"], sys.argv[1:])))
