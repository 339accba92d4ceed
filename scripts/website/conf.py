"""Sphinx's configuration of the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from distlab.course.catalogue import load_course
from distlab.course.version import course_version
from distlab.player import page as player

project = "Distributed training from scratch"
html_title = project
author = copyright = "the authors of the course"
release = version = course_version()
language = "en"

extensions = ["myst_nb", "sphinx_copybutton"]
nb_execution_mode = "off"  # the committed outputs are shown
myst_heading_anchors = 6
myst_heading_slug_func = "mdit_py_plugins.anchors.index.slugify"  # a code host's anchors
highlight_language = "text"

html_theme = "furo"
html_static_path = ["static", *map(str, player.assets())]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_use_index = False
html_theme_options: dict[str, Any] = {"navigation_with_keys": True}
if address := load_course().address:
    link = {"name": "The course's files", "url": address, "html": "The course's files", "class": ""}
    html_theme_options["footer_icons"] = [link]
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
copybutton_exclude = ".linenos, .gp, .go"


def pictures(app: Sphinx, doctree: nodes.document) -> None:
    """Images lead to their files, which a phone can enlarge. Those that are drawn for a light page
    are marked: the dark one puts a light plate behind them."""
    for image in doctree.findall(nodes.image):
        image["scale"] = 100  # for Sphinx a reason to make it a link
        path = Path(app.srcdir, str(image["uri"]).lstrip("/"))
        if path.suffix != ".svg" or "prefers-color-scheme" not in path.read_text(encoding="utf-8"):
            image["classes"].append("plate")


def short_navigation(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """The navigation lists the exercises of the page's own phase only: all of them on every page
    take a third of the time and most of the bytes. And its captions get the level that a screen
    reader asks for."""
    whole = context["toctree"]

    def part(**options: Any) -> str:
        found = str(whole(**(options | {"collapse": True})))
        return found.replace('role="heading"', 'role="heading" aria-level="2"')

    context["toctree"] = part


def player_files(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """The script and the style of players, on the pages that have one."""
    if 'class="player"' in context.get("body", ""):
        for path in player.assets():
            (app.add_js_file if path.suffix == ".js" else app.add_css_file)(path.name)


def setup(app: Sphinx) -> dict[str, Any]:
    """What Sphinx calls first."""
    app.connect("doctree-read", pictures)
    app.connect("html-page-context", short_navigation, priority=100)  # before the theme
    app.connect("html-page-context", player_files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
