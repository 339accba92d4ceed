"""The players' files: what the last step shows is what the recorded run ended with."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist

from distlab.player import page
from distlab.player.scene import FORMAT, Shape
from distlab.ranks.results import RankFailure
from distlab.virtual.run import run_virtual
from scripts.players import collectives, parameter_server, pipelines
from scripts.players.__main__ import PLAYERS, main, written

NAMES = tuple(PLAYERS)
LARGEST = 160_000  # bytes of a player's file
SVG = "{http://www.w3.org/2000/svg}"


@cache
def recorded(name: str) -> dict[str, Any]:
    """A player's file."""
    return json.loads((page.folder() / f"{name}.json").read_text(encoding="utf-8"))


def last_texts(scene: dict[str, Any]) -> dict[str, str]:
    """What the named shapes show at the last step."""
    shapes = [Shape(*data) for data in scene["shapes"]]
    texts = {name: shapes[index].text for name, index in scene["names"].items()}
    for step in scene["steps"]:
        texts |= step.get("texts", {})
    return texts


def test_there_is_a_file_for_each_player() -> None:
    assert page.names() == sorted(NAMES)
    assert {path.stem for path in page.folder().glob("*.svg")} == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_a_scene_for_each_choice(name: str) -> None:
    found = recorded(name)
    assert found["format"] == FORMAT
    keys = [" | ".join(key) for key in product(*(c["values"] for c in found["choices"]))]
    assert sorted(found["scenes"]) == sorted(keys)
    assert " | ".join(found["start"]) in keys
    assert (page.folder() / f"{name}.json").stat().st_size < LARGEST


@pytest.mark.parametrize("name", NAMES)
def test_the_last_step_shows_what_the_run_ended_with(name: str) -> None:
    for key, scene in recorded(name)["scenes"].items():
        shown = last_texts(scene)
        assert scene["ended"], key
        assert {k: shown[k] for k in scene["ended"]} == scene["ended"], key


@pytest.mark.parametrize("name", NAMES)
def test_every_step_says_something_and_changes_something(name: str) -> None:
    for key, scene in recorded(name)["scenes"].items():
        reached = [step.get("reached", 0) for step in scene["steps"]]
        assert reached == sorted(reached), key
        for step in scene["steps"]:
            assert step["say"].endswith("."), (key, step["say"])
            assert len(step["say"]) < 240, (key, step["say"])
        assert all(step.keys() > {"say"} for step in scene["steps"][1:]), key


@pytest.mark.parametrize("name", NAMES)
def test_the_still_is_drawn_from_the_file(name: str) -> None:
    text = (page.folder() / f"{name}.svg").read_text(encoding="utf-8")
    again = "record it again: python -m scripts.players"
    assert text == written(recorded(name), name)[".svg"], again
    picture = ElementTree.fromstring(text)
    assert picture.find(f"{SVG}title").text == recorded(name)["title"]
    assert "prefers-color-scheme:dark" in picture.find(f"{SVG}style").text


FRESH = {
    "ring": ("4 | 768 B", lambda: collectives.recorded(collectives.ring, 4, 96, 4, "chunk")),
    "tree": ("8 | 768 B", lambda: collectives.recorded(collectives.tree, 8, 96, 1, "tensor")),
    "pipeline": ("1F1B | 2 | 4", lambda: pipelines.recorded("1F1B", 2, 4)),
    "parameter-server": (
        "asynchronous | 2",
        lambda: parameter_server.recorded("asynchronous", 2),
    ),
}


@pytest.mark.parametrize("name", FRESH)
def test_a_fresh_recording_is_the_same(name: str) -> None:
    key, record = FRESH[name]
    again = "record it again: python -m scripts.players"
    assert json.loads(json.dumps(record().data())) == recorded(name)["scenes"][key], again


def test_the_rounds_are_those_of_the_formulas() -> None:
    """2(W-1) steps of a ring, 2 log2 W of the others; the bubble is (W-1)/(m+W-1)."""
    for ranks, rounds in ((2, 1), (4, 2), (8, 3)):
        key = f"{ranks} | 768 B"
        steps = {name: len(recorded(name)["scenes"][key]["steps"]) - 1 for name in NAMES[:3]}
        want = {"ring": 2 * (ranks - 1), "tree": 2 * rounds, "halving-doubling": 2 * rounds}
        assert steps == want
    for ranks, m in product(pipelines.RANKS, pipelines.BATCHES):
        shown = recorded("pipeline")["scenes"][f"1F1B | {ranks} | {m}"]["ended"]["bubble"]
        assert shown == f"{(ranks - 1) / (m + ranks - 1):.0%}"


def test_a_run_that_does_not_sum_is_not_recorded() -> None:
    def half(ctx: Any, tensor: Any) -> None:
        collectives.module_of(3, "ring_allreduce").ring_reduce_scatter(tensor)

    with pytest.raises(AssertionError, match="the sum of all ranks"):
        collectives.recorded(half, 2, 96, 2, "chunk")


def test_a_piece_of_different_sums_is_not_recorded() -> None:
    def uneven(ctx: Any, tensor: Any) -> None:
        tensor[0] += 1
        dist.all_reduce(tensor)

    with pytest.raises(RankFailure, match="different sums"):
        run_virtual(collectives.body, 2, uneven, 96, 2)


def test_an_unknown_player_is_told(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rings"], tmp_path) == 2
    assert "no player 'rings'. There are: ring, tree" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
