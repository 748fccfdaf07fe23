"""Links of the documentation to files of the repository outside docs/.

On the site, some of these files are pages of their own (`PAGES`). A link to any other file becomes
its text, since the site has no copy of the sources. In the repository all links work as written.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

# Files that the site shows as pages, by path in the repository.
PAGES = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security-policy.md",
    "proto/ATTACKS.md": "project/decoder-attacks.md",
    "proto/CLIENT.md": "project/writing-a-client.md",
    "proto/FEATURES.md": "project/features.md",
    "proto/FORMAT.md": "project/wire-format.md",
}
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\[]*)\]\((?P<target>[^)\s]+)\)")


def site_text(text: str, source: str, page: str) -> str:
    """Return a Markdown text with its links fitted to the site.

    `source` is the text's own path in the repository, `page` its path below docs/.
    """

    def fitted(link: re.Match[str]) -> str:
        target, _, anchor = link["target"].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        inside = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else "")
        if not inside:
            return link["text"]
        relative = posixpath.relpath(inside, posixpath.dirname(page) or ".")
        return f"[{link['text']}]({relative}{'#' + anchor if anchor else ''})"

    return LINK.sub(fitted, text)


def write_pages(root: Path) -> None:
    """Write the pages of files outside docs/ into docs/project, which Git ignores."""
    for source, page in PAGES.items():
        file = root / source
        if file.exists():
            target = root / "docs" / page
            target.parent.mkdir(exist_ok=True)
            text = site_text(file.read_text(encoding="utf-8"), source, page)
            if not target.exists() or target.read_text(encoding="utf-8") != text:
                target.write_text(text, encoding="utf-8")
