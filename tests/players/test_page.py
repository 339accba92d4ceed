"""The HTML of players, a learner's own run, and what `distlab trace --open` does."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import webbrowser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from distlab.commands.trace import _show
from distlab.course.catalogue import root
from distlab.host.toml import tomllib
from distlab.observe.log import Event, Log
from distlab.picture import Span, chrome_trace, spans_of
from distlab.player import page
from distlab.player.own import MOST_STEPS, own_document
from tests import forked_commands


def exchange() -> list[Span]:
    """Two ranks compute, and each sends 8 bytes to the other."""
    logs = []
    for rank in (0, 1):
        begin, peer = 0.2 + rank / 10, 1 - rank
        events = [
            Event("send", (0, 1), peer, 2, "float32", 8, 8, 0, begin, 0.5, index=0),
            Event("recv", (0, 1), peer, 2, "float32", 8, 0, 8, begin, 0.5, index=1),
        ]
        logs.append(Log(rank, events, [("forward", 0.0, 0.2 + rank / 10)]))
    return spans_of(logs)


def test_a_fragment_has_still_and_data() -> None:
    text = page.fragment("ring")
    assert re.search(r'<div class="player" data-player="ring">\n<noscript><svg ', text)
    assert "\n\n" not in text, "an empty line would end the HTML in Markdown"
    data = re.search(r'<script type="application/json">(.*?)</script>', text, re.S)
    assert json.loads(data[1]) == json.loads((page.folder() / "ring.json").read_text("utf-8"))


def test_an_unknown_fragment_is_told() -> None:
    with pytest.raises(ValueError, match=r"no player 'rings'\. There are: halving-doubling, "):
        page.fragment("rings")


def test_data_can_not_end_its_script() -> None:
    found = own_document(exchange(), "</script><b>1.1")
    assert "</script><b>" not in page.embedded(found, "own", "")
    assert "&lt;/script&gt;" in page.page(found, "own")


def test_a_page_needs_no_other_file() -> None:
    text = page.page(own_document(exchange(), "a run"), "own")
    assert not re.search(r'(?:src|href)="|url\((?!#)|@import', text)
    assert {*re.findall(r"https?://[^\"' ]+", text)} == {"http://www.w3.org/2000/svg"}


def test_assets_are_packaged() -> None:
    project = tomllib.loads((root() / "pyproject.toml").read_text("utf-8"))
    packaged = project["tool"]["setuptools"]["package-data"]["distlab.player"]
    assert [path.name for path in page.assets()] == packaged
    assert all(path.is_file() for path in page.assets())


def test_an_own_run_ends_with_its_time_and_bytes() -> None:
    (scene,) = own_document(exchange(), "a run")["scenes"].values()
    assert scene["ended"] == {"time": "500 ms", "sent": "16 B"}
    assert scene["steps"][-1]["texts"] == scene["ended"]
    said = " ".join(step["say"] for step in scene["steps"])
    assert "rank 1 has sent 8 B to rank 0" in said
    assert "rank 0 has waited for rank 1" in said
    assert sum(shape[0] == "arrow" for shape in scene["timed"]) == 2


def test_a_long_run_has_few_steps() -> None:
    spans = [Span(0, "compute", "other", k / 100, (k + 1) / 100) for k in range(1000)]
    (scene,) = own_document(spans, "a long run")["scenes"].values()
    assert len(scene["steps"]) <= MOST_STEPS + 1
    assert "other things in the same time" in scene["steps"][1]["say"]


def test_a_run_without_anything_has_a_page() -> None:
    assert "Nothing was recorded." in page.page(own_document([], "nothing"), "own")


def test_a_trace_has_the_players_part(tmp_path: Path) -> None:
    found = own_document(exchange(), "a run")
    whole = json.loads(chrome_trace(exchange(), tmp_path / "t.json", {"player": found}).read_text())
    assert whole["player"] == found
    assert whole["traceEvents"]


def test_the_command_opens_the_learners_run(tmp_path: Path) -> None:
    """From the learner's ranks to the page that the browser is asked for."""
    asked, program = tmp_path / "asked", tmp_path / "program"
    program.write_text(f'#!/bin/sh\nprintf "%s" "$1" > {asked}\n', encoding="utf-8")
    program.chmod(0o755)
    command = [sys.executable, "-m", "distlab", "trace", "3.3", "--impl", "solutions", "--open"]
    done = forked_commands.run(
        [*command, "--out", str(tmp_path)],
        cwd=root(),
        env=os.environ | {"BROWSER": str(program)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert asked.read_text() == (tmp_path / "trace-3.3.html").as_uri()
    whole = json.loads((tmp_path / "trace-3.3.json").read_text(encoding="utf-8"))
    (scene,) = whole["player"]["scenes"].values()
    assert scene["ended"]["sent"] == "48 MB", "4 ranks send 2(W-1)/W of 8 MB"
    assert scene["steps"][-1]["texts"] == scene["ended"]


class Browser:
    """One that notes what it is asked to open."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[str] = []

    def open(self, address: str) -> bool:
        self.asked.append(address)
        return True


@pytest.mark.parametrize(
    ("found", "said", "asked"),
    [
        (Browser("firefox"), "opened in the browser", 1),
        (Browser("/usr/bin/lynx"), "open it in a browser", 0),
        (None, "open it in a browser", 0),
    ],
    ids=["a browser", "in the terminal", "none"],
)
def test_the_page_is_written_and_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Any, said: str, asked: int
) -> None:
    def get() -> Any:
        if found is None:
            raise webbrowser.Error("none")
        return found

    monkeypatch.setattr(webbrowser, "get", get)
    out = Console(file=io.StringIO(), width=200)
    _show(own_document(exchange(), "a run"), tmp_path / "run.html", out)
    assert said in out.file.getvalue()
    assert "run.html" in out.file.getvalue()
    assert "a run" in (tmp_path / "run.html").read_text(encoding="utf-8")
    assert len(found.asked if found else []) == asked
