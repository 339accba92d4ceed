"""Links and images of a text of the course, as they must read in the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

CODE = r"(?P<code>^(?P<indent> *)(?P<fence>`{3,}|~{3,})[^\n]*\n.*?^ *(?P=fence)`*~* *$)"
IMAGE = r"!\[(?P<alt>[^\]]*)\]\((?P<source>[^()\s]+)\)"
LINK = r"\[(?P<text>(?:[^\[\]`]|`[^`]*`)*)\]\((?P<target>[^()\s]+)\)"
SPAN = r"(?P<span>(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`))"
PARTS = re.compile(f"{CODE}|{IMAGE}|{LINK}|{SPAN}", re.M | re.S)
BADGE = re.compile(r"!\[(?P<alt>[^\]]*)\]\(https?://[^()\s]+\)")  # would be loaded from elsewhere
ALONE = re.compile(r"^!\[[^\]]*\]\([^()\s]+/players/(?P<name>[\w-]+)\.svg\)$", re.M)


@dataclass(frozen=True)
class Picture:
    """An image on a page; ``file`` is relative to the course's folder."""

    file: str
    alt: str
    page: str


@dataclass
class Places:
    """Where the texts of the course lie in the site.

    ``pages``: the page of a file of the course. ``player``: the HTML of a player by its name.
    ``address``: where the files can be seen; may be empty. ``anchors``: the page of a heading of a
    file that is divided into several pages. ``pictures`` are all that were met.
    """

    root: Path
    pages: dict[str, str]
    player: Callable[[str], str]
    address: str = ""
    anchors: dict[tuple[str, str], str] = field(default_factory=dict)
    pictures: list[Picture] = field(default_factory=list)

    def rewritten(self, text: str, origin: str, page: str) -> str:
        """The ``text`` of the file ``origin`` as it stands on ``page``."""
        text = ALONE.sub(lambda found: raw(self.player(found["name"])), text)
        text = BADGE.sub(lambda found: found["alt"], text)
        return PARTS.sub(lambda found: self._part(found, origin, page), text)

    def _part(self, found: re.Match[str], origin: str, page: str) -> str:
        if found["source"]:
            file = self._file(found["source"], origin)
            self.pictures.append(Picture(file, found["alt"], page))
            return f"![{found['alt']}](/{file})"
        if found["target"]:
            text = PARTS.sub(lambda inner: self._part(inner, origin, page), found["text"])
            target = self._target(found["target"], origin)
            return f"[{text}]({target})" if target else text
        return found[0]

    def _file(self, target: str, origin: str) -> str:
        """The file that ``origin`` calls ``target``; ValueError if there is none."""
        file = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        if not (self.root / file).exists():
            raise ValueError(f"{origin} links to {target}, which is not there")
        return file

    def _target(self, target: str, origin: str) -> str:
        """Where a link leads in the site; empty if nowhere."""
        if re.match(r"[a-z]+:", target):
            return target
        path, _, anchor = target.partition("#")
        file = self._file(path, origin) if path else origin
        page = self.anchors.get((file, anchor)) or self.pages.get(file)
        page = page or self.pages.get(f"{file}/README.md")
        if page is None:
            return f"{self.address}/blob/HEAD/{file}" if self.address else ""
        suffix = ".ipynb" if file.endswith(".ipynb") else ".md"
        return f"/{page}{suffix}" + (f"#{anchor}" if anchor else "")


def raw(html: str) -> str:
    """HTML as it may stand in a text."""
    return f"``````{{raw}} html\n{html}\n``````"
