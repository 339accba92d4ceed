"""Pages of the site in a browser: phone, tablet and desktop width, light and dark, by keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Opened, opened

WIDTHS = (390, 820, 1440)
# one of each kind; the longest and widest of its kind where there are several
KINDS = (
    "index",
    "exercises",
    "phase3_multi_node/guidelines",
    "phase3_multi_node/3.10",
    "phase1_data_parallel/1.1",
    "docs/glossary",
    "pictures",
    "notebooks/phase1_data_parallel",
    "reference/given",
    "reference/commands",
    "benchmarks/README",
    "docs/scaling",
    "docs/pytorch_scenarios",
    "search",
    "docs/start",
    "labs",
    "phase3_multi_node/labs",
)
AUDITED = (
    "docs/start",
    "phase1_data_parallel/1.1",
    "notebooks/phase1_data_parallel",
    "pictures",
    "search",
)
SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def audit(browser: Any) -> Any:
    """``audit(page)``: what axe finds that hinders people."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()

    def run(page: Any, **options: Any) -> list[str]:
        found = axe.run(page, options=options or None).response["violations"]
        return [
            f"{each['id']}: {node['html'][:120]} {node['failureSummary'][:200]}"
            for each in found
            if each["impact"] in SERIOUS
            for node in each["nodes"]
        ]

    return run


@pytest.fixture
def show(browser: Any, site: Path) -> Iterator[Any]:
    """``show(name)``: the page in a window as wide as a phone's."""
    with opened(browser, "about:blank", width=WIDTHS[0]) as window:

        def go(name: str) -> Opened:
            window.page.goto((site / f"{name}.html").as_uri())
            return window

        yield go


def test_no_page_complains_or_scrolls_sideways(show: Any) -> None:
    for name in KINDS:
        window = show(name)
        for width in WIDTHS:
            window.page.set_viewport_size({"width": width, "height": 900})
            assert window.too_wide() == [], f"{name} in {width} pixels"
        assert window.trouble == [], name


def test_no_page_hinders_people(show: Any, audit: Any) -> None:
    """By all of axe's rules in light, and by those on colours in dark."""
    for name in AUDITED:
        window = show(name)
        window.page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
        assert audit(window.page) == [], name
        window.page.emulate_media(color_scheme="dark")
        colours = audit(window.page, runOnly=["color-contrast"])
        assert colours == [], f"{name} in the dark"
        window.page.emulate_media(color_scheme="light")


def test_search_finds_without_a_server(show: Any) -> None:
    window = show("index")
    window.page.set_viewport_size({"width": 1440, "height": 900})
    window.page.fill("input.sidebar-search", "bubble")
    window.page.keyboard.press("Enter")
    found = window.page.locator("#search-results a")
    found.first.wait_for()
    assert "phase2_advanced" in " ".join(each.get_attribute("href") for each in found.all())
    assert window.trouble == []


def test_solution_shows_after_a_key(show: Any) -> None:
    window = show("phase1_data_parallel/1.1")
    folded = window.page.locator("details", has_text="Show the solution")
    code = folded.locator("pre")
    assert not code.is_visible()
    folded.locator("summary").focus()
    window.page.keyboard.press("Enter")
    assert code.is_visible()


def test_reader_chooses_dark(show: Any) -> None:
    """The choice holds against the system's, for pictures as well."""
    window = show("pictures")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = window.page.evaluate(colour)
    for _ in range(3):
        window.page.locator(".theme-toggle:visible").first.click()
        if window.page.evaluate("document.body.dataset.theme") == "dark":
            break
    assert window.page.evaluate(colour) != light
    assert (
        window.page.evaluate("getComputedStyle(document.querySelector('img')).colorScheme")
        == "dark"
    )


def test_pages_read_without_scripts(browser: Any, site: Path) -> None:
    with opened(browser, (site / "index.html").as_uri(), scripts=False) as window:
        assert window.page.get_by_role("heading", level=1).is_visible()
        assert window.page.locator(".sidebar-tree a").count() > 10
        assert window.trouble == []
