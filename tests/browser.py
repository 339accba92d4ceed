"""Headless Chromium for tests of pages: the one that the machine has, never a download.

tests/conftest.py takes the fixture, once for all: a process can drive one browser. Pages are files;
none may ask the network.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HEIGHT = 900
HANG_MS = 300_000  # ends what hangs; a busy machine takes a minute for a page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, started once for each file of tests; skipped where it can't be.

    It ends with the file: it is a child of this process, and its driver keeps an event loop.
    """
    reason = "no Playwright here: run python3 scripts/extras.py browser"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium here: no page is opened (on Debian: apt install chromium)")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, timeout=HANG_MS)
        yield chromium
        chromium.close()


@dataclass
class Opened:
    """An open page, and ``trouble``: what the console said, what failed, what left the machine."""

    page: Any
    trouble: list[str] = field(default_factory=list)

    def listen(self) -> None:
        """Note all trouble from now on."""
        self.page.on("console", lambda said: self.trouble.append(f"console: {said.text}"))
        self.page.on("pageerror", lambda error: self.trouble.append(f"error: {error}"))
        self.page.on("requestfailed", lambda asked: self.trouble.append(f"failed: {asked.url}"))
        self.page.on("request", self._asked)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            self.trouble.append(f"network: {request.url}")

    def too_wide(self) -> list[str]:
        """The elements that stick out of the window at the right, if the page scrolls sideways."""
        return self.page.evaluate(
            """() => {
                const page = document.documentElement
                if (page.scrollWidth <= page.clientWidth) return []
                return [...document.body.querySelectorAll("*")]
                    .filter(e => e.getBoundingClientRect().right > page.clientWidth + 1)
                    .map(e => e.outerHTML.slice(0, 100))
            }"""
        )


@contextmanager
def opened(
    browser: Any, url: str, *, width: int = 1440, dark: bool = False, scripts: bool = True
) -> Iterator[Opened]:
    """The page at ``url`` in a window of its own, ``width`` pixels wide, once it has loaded."""
    context = browser.new_context(
        viewport={"width": width, "height": HEIGHT},
        color_scheme="dark" if dark else "light",
        java_script_enabled=scripts,
        reduced_motion="reduce",
    )
    context.set_default_timeout(HANG_MS)
    try:
        found = Opened(context.new_page())
        found.listen()
        found.page.goto(url)
        yield found
    finally:
        context.close()
