"""``distlab diff`` finds where two recorded runs first differ, and in what."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.commands.diff import main
from distlab.host.terminal import console
from distlab.observe.differ import Difference, differences, logical_times
from distlab.observe.log import Event
from distlab.observe.runs import RankRun, read_run, recorded, write_run
from distlab.ranks import run_ranks
from distlab.virtual import run_virtual


def ring(ctx: Any, wrong_on: int = -1, extra: bool = False) -> None:
    """Each rank sends its number around; rank ``wrong_on`` adds too much at the second hop."""
    value = torch.full((3,), float(ctx.rank))
    right, left = (ctx.rank + 1) % ctx.world_size, (ctx.rank - 1) % ctx.world_size
    for hop in range(3):
        incoming = torch.empty(3)
        handle = dist.irecv(incoming, left)
        dist.isend(value, right).wait()
        handle.wait()
        value = incoming + (0.5 if hop == 1 and ctx.rank == wrong_on else 0.0)
    if extra:
        dist.barrier()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    arguments = {"right": (), "again": (), "wrong": (1,), "longer": (-1, True)}
    for name, given in arguments.items():
        logs = run_ranks(ring, 3, *given, values=True, learner_files=(__file__,)).logs
        found[name] = write_run(folder / f"{name}.json", [(g.rank, g.events) for g in logs], name)
    return found


def test_virtual_ranks_pass_the_same_values(runs: dict[str, Path], tmp_path: Path) -> None:
    def body(ctx: Any) -> None:
        ring(ctx)

    logs = run_virtual(body, 3, values=True).logs
    path = write_run(tmp_path / "virtual.json", [(g.rank, g.events) for g in logs], "virtual")
    virtual = read_run(path)
    assert not differences(read_run(runs["right"]), virtual, 0.0)
    sent = [event.value for event in virtual[1].events if event.op == "send"]
    assert [value["first"] for value in sent] == [[1.0] * 3, [0.0] * 3, [2.0] * 3]


def found(runs: dict[str, Path], one: str, other: str, rtol: float = 0.0) -> list[Difference]:
    return differences(read_run(runs[one]), read_run(runs[other]), rtol)


def test_equal_runs_have_no_difference(runs: dict[str, Path]) -> None:
    assert not found(runs, "right", "again")


def test_the_first_difference_is_on_the_rank_that_made_it(runs: dict[str, Path]) -> None:
    (first, *_) = found(runs, "right", "wrong")
    assert (first.rank, first.op, first.what) == (1, "send", "value")
    assert first.line.startswith("test_diff.py:")
    assert "isend(value, right)" in first.line
    assert first.text == "element 0 is 2.0 in the first run, 2.5 in the second"


def test_a_tolerance_lets_it_pass(runs: dict[str, Path]) -> None:
    assert not found(runs, "right", "wrong", rtol=0.3)


def test_a_run_that_goes_on(runs: dict[str, Path]) -> None:
    each = found(runs, "right", "longer")
    assert [(d.rank, d.what) for d in each] == [(0, "count"), (1, "count"), (2, "count")]
    assert each[0].text == "only the second run goes on: barrier"


def event(op: str, peer: int | None = None, value: Any = None, **more: Any) -> Event:
    fields = {"group": (0, 1), "peer": peer, "numel": 2, "dtype": "float32", "payload": 8}
    times = {"sent": 0, "received": 0, "start": 0.0}
    return Event(op=op, **fields | times | more, value=value)


def test_an_effect_comes_after_its_cause_however_many_calls_came_before() -> None:
    """Rank 1 is at its first communication when it gets what rank 0 sends with its third."""
    zero = [event("all_reduce", group=(0,)), event("all_reduce", group=(0,)), event("send", 1)]
    one = [event("recv", 0), event("all_reduce", group=(1,))]
    times = logical_times([RankRun(0, zero), RankRun(1, one)])
    assert times[1, 0] > times[0, 2]
    assert times[1, 1] > times[1, 0]


def test_a_collective_is_at_one_time() -> None:
    zero = [event("send", 1), event("all_reduce")]
    times = logical_times([RankRun(0, zero), RankRun(1, [event("all_reduce")])])
    assert times[0, 1] == times[1, 0]


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (event("broadcast", 0), "operator"),
        (event("all_reduce", group=(1, 0)), "operator"),
        (event("all_reduce", numel=3), "shape"),
        (event("all_reduce", dtype="float64"), "shape"),
        (event("all_reduce", value={"digest": "b", "first": [1, 2], "sum": 3.5}), "value"),
        (event("all_reduce", value={"digest": "b", "first": [1, math.nan], "sum": 3}), "value"),
    ],
)
def test_what_differs_is_named(other: Event, what: str) -> None:
    mine = event("all_reduce", value={"digest": "a", "first": [1, 2], "sum": 3})
    (each,) = differences([RankRun(0, [mine])], [RankRun(0, [other])], 0.0)
    assert each.what == what


def test_a_missing_rank_comes_first() -> None:
    both = [RankRun(0, [event("send", 1)]), RankRun(1, [event("recv", 0)])]
    (each,) = differences(both, both[:1], 0.0)
    assert each.text == "rank 1 is in the first run only"


def test_a_program_of_ones_own_records_itself(tmp_path: Path) -> None:
    def body(ctx: Any) -> None:
        with recorded(tmp_path / "run"):
            dist.all_reduce(torch.full((100,), float(ctx.rank)))

    run_ranks(body, 2, ledger=False)
    one, two = read_run(tmp_path / "run")
    assert (one.events[0].op, one.events[0].numel) == ("all_reduce", 100)
    assert (len(two.events[0].value["first"]), two.events[0].value["sum"]) == (64, 100.0)


BAD = {
    "no json": "no JSON",
    "[]": "no run was recorded",
    '{"distlab_run": 9, "ranks": []}': "format 9",
    '{"distlab_run": 1}': "'ranks'",
    '{"distlab_run": 1, "ranks": []}': "no recorded rank",
    '{"distlab_run": 1, "ranks": [{"rank": 0, "events": [{"op": 7}]}]}': "op of a communication",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_file_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.json") as caught:
        read_run(path)
    assert "\n" not in str(caught.value)
    if BAD[text] != "no JSON":
        assert BAD[text] in str(caught.value)


def test_the_command_says_it_and_writes_it(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"first": runs["right"], "tolerance": 0.0, "json": tmp_path / "out.json"}
    assert main(Namespace(second=runs["again"], **given), console()) == 0
    assert main(Namespace(second=runs["wrong"], **given), console()) == 1
    said = capsys.readouterr().out
    assert "no difference: 3 ranks, 18 communications" in said
    assert "first difference: rank 1, communication" in said
    assert json.loads((tmp_path / "out.json").read_text())[0]["rank"] == 1
    with pytest.raises(ValueError, match="--tolerance"):
        main(Namespace(second=runs["wrong"], **given | {"tolerance": -1.0}), console())
