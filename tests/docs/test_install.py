"""README, docs and CONTRIBUTING say the same about the installation."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.support.paths import ROOT

README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
INSTALL = ROOT / "docs" / "how-to" / "install.md"
EDGE = INSTALL.with_name("edge.md")
PAGES = sorted([README, CONTRIBUTING, *(ROOT / "docs").rglob("*.md")])
DEVELOPMENT = {"dev", "dev-lite"}


def words(page: Path) -> str:
    """Return the text of a page with single spaces, so that line breaks do not matter."""
    return " ".join(page.read_text(encoding="utf-8").split())


def section(page: Path, heading: str) -> str:
    text = page.read_text(encoding="utf-8")
    return text.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def test_the_readme_names_the_same_commands_and_sizes_as_the_page() -> None:
    page = INSTALL.read_text(encoding="utf-8")
    lines = section(README, "Install").splitlines()
    facts = [line for line in lines if re.match(r"pip install|make |\| ", line)]
    assert len(facts) > 10
    assert [line for line in facts if line not in page] == []


@pytest.mark.parametrize("size", ["5.8 GB", "2.0 GB", "1.1 GB"])
def test_sizes_are_the_same_everywhere(size: str) -> None:
    for page in (README, CONTRIBUTING, INSTALL):
        assert size in words(page), page.name


@pytest.mark.parametrize("page", [README, INSTALL, EDGE], ids=lambda page: page.name)
def test_pages_about_installing_say_that_no_public_index_has_fairfleet(page: Path) -> None:
    assert "FairFleet is not on a public package index" in words(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_takes_fairfleet_from_an_index(page: Path) -> None:
    """`python -m pip install 'fairfleet[extra]'` adds an extra to what is installed."""
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"(?<!-m )pip install (?:-\S+ )*['\"]?fairfleet\b(?!-\d)", text)


def test_the_page_has_every_extra_for_users() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"]) - DEVELOPMENT
    page = INSTALL.read_text(encoding="utf-8")
    assert {extra for extra in extras if f"| `{extra}` |" not in page} == set()
