"""Players in pages: the HTML of one that was recorded, and a page for a learner's own run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from ..course.catalogue import root
from .still import still

HERE = Path(__file__).parent


def folder() -> Path:
    """Where the recorded players are."""
    return root() / "docs" / "players"


def names() -> list[str]:
    """The players that there are."""
    return sorted(path.stem for path in folder().glob("*.json"))


def assets() -> list[Path]:
    """What a page with players needs: a script and a style sheet, once."""
    return [HERE / "player.js", HERE / "player.css"]


def fragment(name: str) -> str:
    """The HTML of a recorded player; the still picture stands in where scripts are off.

    Raises ValueError for a name that no player has.
    """
    path = folder() / f"{name}.json"
    if name not in names():
        raise ValueError(f"no player {name!r}. There are: {', '.join(names())}")
    picture = path.with_suffix(".svg").read_text(encoding="utf-8")
    return embedded(json.loads(path.read_text(encoding="utf-8")), name, picture)


def embedded(found: Mapping[str, Any], name: str, picture: str) -> str:
    """A player's file as HTML, with its still ``picture``."""
    data = json.dumps(found, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<div class="player" data-player="{escape(name)}">\n'
        f"<noscript>{picture.strip()}</noscript>\n"
        f'<script type="application/json">{data}</script>\n'
        "</div>\n"
    )


def page(found: Mapping[str, Any], name: str) -> str:
    """One HTML file with a player, its script and its style: no other file is needed."""
    picture = still(found, next(iter(found["scenes"])), -1, name)
    script, style = (path.read_text(encoding="utf-8") for path in assets())
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(found['title'])}</title>\n"
        f"<style>:root {{ color-scheme: light dark; }}\nbody {{ margin: 12px; }}\n{style}</style>\n"
        f"</head>\n<body>\n<main>\n{embedded(found, name, picture)}</main>\n"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )
