"""The built site: no warning, no broken link or anchor, nothing from elsewhere, all is there."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from distlab.course.catalogue import load_course, root
from distlab.player import page as player
from tests.site.what_pages_say import problems


@pytest.fixture(scope="module")
def built(site: Path) -> Path:
    """The site's folder: a worker keeps the tests of this file together."""
    return site


def text_of(path: Path) -> str:
    """The words of a page, without its folded parts' markup."""
    found: list[str] = []
    reader = HTMLParser()
    reader.handle_data = found.append  # type: ignore[method-assign]
    reader.feed(path.read_text(encoding="utf-8"))
    return " ".join("".join(found).split())


def test_links_anchors_and_loads(built: Path) -> None:
    assert problems(built) == []


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ('<a href="other.html">', "a.html: other.html is not there"),
        ('<a href="b.html#three">', "a.html: b.html#three has no such anchor"),
        ('<a href="#two">', "a.html: #two has no such anchor"),
        ('<img src="a.png">', "a.html: a.png is not there"),
        ('<script src="https://cdn.example/x.js"></script>', "a.html loads https://cdn.example"),
        ('<link rel="stylesheet" href="//fonts.example/x">', "a.html loads //fonts.example/x"),
        ("<style>p { background: url(https://x.example/y) }</style>", "a.html loads https://x"),
    ],
)
def test_what_is_wrong_is_found(page: str, problem: str, tmp_path: Path) -> None:
    good = '<a href="b.html#one"><a href="https://elsewhere.example/">'
    (tmp_path / "a.html").write_text(good)
    (tmp_path / "b.html").write_text('<p id="one"></p>')
    assert problems(tmp_path) == []
    (tmp_path / "a.html").write_text(good + page)
    assert [each[: len(problem)] for each in problems(tmp_path)] == [problem]


def test_scripts_and_styles_that_load_from_elsewhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "x.css").write_text('@import "https://fonts.example/f.css";')
    (tmp_path / "x.js").write_text('fetch("https://cdn.example/y")')
    assert [each.split()[-1] for each in problems(tmp_path)] == [
        "https://fonts.example/f.css",
        "https://cdn.example/y",
    ]


def test_every_exercise_has_a_page_with_hints_and_solution(built: Path) -> None:
    for exercise in load_course().exercises:
        text = text_of(built / exercise.phase.folder / f"{exercise.id}.html")
        lacking = [
            hint for hint in exercise.hints if " ".join(hint.split()).replace("`", "") not in text
        ]
        assert lacking == [], exercise.id
        assert f'raise NotImplementedError("exercise {exercise.id}")' in text
        assert f"{exercise.minutes} minutes" in text
        assert "Show the solution" in text


def test_every_text_has_a_page(built: Path) -> None:
    texts = {path.stem for path in (root() / "docs").rglob("*.md")} - {"handout_readme"}
    assert texts <= {path.stem for path in built.rglob("*.html")}
    notebooks = {path.stem for path in (root() / "notebooks").glob("*.ipynb")}
    assert notebooks == {path.stem for path in (built / "notebooks").glob("*.html")}
    for name in ("index", "SECURITY", "CONTRIBUTING", "CHANGELOG", "benchmarks/README"):
        assert (built / f"{name}.html").is_file()


def test_reference_has_commands_fixtures_and_given_code(built: Path) -> None:
    commands = text_of(built / "reference" / "commands.html")
    for command in ("distlab watch", "distlab simulate", "distlab class grade"):
        assert f"usage: {command}" in commands
    checks = text_of(built / "reference" / "checks.html")
    for name in ("expect_close", "impl", "RankContext.generator"):
        assert f"{name}¶" in checks  # a heading
    given = text_of(built / "reference" / "given.html")
    for path in (root() / "given").glob("[a-z]*.py"):
        assert f"given.{path.stem}¶" in given


def test_what_is_published_is_what_was_built(built: Path) -> None:
    from scripts.website.__main__ import OUT

    workflow = yaml.safe_load((root() / ".github/workflows/site.yml").read_text(encoding="utf-8"))
    steps = workflow["jobs"]["build"]["steps"]
    assert "make site" in [step.get("run") for step in steps]
    assert [step["with"]["path"] for step in steps if "upload" in step.get("uses", "")] == [
        OUT.relative_to(root()).as_posix()
    ]


def test_players_are_on_the_page_with_their_script(built: Path) -> None:
    for name in player.names():
        assert f'data-player="{name}"' in (built / "pictures.html").read_text(encoding="utf-8")
    for path in player.assets():
        assert f"_static/{path.name}" in (built / "pictures.html").read_text(encoding="utf-8")
        assert f"_static/{path.name}" not in (built / "CHANGELOG.html").read_text(encoding="utf-8")
        assert (built / "_static" / path.name).read_bytes() == path.read_bytes()
