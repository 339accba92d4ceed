"""What the pages of a built site refer to, and what is wrong with it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"src", "srcset", "poster", "data"}  # attributes whose target a page loads
LOADING = {"stylesheet", "preload", "modulepreload", "icon", "manifest"}  # links that do
ELSEWHERE = re.compile(r"^(https?:)?//")
IN_STYLE = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')]+)""")
# a script's way to the network, with a whole address in it
IN_SCRIPT = re.compile(r"""["'`](https?://(?!www\.w3\.org/)[^"'`]+)["'`]""")


@dataclass
class Page(HTMLParser):
    """The identifiers of a page, where its links lead, and what it loads."""

    path: Path
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._style = False
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element says."""
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and LOADING & {*given.get("rel", "").split()}:
            self.loads.append(given["href"])
        self.loads += [given[name] for name in LOADED & {*given}]
        self.loads += IN_STYLE.findall(given.get("style", ""))
        self._style = tag == "style"

    def handle_data(self, data: str) -> None:
        """Note what a page's own style loads."""
        if self._style:
            self.loads += IN_STYLE.findall(data)


def problems(folder: Path) -> list[str]:
    """Links and anchors that lead nowhere, and what would be loaded from elsewhere."""
    pages = {path.resolve(): Page(path) for path in sorted(folder.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder.resolve()).as_posix()
        found += [f"{name} loads {each}" for each in page.loads if ELSEWHERE.match(each)]
        for link in {*page.links, *page.loads}:
            found += [f"{name}: {link} {what}" for what in _wrong(path, link, pages)]
    for path in sorted(folder.rglob("*.css")):
        every = IN_STYLE.findall(path.read_text(encoding="utf-8"))
        found += [f"{path.name} loads {each}" for each in every]
    for path in sorted(folder.rglob("*.js")):
        if path.name != "searchindex.js":  # words and titles
            every = IN_SCRIPT.findall(path.read_text(encoding="utf-8"))
            found += [f"{path.name} names {each}" for each in every]
    return found


def _wrong(path: Path, link: str, pages: dict[Path, Page]) -> list[str]:
    """What is wrong with one link of the page at ``path``."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return []
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        return ["is not there"]
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].ids:
        return ["has no such anchor"]
    return []
