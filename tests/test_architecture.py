"""docs/explanation/architecture.md names files that exist, and draws the packages correctly.

Its diagram has the layers that import-linter enforces. Paths and links of all other pages are
checked in the same way.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from itertools import zip_longest

import pytest

from tests.support.paths import ROOT

PAGE = "docs/explanation/architecture.md"
PAGES = (
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    ".github/PULL_REQUEST_TEMPLATE.md",
    "docs/project/evidence.md",  # Sphinx writes the other pages of its folder.
    *sorted(
        str(page.relative_to(ROOT))
        for page in (ROOT / "docs").rglob("*.md")
        if page.parent.name != "project"
    ),
)
PARTS = ("proto", "common", "server", "client", "lab")
FOLDERS = (*PARTS, "tests", "docs", "docker", "deploy", "k8s", "scripts", "benchmarks")
BEGIN, END = "<!-- diagram: begin -->\n```text\n", "```\n<!-- diagram: end -->"
GAP = 4  # columns between the stacks of the diagram


def contracts() -> dict[str, list[str]]:
    """Return the layers of each contract in pyproject.toml by its name, highest layer first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    linter = project["tool"]["importlinter"]
    return {contract["name"]: contract["layers"] for contract in linter["contracts"]}


def side_by_side(*names: str) -> list[str]:
    """Return the layers of these contracts as columns of text, each under its underlined name."""
    stacks = [[name, "-" * len(name), *contracts()[name]] for name in names]
    widths = [max(map(len, stack)) + GAP for stack in stacks]

    def row(cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return "".join(padded).rstrip()

    return [row(cells) for cells in zip_longest(*stacks, fillvalue="")]


def diagram() -> str:
    """Return the text of the diagram: the parts first, then the packages of each part."""
    parts = [layer.replace("fairfleet.", "") for layer in contracts()["parts"]]
    width = max(map(len, parts))
    blocks = [
        [layer.center(width).rstrip() for layer in parts],
        side_by_side("server", "client", "lab"),
        side_by_side("common"),
    ]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def paths_in(page: str) -> set[str]:
    """Return every path in backticks that begins with a folder of the repository."""
    quoted = re.findall(r"`([\w./-]+)`", text(page))
    return {path for path in quoted if "/" in path and path.split("/")[0] in FOLDERS}


def exists(path: str) -> bool:
    """Whether a path exists as it is, or within the package of its part."""
    part, _, rest = path.partition("/")
    return (ROOT / path).exists() or (ROOT / part / "fairfleet" / part / rest).exists()


def anchors(page: str) -> set[str]:
    """Return the anchors that a page's headings get on GitHub."""
    headings = re.findall(r"^#+ (.+)$", text(page), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_the_diagram_has_the_layers_that_import_linter_enforces() -> None:
    _, _, rest = text(PAGE).partition(BEGIN)
    drawn, end, _ = rest.partition(END)
    assert end, f"{PAGE} has no diagram"
    assert drawn == diagram(), f"put this into {PAGE}:\n{diagram()}"


@pytest.mark.parametrize("page", PAGES)
def test_every_path_on_the_page_exists(page: str) -> None:
    assert [path for path in sorted(paths_in(page)) if not exists(path)] == []


def test_the_architecture_page_names_every_package_of_the_server() -> None:
    packages = re.findall(r"\w+", " ".join(contracts()["server"]))
    folders = {name for name in packages if (ROOT / "server/fairfleet/server" / name).is_dir()}
    assert {name for name in folders if f"`server/{name}/" not in text(PAGE)} == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_link_to_a_file_or_a_heading_leads_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text(page)):
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve() if path else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(str(target.relative_to(ROOT))), link
