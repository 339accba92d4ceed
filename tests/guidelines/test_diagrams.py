"""The guidelines' diagrams: one for every exercise, right, readable in both schemes, in place."""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from matplotlib import get_data_path
from PIL import ImageFont

from distlab.course.catalogue import load_course, root
from scripts.diagrams import DRAWINGS, FOLDER, Placed, __main__, draw, phase2_batches, placed
from scripts.diagrams.letters import width_of
from scripts.diagrams.phase3_memory import RANKS as SHARDS
from scripts.diagrams.phase3_memory import SAVED, SIZE, UNITS, fsdp_moments, unit_profile
from scripts.diagrams.placing import place_all, put_in
from scripts.diagrams.shapes import Cell, row
from scripts.diagrams.sheet import RANKS, Sheet
from solutions.phase3_multi_node.strategy_memory import sharded_moments
from solutions.phase4_production.flops import operator_flops
from tests.guidelines.svg_layout import SVG, Picture, contrast

PHONE = 358  # pixels of a narrow phone, without margins
NAMES = sorted(DRAWINGS)


@cache
def picture(name: str) -> Picture:
    return Picture((FOLDER / f"{name}.svg").read_text(encoding="utf-8"))


def test_every_exercise_has_one() -> None:
    assert {each.exercise for each in placed()} == {each.id for each in load_course().exercises}


def test_files_are_in_step() -> None:
    assert not __main__.out_of_step()


def test_check_names_what_is_not_in_step(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    (tmp_path / "1.1.svg").write_text("<svg/>")
    (tmp_path / "1.2.svg").unlink()
    (tmp_path / "9.9.svg").write_text("<svg/>")
    assert __main__.out_of_step(tmp_path) == [
        "1.1.svg differs from its specification",
        "1.2.svg is missing",
        "9.9.svg has no specification",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_can_read_it(name: str) -> None:
    seen = picture(name)
    assert not seen.problems()
    assert [each for each in seen.contrasts() if each[2] < 4.5] == []
    sizes = [float(element.attrib["font-size"]) for _, _, element in seen.texts()]
    assert seen.width <= 720
    assert min(sizes) >= 12
    assert min(sizes) * PHONE / seen.width >= 8


@pytest.mark.parametrize("name", NAMES)
def test_it_is_an_image_with_words(name: str) -> None:
    seen = picture(name)
    words = {each.name: each.alt for each in placed()}[name]
    assert seen.root.attrib["role"] == "img"
    assert seen.root.find(f"{SVG}title").text == DRAWINGS[name][0]
    assert seen.root.find(f"{SVG}desc").text == words
    assert 60 < len(words) < 500
    assert max(len(sentence.split()) for sentence in re.split(r"(?<=[.:]) ", words)) <= 26
    assert not set("[]\n") & set(words), "Markdown reads brackets"
    assert len(seen.source.encode()) <= 20_000
    assert set(re.findall(r"font-family:([^;}]+)", seen.source)) == {"sans-serif"}
    assert not re.search(r"<script|<image|href|(?<!xmlns=\")https?://", seen.source)


@pytest.mark.parametrize("name", NAMES)
def test_widths_are_not_underestimated(name: str) -> None:
    """DejaVu is the widest of the usual sans-serif fonts."""
    for _, area, element in picture(name).texts():
        bold = "font-weight" in element.attrib
        size = float(element.attrib["font-size"])
        true = font(bold).getlength(area.name) * size / 100
        assert width_of(area.name, size, bold=bold) >= 0.98 * true, area.name


@cache
def font(bold: bool) -> ImageFont.FreeTypeFont:
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(get_data_path()) / "fonts" / "ttf" / name), 100)


def broken(what: str) -> Sheet:
    """A sheet with one fault."""
    sheet = Sheet("title")
    sheet.box(40, 60, 100, 30, "a box", "blue")
    if what == "over text":
        sheet.text(80, 76, "more")
    if what == "on an edge":
        sheet.text(120, 110, "half in")
        sheet.box(100, 95, 60, 30)
    if what == "crossed":
        sheet.path([(60, 60), (120, 95)])
    if what == "outside":
        sheet.text(540, 60, "too far")
    if what == "a line outside":
        sheet.path([(0, 0), (600, 10)])
    sheet.y = 140
    return sheet


FAULTS = ["over text", "on an edge", "crossed", "outside", "a line outside"]


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_seen(what: str) -> None:
    assert Picture(broken(what).svg("words", "x")).problems()
    assert not Picture(broken("").svg("words", "x")).problems()


def test_too_much_text_for_a_box_is_refused() -> None:
    with pytest.raises(ValueError, match="needs"):
        Sheet("title").box(0, 0, 40, 30, "much too long")


