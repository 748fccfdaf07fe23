"""A real browser without a screen: Debian's chromium, controlled by playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
PATIENCE_MILLISECONDS = 60_000


@contextlib.contextmanager
def started_browser() -> Iterator[Browser]:
    """Start a browser, or skip the test if playwright is not installed."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        process = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield Browser(process)
        finally:
            process.close()


class Browser:
    """One browser process; each page has a context of its own."""

    def __init__(self, process: Any) -> None:
        self._process = process

    @contextlib.contextmanager
    def page(
        self, url: str, *, width: int = 1440, height: int = 1000, scheme: str = "light"
    ) -> Iterator[Page]:
        """Open the page at this address, without cookies or storage of other pages."""
        context = self._process.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        try:
            tab = context.new_page()
            tab.set_default_timeout(PATIENCE_MILLISECONDS)
            page = Page(tab)
            page.open(url)
            yield page
        finally:
            context.close()


class Page:
    """One tab, with the errors and requests that it caused."""

    def __init__(self, tab: Any) -> None:
        self.tab = tab
        self.errors: list[str] = []
        self.requests: list[str] = []
        tab.on("pageerror", lambda error: self.errors.append(str(error)))
        tab.on(
            "console", lambda line: self.errors.append(line.text) if line.type == "error" else None
        )
        tab.on("request", lambda request: self.requests.append(request.url))

    def open(self, url: str) -> None:
        """Load an address in this tab."""
        self.tab.goto(url)

    def wait(self, selector: str) -> None:
        """Wait for an element. A horizontal line has no height, so it need not be visible."""
        self.tab.locator(selector).first.wait_for(state="attached")

    def text(self, selector: str) -> str:
        """Return the text of the first match, as it is on the screen."""
        text: str = self.tab.locator(selector).first.inner_text()
        return text.strip()

    def count(self, selector: str) -> int:
        """Return the number of matching elements."""
        matches: int = self.tab.locator(selector).count()
        return matches

    def evaluate(self, function: str) -> Any:
        """Return the result of a JavaScript function."""
        return self.tab.evaluate(function)
