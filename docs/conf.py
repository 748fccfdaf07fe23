"""Sphinx settings of the documentation site: `make docs` builds it into dist/docs.

Sphinx with MyST reads the Markdown that people read in the repository. Furo is the theme: it works
offline and loads no font or script from another host. Sphinx checks every link and anchor, and
makes API pages from docstrings. Material for MkDocs is at the end of its life, and its successor
Zensical is young (0.1).
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from docs.generate.outside import PAGES, site_text, write_pages  # noqa: E402

_project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "FairFleet"
author = "the FairFleet maintainers"
copyright = author  # noqa: A001
release = version = _project["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["generate"]
nitpicky = True
# Names of the standard library and of numpy in signatures have no page here.
nitpick_ignore_regex = [("py:.*", r".*")]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
# A generated page may skip a level. The state diagram of rounds.md is drawn by the repository only.
suppress_warnings = ["myst.header", "misc.highlighting_failure"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "show-inheritance": True}

html_theme = "furo"
html_title = f"FairFleet {release}"
html_show_sourcelink = False
html_copy_source = False
html_static_path: list[str] = []
html_theme_options = {"navigation_with_keys": True}


def setup(app: Sphinx) -> None:
    """Fit links to files outside docs/ to the site."""
    write_pages(ROOT)
    app.connect("source-read", _fit_links)


def _fit_links(app: Sphinx, name: str, source: list[str]) -> None:
    if f"{name}.md" not in PAGES.values():
        source[0] = site_text(source[0], f"docs/{name}.md", f"{name}.md")
