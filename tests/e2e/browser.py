"""A real browser, without a screen: Debian's chromium, driven by playwright."""

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
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        process = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield Browser(process)
        finally:
            process.close()


class Browser:
    def __init__(self, process: Any) -> None:
        self._process = process

    @contextlib.contextmanager
    def page(self, url: str, *, width: int = 1440, height: int = 1000, scheme: str = "light") -> Iterator[Page]:
        """The page at this address, in a browser that knows nothing of any other."""
        context = self._process.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        try:
            tab = context.new_page()
            tab.set_default_timeout(PATIENCE_MILLISECONDS)
            page = Page(tab)
            page.open(url)
            yield page
        finally:
            context.close()


class Page:
    def __init__(self, tab: Any) -> None:
        self.tab = tab
        self.errors: list[str] = []
        self.requests: list[str] = []
        tab.on("pageerror", lambda error: self.errors.append(str(error)))
        tab.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        tab.on("request", lambda request: self.requests.append(request.url))

    def open(self, url: str) -> None:
        self.tab.goto(url)

    def wait(self, selector: str) -> None:
        self.tab.locator(selector).first.wait_for(state="attached")  # a level line has no height: not "visible"

    def text(self, selector: str) -> str:
        """As it is on the screen."""
        found: str = self.tab.locator(selector).first.inner_text()
        return found.strip()

    def count(self, selector: str) -> int:
        found: int = self.tab.locator(selector).count()
        return found

    def ask(self, function: str) -> Any:
        """The answer of a JavaScript function."""
        return self.tab.evaluate(function)