def test_pale_text_is_seen() -> None:
    pale = Sheet("title").svg("words", "x").replace("#1b1b1b", "#8a8a8a")
    ratios = {scheme: ratio for scheme, _, ratio in Picture(pale).contrasts()}
    assert ratios["light"] < 4.5 < ratios["dark"]
    assert contrast("#ffffff", "#000000") == pytest.approx(21)


def test_the_same_bytes_again() -> None:
    each = placed()[0]
    assert draw(each) == draw(each)


def test_the_example_of_contributing_is_drawn() -> None:
    text = (root() / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(@diagram.*?)```", text, re.S)[1].partition("\n")[2]
    names = {"Sheet": Sheet, "Cell": Cell, "RANKS": RANKS, "row": row}
    exec(code, names)
    sheet = Sheet("title")
    names["loudest"](sheet)
    seen = Picture(sheet.svg("words", "x"))
    assert not seen.problems()
    assert "-1.5" in [area.name for _, area, _ in seen.texts()]


def guidelines(folder: Path) -> dict[str, str]:
    """Copies of all guidelines below ``folder``; their texts."""
    texts = {}
    for phase in load_course().phases:
        (folder / phase.folder).mkdir()
        source = root() / phase.folder / "guidelines.md"
        shutil.copy(source, folder / phase.folder / "guidelines.md")
        texts[phase.folder] = source.read_text(encoding="utf-8")
    return texts


def test_all_find_their_place_and_stay_there(tmp_path: Path) -> None:
    guidelines(tmp_path)
    place_all(tmp_path)
    assert place_all(tmp_path) == []
    for each in placed():
        folder = load_course().phase(int(each.exercise[0])).folder
        text = (tmp_path / folder / "guidelines.md").read_text(encoding="utf-8")
        sections = [part for part in re.split(r"(?m)^## ", text) if each.image in part]
        assert [part.split()[0] for part in sections] == [each.exercise]
        assert not each.replaces or f"```\n{each.replaces}\n" not in text


def test_a_lost_place_changes_nothing(tmp_path: Path) -> None:
    guidelines(tmp_path)
    last = tmp_path / load_course().phase(4).folder / "guidelines.md"
    last.write_text(last.read_text(encoding="utf-8").replace("## 4.12 ", "## 4.99 "), "utf-8")
    before = {path: path.read_bytes() for path in tmp_path.rglob("guidelines.md")}
    with pytest.raises(ValueError, match=r"no section for 4\.12"):
        place_all(tmp_path)
    assert {path: path.read_bytes() for path in before} == before
    assert __main__.main(["--place", "--root", str(tmp_path)]) == 1


TEXT = """# Phase

## 1.1 One

**Why.** Because.

```
first line
second
```

After it.

```
other drawing
```

**The idea.** Words.

More.

## 1.2 Two

```
first line
```
"""


def test_a_drawing_in_text_gives_way() -> None:
    entry = Placed("1.1", "alt", replaces="first line")
    new = put_in(TEXT, [entry])
    one, two = new.split("## 1.2")
    assert "first line" not in one
    assert f"Because.\n\n{entry.image}\n\nAfter it.\n\n```\nother drawing\n```" in one
    assert two == TEXT.split("## 1.2")[1], "another section keeps its own"
    assert put_in(new, [entry]) == new
    renewed = Placed("1.1", "better words", replaces=entry.replaces)
    assert put_in(new, [renewed]) == new.replace("![alt]", "![better words]")


def test_without_a_drawing_it_follows_a_paragraph() -> None:
    entry = Placed("1.1", "alt", after="**The idea.**")
    assert f"**The idea.** Words.\n\n{entry.image}\n\nMore." in put_in(TEXT, [entry])
    with pytest.raises(ValueError, match="0 paragraphs"):
        put_in(TEXT, [Placed("1.1", "alt", after="Nowhere")])
    with pytest.raises(ValueError, match="no drawing begins"):
        put_in(TEXT, [Placed("1.1", "alt", replaces="never")])


def test_the_memory_of_3_27_is_that_of_the_exercise() -> None:
    profile = unit_profile(UNITS, SIZE * 1000, SAVED * 1000)
    moments = sharded_moments(profile, SHARDS, "fsdp")
    drawn = [sum(parts[1:]) * 1000 for parts in fsdp_moments().values()]
    assert drawn == moments[: len(drawn)]


def test_the_flops_of_4_17_are_counted() -> None:
    texts = " ".join(area.name for _, area, _ in picture("4.17").texts())
    for m, k, n in ((4, 5, 7), (4, 7, 5), (5, 4, 7)):
        factors = (torch.zeros(m, k), torch.zeros(k, n))
        one = operator_flops(torch.ops.aten.mm, factors, torch.zeros(m, n))
        assert f"2·{m * n}·{k} = {one}" in texts


def test_the_search_of_2_4_ends_at_the_answer() -> None:
    for answer in range(1, 40):
        sizes = phase2_batches.tried([answer, 64], 100)
        assert max(size for size in sizes if size <= answer) == answer
        assert answer + 1 in sizes
