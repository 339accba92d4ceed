"""Links of a text, rewritten for the site."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.website.links import Places

HOST = "https://host.example/course"


def stand_in(name: str) -> str:
    """The HTML of a player."""
    return f'<div data-player="{name}"></div>'


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A small course: a page, a text that is divided, a file that is no page, a picture."""
    for name in ("docs/a.md", "phase/guidelines.md", "code/x.py", "code/README.md", "docs/p.svg"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    pages = {name: name[:-3] for name in ("docs/a.md", "phase/guidelines.md", "code/README.md")}
    anchors = {("phase/guidelines.md", "11-one"): "phase/1.1"}
    return Places(tmp_path, pages, stand_in, anchors=anchors)


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("[a](../docs/a.md)", "[a](/docs/a.md)"),
        ("[a](../docs/a.md#part)", "[a](/docs/a.md#part)"),
        ("[`a` and\nb](../docs/a.md)", "[`a` and\nb](/docs/a.md)"),
        ("[one](#11-one)", "[one](/phase/1.1.md#11-one)"),
        ("[code](../code)", "[code](/code/README.md)"),
        ("[file](../code/x.py)", "file"),
        ("[web](https://web.example/)", "[web](https://web.example/)"),
        ("![p](../docs/p.svg)", "![p](/docs/p.svg)"),
        ("[![badge](https://b.example/b.svg)](https://b.example)", "[badge](https://b.example)"),
        ("`x[0](y)` [0, W) x[i]", "`x[0](y)` [0, W) x[i]"),
        ("```\n[a](nowhere)\n```\n[a](../docs/a.md)", "```\n[a](nowhere)\n```\n[a](/docs/a.md)"),
    ],
)
def test_links_lead_to_pages(places: Places, text: str, becomes: str) -> None:
    assert places.rewritten(text, "phase/guidelines.md", "phase/guidelines") == becomes


def test_files_that_are_no_pages_are_at_the_address(places: Places) -> None:
    places.address = HOST
    text = places.rewritten("[file](x.py)", "code/README.md", "code/README")
    assert text == f"[file]({HOST}/blob/HEAD/code/x.py)"


def test_link_to_nothing_is_refused(places: Places) -> None:
    with pytest.raises(ValueError, match=r"^docs/a.md links to b.md, which is not there$"):
        places.rewritten("[b](b.md)", "docs/a.md", "docs/a")


def test_player_takes_the_place_of_its_picture(places: Places) -> None:
    text = "before\n\n![The ring](../docs/players/ring.svg)\n\nafter"
    found = places.rewritten(text, "phase/guidelines.md", "phase/1.1")
    assert '\n<div data-player="ring"></div>\n' in found
    assert "![" not in found
    assert found.startswith("before\n")
    assert found.endswith("\nafter")


def test_pictures_are_remembered(places: Places) -> None:
    places.rewritten("![p](p.svg)", "docs/a.md", "docs/a")
    assert [(each.file, each.alt, each.page) for each in places.pictures] == [
        ("docs/p.svg", "p", "docs/a")
    ]
