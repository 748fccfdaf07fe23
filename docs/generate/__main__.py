"""Write or check the generated reference pages."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from docs.generate.api import api_page
from docs.generate.commands import commands_page
from docs.generate.errors import errors_page
from docs.generate.settings import settings_page
from fairfleet.client.settings import ClientSettings
from fairfleet.server.settings import ServerSettings

FOLDER = Path(__file__).resolve().parents[1] / "reference"


def pages() -> dict[str, str]:
    """Return the text of every generated page, by file name."""
    return {
        "server-settings.md": settings_page(ServerSettings, "server"),
        "client-settings.md": settings_page(ClientSettings, "client"),
        "commands.md": commands_page(),
        "errors.md": errors_page(),
        "python-api.md": api_page(),
    }


def main() -> int:
    """Write the pages, or name those that are not up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1")
    check = parser.parse_args().check
    stale = [name for name, text in pages().items() if _current(FOLDER / name) != text]
    for name in stale:
        if check:
            print(f"docs/reference/{name} is not up to date: run `make reference`", file=sys.stderr)
        else:
            (FOLDER / name).write_text(pages()[name], encoding="utf-8")
            print(f"wrote docs/reference/{name}")
    return 1 if stale and check else 0


def _current(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
