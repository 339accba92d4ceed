"""One page with all pictures of the course: those that move first."""

from __future__ import annotations

import re

from .links import Picture, raw


def page(players: list[str], pictures: list[Picture], pages: dict[str, str]) -> str:
    """The page; ``players`` are HTML, ``pages`` have the titles of the pages with ``pictures``."""
    text = ["# Pictures\n", "## Step by step\n"]
    text += [f"{raw(player)}\n" for player in players]
    text.append("## On the pages\n")
    seen: set[str] = set()
    for picture in pictures:
        if picture.file not in seen:
            seen.add(picture.file)
            text.append(f"![{picture.alt}](/{picture.file})\n")
            link = f"[{title(pages[picture.page])}](/{picture.page}.md)"
            text.append(f"{picture.alt}. Shown in: {link}.\n")
    return "\n".join(text)


def title(text: str) -> str:
    """The first heading of a page."""
    found = re.search(r"^# +(.+?) *$", text, re.M)
    return found[1] if found else ""
