"""Each player, played in headless Chromium by keyboard from its first step to its last."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from distlab.picture import chrome_trace
from distlab.player import page
from distlab.player.own import own_document
from scripts.players.__main__ import PLAYERS, STILL_STEP
from tests.browser import Opened, opened
from tests.players.test_page import exchange

# what is drawn for each named shape: its text, or the bits of its strips
DRAWN = """() => Object.fromEntries([...document.querySelectorAll("[data-name]")].map(group => {
    const ranks = group.dataset.text.length
    const parts = new Set([...group.querySelectorAll(".part")].map(p => p.classList[1]))
    const bits = Array.from({length: ranks}, (_, r) => parts.has(`rank${r}`) ? "1" : "0").join("")
    const text = group.querySelector("text")
    return [group.dataset.name, text || !ranks ? text?.textContent ?? "" : bits]
}))"""
COUNTED = """() => [...document.querySelectorAll(".player-stage svg :is(rect, text, line, path)")]
    .filter(e => !e.closest("clipPath, marker") && !e.classList.contains("clock"))
    .map(e => e.tagName)"""
NUMBER = re.compile(r"^Step \d+ of \d+\. ")


def page_of(name: str, folder: Path) -> str:
    """A page with a recorded player, as a site would make it; its address."""
    script, style = (path.read_text(encoding="utf-8") for path in page.assets())
    path = folder / f"{name}.html"
    path.write_text(
        '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>players</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{style}</style>{page.fragment(name)}<script>{script}</script></html>",
        encoding="utf-8",
    )
    return path.as_uri()


def scene_of(name: str) -> dict[str, Any]:
    """The scene that a recorded player starts with."""
    found = json.loads((page.folder() / f"{name}.json").read_text(encoding="utf-8"))
    return found["scenes"][" | ".join(found["start"])]


def play(tab: Opened, scene: dict[str, Any]) -> None:
    """Go through all steps by keyboard; each must say what the file says."""
    tab.page.locator(".player-stage").focus()
    say = tab.page.locator(".player-say")
    last = len(scene["steps"]) - 1
    for number, step in enumerate(scene["steps"]):
        begin = f"Step {number} of {last}. " if number else ""
        assert say.inner_text() == begin + step["say"]
        tab.page.keyboard.press("ArrowRight")
    assert NUMBER.sub("", say.inner_text()) == scene["steps"][-1]["say"], "it stays at the end"


@pytest.mark.parametrize("name", PLAYERS)
def test_a_player_goes_to_what_its_run_ended_with(browser: Any, tmp_path: Path, name: str) -> None:
    scene = scene_of(name)
    with opened(browser, page_of(name, tmp_path), width=390) as tab:
        play(tab, scene)
        drawn = tab.page.evaluate(DRAWN)
        assert {shape: drawn[shape] for shape in scene["ended"]} == scene["ended"]
        assert not tab.too_wide()
        assert not tab.trouble


@pytest.mark.parametrize("name", PLAYERS)
def test_the_still_has_the_shapes_of_the_page(browser: Any, tmp_path: Path, name: str) -> None:
    """Script and still are two programs that draw one file: they must draw the same."""
    steps = STILL_STEP.get(name, len(scene_of(name)["steps"]) - 1)
    with opened(browser, page_of(name, tmp_path)) as tab:
        tab.page.locator(".player-stage").focus()
        for _ in range(steps):
            tab.page.keyboard.press("ArrowRight")
        counted = Counter(tab.page.evaluate(COUNTED))
    picture = ElementTree.parse(page.folder() / f"{name}.svg").getroot()
    still = Counter(each.tag.rpartition("}")[2] for each in picture if each.tag[-6:] != "marker")
    background = Counter(rect=1)
    drawn = {tag: (still - background)[tag] for tag in ("rect", "text", "line", "path")}
    assert {tag: counted[tag] for tag in drawn} == drawn


def test_keys_buttons_and_choices(browser: Any, tmp_path: Path) -> None:
    with opened(browser, page_of("ring", tmp_path)) as tab:
        say, keyboard = tab.page.locator(".player-say"), tab.page.keyboard
        tab.page.locator(".player-stage").focus()
        tab.page.evaluate("document.addEventListener('keydown', e => document.title += e.key)")
        keyboard.press("End")
        assert say.inner_text().startswith("Step 6 of 6. All-gather: ")
        keyboard.press("ArrowLeft")
        assert say.inner_text().startswith("Step 5 of 6. ")
        keyboard.press("Home")
        assert say.inner_text().startswith("Start: ")
        assert tab.page.title() == "players", "a site may turn pages by the same keys"
        tab.page.get_by_label("One step on").click()
        assert say.inner_text().startswith("Step 1 of 6. Reduce-scatter: rank 0 sends chunk 3, ")
        tab.page.locator("select").first.focus()
        tab.page.locator("select").first.select_option("8")
        assert say.inner_text().startswith("Start: ")
        keyboard.press("End")
        assert say.inner_text().startswith("Start: "), "in a menu the key is the menu's"
        tab.page.get_by_label("Last step").click()
        assert say.inner_text().startswith("Step 14 of 14. ")
        assert not tab.trouble


def test_it_plays_by_itself_until_its_end(browser: Any, tmp_path: Path) -> None:
    with opened(browser, page_of("tree", tmp_path)) as tab:
        tab.page.clock.install()
        tab.page.reload()
        tab.page.locator(".player-stage").focus()
        tab.page.keyboard.press("Space")
        assert tab.page.get_by_label("Pause").is_visible()
        tab.page.clock.run_for(2000)
        assert tab.page.locator(".player-say").inner_text().startswith("Step 1 of 4. ")
        tab.page.keyboard.press("Space")
        tab.page.clock.run_for(10_000)
        assert tab.page.locator(".player-say").inner_text().startswith("Step 1 of 4. ")
        tab.page.keyboard.press("Space")
        tab.page.clock.run_for(20_000)
        assert tab.page.locator(".player-say").inner_text().startswith("Step 4 of 4. ")
        assert tab.page.get_by_label("Play").is_visible()
        assert not tab.trouble


def test_without_scripts_the_still_is_there(browser: Any, tmp_path: Path) -> None:
    with opened(browser, page_of("ring", tmp_path), scripts=False) as tab:
        picture = tab.page.locator(".player noscript svg, .player > svg").first
        assert picture.is_visible()
        assert not tab.trouble


def test_dark_and_light_follow_system_and_site(browser: Any, tmp_path: Path) -> None:
    """Without a scheme of the site the system's; else that of the site, whatever the system's."""
    paper = "() => getComputedStyle(document.querySelector('.player')).backgroundColor"
    seen = {}
    for dark in (False, True):
        with opened(browser, page_of("tree", tmp_path), dark=dark) as tab:
            for scheme in ("", "light", "dark"):
                tab.page.evaluate(f"document.body.dataset.theme = '{scheme}'")
                seen[dark, scheme] = tab.page.evaluate(paper)
    light, night = seen[False, ""], seen[True, ""]
    assert light != night
    assert [seen[dark, "light"] for dark in (False, True)] == [light, light]
    assert [seen[dark, "dark"] for dark in (False, True)] == [night, night]


def test_a_learners_own_run_is_played(browser: Any, tmp_path: Path) -> None:
    found = own_document(exchange(), "1.1 a run")
    (tmp_path / "own.html").write_text(page.page(found, "own"), encoding="utf-8")
    (scene,) = found["scenes"].values()
    with opened(browser, (tmp_path / "own.html").as_uri(), width=390) as tab:
        play(tab, scene)
        drawn = tab.page.evaluate(DRAWN)
        assert {shape: drawn[shape] for shape in scene["ended"]} == scene["ended"]
        assert not tab.too_wide()
        assert not tab.trouble


def test_a_learners_trace_is_loaded_into_a_page(browser: Any, tmp_path: Path) -> None:
    found = own_document(exchange(), "1.1 a run")
    trace = chrome_trace(exchange(), tmp_path / "trace.json", {"player": found})
    with opened(browser, page_of("ring", tmp_path)) as tab:
        tab.page.locator("summary").click()
        tab.page.locator("input[type=file]").set_input_files(trace)
        title = tab.page.locator(".player-title", has_text="1.1 a run")
        title.wait_for()
        (scene,) = found["scenes"].values()
        play(tab, scene)
        assert not tab.trouble


def broken(**changes: Any) -> str:
    """A trace of which the scene is changed."""
    found = json.loads(json.dumps(own_document(exchange(), "a run")))
    (scene,) = found["scenes"].values()
    scene.update(changes)
    return json.dumps({"player": found})


BAD = {
    "no JSON": ("hello", "not JSON"),
    "empty": ("", "not JSON"),
    "null": ("null", "no steps for this player"),
    "of Perfetto alone": ('{"traceEvents": []}', "no steps for this player"),
    "of another version": (
        '{"player": {"format": "distlab player 0"}}',
        "no steps for this player",
    ),
    "without scenes": (
        '{"player": {"format": "distlab player 1", "choices": [{"name": "a", "values": ["b"]}]}}',
        "damaged: the scene “b” is missing",
    ),
    "without steps": (broken(steps=[]), "damaged: it has no steps"),
    "of another shape": (broken(timed=[["script", "", 1]]), "damaged: a shape can't be drawn"),
    "a name without a shape": (broken(names={"time": 999}), "damaged: a name without a shape"),
    "markup as looks": (broken(timed=[["box", '"><b>', 1]]), "damaged: a shape can't be drawn"),
    "no shapes": (broken(shapes=None), "damaged: "),
}


def test_a_bad_file_is_one_line_in_the_page(browser: Any, tmp_path: Path) -> None:
    """The player that was there stays."""
    with opened(browser, page_of("ring", tmp_path)) as tab:
        tab.page.locator("summary").click()
        for number, (what, (text, told)) in enumerate(BAD.items()):
            path = tmp_path / f"{number}.json"
            path.write_text(text, encoding="utf-8")
            tab.page.locator("input[type=file]").set_input_files(path)
            trouble = tab.page.locator(".player-trouble", has_text=told)
            trouble.wait_for()
            assert "distlab trace" in trouble.inner_text(), what
            assert "\n" not in trouble.inner_text(), what
        assert tab.page.locator(".player-title").inner_text() == "Ring all-reduce"
        assert not tab.trouble
