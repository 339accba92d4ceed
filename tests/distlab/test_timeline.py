"""Timelines: what was computed, moved and waited for, as spans, a picture and a trace."""

from __future__ import annotations

import itertools
import json
import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.observe.log import Event, Log
from distlab.picture import (
    Span,
    chrome_trace,
    covered,
    draw,
    draw_pipeline,
    idle_share,
    shares,
    spans_of,
    trace_run,
)
from distlab.picture.spans import WAIT, overlapping, stack
from distlab.ranks import RankContext, run_ranks
from distlab.virtual import run_virtual


def event(
    op: str,
    start: float,
    end: float | None,
    *,
    peer: int | None = None,
    group: tuple[int, ...] = (0, 1, 2),
    index: int = 0,
) -> Event:
    fields = {"numel": 4, "dtype": "float32", "payload": 16, "sent": 16, "received": 16}
    return Event(op, group, peer, start=start, end=end, index=index, **fields)  # type: ignore


def logs_of(*events: list[Event], spans: tuple[tuple[str, float, float], ...] = ()) -> list[Log]:
    return [Log(rank, mine, list(spans)) for rank, mine in enumerate(events)]


def times(spans: list[Span], rank: int) -> list[tuple[str, float, float]]:
    return [(s.name, s.start, s.end) for s in spans if s.rank == rank]


def random_spans(seed: int, ranks: int, count: int) -> list[Span]:
    draws = random.Random(seed)
    spans = []
    for rank in range(ranks):
        for _ in range(count):
            start, took = draws.uniform(0, 1), draws.expovariate(100)
            lane, name = draws.choice(
                [("compute", "forward"), ("data", "data"), ("communication", "all_reduce")]
            )
            spans.append(Span(rank, lane, name, start, start + took))  # type: ignore[arg-type]
    return spans


def test_early_ranks_wait_for_the_last_in_a_collective() -> None:
    logs = logs_of(
        [event("all_reduce", 0.0, 5.0)],
        [event("all_reduce", 3.0, 5.0)],
        [event("all_reduce", 1, 5)],
    )
    spans = spans_of(logs)
    assert times(spans, 0) == [(WAIT, 0, 3), ("all_reduce", 3, 5)]
    assert times(spans, 1) == [("all_reduce", 3, 5)]
    assert times(spans, 2) == [(WAIT, 1, 3), ("all_reduce", 3, 5)]
    assert [s.peer for s in spans if s.name == WAIT] == [1, 1]
    assert "rank 1" in spans[0].detail


def test_a_rooted_collective_waits_only_where_data_is_missing() -> None:
    root = {"peer": 0, "group": (0, 1)}
    given = spans_of(
        logs_of([event("broadcast", 2, 3, **root)], [event("broadcast", 0, 3, **root)])
    )
    assert times(given, 0) == [("broadcast", 2, 3)]
    assert times(given, 1) == [(WAIT, 0, 2), ("broadcast", 2, 3)]
    early = spans_of(
        logs_of([event("broadcast", 0, 1, **root)], [event("broadcast", 2, 3, **root)])
    )
    assert [s.name for s in early] == ["broadcast", "broadcast"]
    taken = spans_of(logs_of([event("reduce", 0, 3, **root)], [event("reduce", 2, 3, **root)]))
    assert times(taken, 0) == [(WAIT, 0, 2), ("reduce", 2, 3)]
    assert times(taken, 1) == [("reduce", 2, 3)]


def test_collectives_are_matched_per_group_and_in_order() -> None:
    pair, everyone = (0, 1), (0, 1, 2)
    logs = logs_of(
        [event("all_reduce", 0, 1, group=pair), event("all_reduce", 2, 9, group=everyone, index=1)],
        [event("all_reduce", 0, 1, group=pair), event("all_reduce", 2, 9, group=everyone, index=1)],
        [event("all_reduce", 8, 9, group=everyone)],
    )
    spans = spans_of(logs)
    assert times(spans, 0) == [("all_reduce", 0, 1), (WAIT, 2, 8), ("all_reduce", 8, 9)]
    assert times(spans, 2) == [("all_reduce", 8, 9)]


def test_a_receive_waits_for_its_own_send() -> None:
    sends = [event("send", 4.0, 5.0, peer=1), event("send", 6.0, 7.0, peer=1, index=1)]
    receives = [event("recv", 0.0, 5.0, peer=0), event("recv", 6.5, 7.0, peer=0, index=1)]
    spans = spans_of(logs_of(sends, receives))
    assert times(spans, 1) == [(WAIT, 0, 4), ("recv", 4, 5), ("recv", 6.5, 7)]
    sent = [s.message for s in spans if s.name == "send"]
    assert sent == [s.message for s in spans if s.name == "recv"]
    assert len(set(sent)) == 2


def test_what_was_never_waited_for_lasts_to_the_end() -> None:
    logs = logs_of([event("send", 1.0, None, peer=1)], [event("recv", 1.0, 9.0, peer=0)])
    sent = spans_of(logs)[0]
    assert sent.end == 9
    assert "never waited for" in sent.detail


def test_neighbours_are_joined_but_not_over_a_communication() -> None:
    raw = (("backward", 0.0, 1.0), ("backward", 1.0001, 2.0), ("backward", 2.0001, 3.0))
    log = Log(0, [event("all_reduce", 2.00005, 2.00008, group=(0,))], list(raw))
    compute = [(s.start, s.end) for s in spans_of([log]) if s.lane == "compute"]
    assert compute == [(0, 2), (2.0001, 3)]
    assert spans_of([Log(0, [], [("data", 0.0, 1.0)])])[0].lane == "data"


def test_a_picture_begins_where_the_rank_says() -> None:
    log = Log(0, [], [("forward", 0.0, 1.0), ("forward", 5.0, 6.0)], picture_from=4.0)
    assert times(spans_of([log]), 0) == [("forward", 5, 6)]


@pytest.mark.parametrize("seed", range(5))
def test_a_row_holds_no_overlap_and_none_is_lost(seed: int) -> None:
    spans = random_spans(seed, 1, 200)
    placed = stack(spans)
    assert sorted(map(repr, spans)) == sorted(repr(s) for s, _ in placed)
    for row in {row for _, row in placed}:
        mine = sorted((s.start, s.end) for s, r in placed if r == row)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine))
    groups = list(overlapping(spans))
    assert sum(map(len, groups)) == len(spans)
    lengths = [max(s.end for s in g) - min(s.start for s in g) for g in groups]
    assert sum(lengths) == pytest.approx(covered(spans))


def test_a_wait_and_what_it_waited_for_share_a_row() -> None:
    first = Span(0, "communication", "recv", 0.0, 1.0)
    wait = Span(0, "communication", WAIT, 0.5, 2.0)
    moved = Span(0, "communication", "recv", 2.0, 3.0)
    rows = dict(stack([first, wait, moved]))
    assert rows[wait] == rows[moved] != rows[first]


def test_identical_spans_are_all_kept(tmp_path: Path) -> None:
    twice = [Span(0, "communication", "all_reduce", 0.0, 1.0)] * 2
    assert sorted(row for _, row in stack(twice)) == [0, 1]
    events = json.loads(chrome_trace(twice, tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == 2


def test_the_trace_is_what_viewers_expect(tmp_path: Path) -> None:
    spans = [
        Span(0, "compute", "forward", 10.0, 10.002),
        Span(
            0, "communication", "send", 10.002, 10.003, nbytes=8, peer=1, line="a.py:3", message=7
        ),
        Span(1, "communication", "recv", 10.001, 10.003, peer=0, message=7),
        Span(1, "communication", "recv", 10.002, 10.004, peer=0),
    ]
    events = json.loads(chrome_trace(spans, tmp_path / "new" / "t.json").read_text())["traceEvents"]
    named = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert named == {(0, "rank 0"), (1, "rank 1")}
    threads = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert (0, "compute") in threads
    assert {(1, "communication"), (1, "communication 2")} <= threads
    sent = next(e for e in events if e["name"] == "send")
    assert (sent["ts"], sent["dur"]) == (2000, 1000)
    assert sent["args"] == {"bytes": 8, "peer": 1, "line": "a.py:3"}
    ends = {e["ph"]: e for e in events if e["name"] == "message"}
    assert ends["s"]["id"] == ends["f"]["id"]
    assert (ends["s"]["pid"], ends["f"]["pid"]) == (0, 1)
    for key in {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}:
        mine = sorted(
            (e["ts"], e["ts"] + e["dur"])
            for e in events
            if e["ph"] == "X" and (e["pid"], e["tid"]) == key
        )
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(mine))


def test_shares_count_time_once_and_add_up() -> None:
    """Of 9 s: compute hides a part of the communication, what nothing covers is idle."""
    spans = [
        Span(0, "compute", "forward", 0.0, 3.0),
        Span(0, "communication", "all_reduce", 2.0, 4.0),
        Span(0, "communication", WAIT, 4.0, 6.0),
        Span(1, "communication", WAIT, 1.0, 2.0),
        Span(1, "compute", "backward", 1.0, 9.0),
    ]
    first, second = shares(spans).values()
    assert list(first.values()) == [34, 11, 22, 33]  # 33.3, 11.1, 22.2 and 33.3 of 9 s
    assert list(second.values()) == [89, 0, 0, 11]
    assert list(first) == ["computes", "only communicates", "only waits", "idle"]


@pytest.mark.parametrize("seed", range(3))
def test_shares_of_any_spans_add_up_to_100(seed: int) -> None:
    found = shares(random_spans(seed, 5, 40))
    assert [sum(parts.values()) for parts in found.values()] == [100] * 5
    assert min(min(parts.values()) for parts in found.values()) >= 0
    assert shares([]) == {}


def test_the_picture_names_idle_time(tmp_path: Path) -> None:
    spans = [Span(0, "compute", "forward", 0.0, 1.0), Span(1, "compute", "forward", 3.0, 4.0)]
    text = draw(spans, tmp_path / "picture.svg").read_text()
    assert text.count("<!-- 75 % -->") == 2
    assert text.count("<!-- idle -->") == 3  # at each rank, and in the legend


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [Span(3, "compute", "a new name", 1.0, 1.0)],
        [Span(0, "communication", WAIT, 0.0, 1.0, peer=1, region="r")],
        random_spans(1, 8, 250),
    ],
    ids=["none", "one instant", "only a wait", "2000 on 8 ranks"],
)
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_any_spans_can_be_drawn(spans: list[Span], suffix: str, tmp_path: Path) -> None:
    path = draw(spans, tmp_path / "new" / f"picture{suffix}", title="a picture")
    start = path.read_bytes()[:8]
    assert start == b"\x89PNG\r\n\x1a\n" if suffix == ".png" else start.startswith(b"<?xml")


def test_a_run_becomes_a_picture_and_a_trace(tmp_path: Path) -> None:
    def body(ctx: RankContext) -> None:
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dist.barrier()
        ctx.start_picture()
        model(torch.ones(4, 8)).sum().backward()
        with ctx.region("averaging"):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        if ctx.rank == 0:
            dist.send(torch.ones(1000), 1)
        else:
            dist.recv(torch.empty(1000), 0)

    results = run_ranks(body, 2)
    spans = spans_of(results)
    assert spans == spans_of(results.logs)
    for rank in range(2):
        names = [s.name for s in spans if s.rank == rank and s.name != WAIT]
        order = ["forward", "backward", "all_reduce", "optimizer", "send" if rank == 0 else "recv"]
        firsts = [names.index(name) for name in order]
        assert firsts == sorted(firsts)
        assert "barrier" not in names
    assert {s.region for s in spans if s.name == "all_reduce"} == {"averaging"}
    assert {s.nbytes for s in spans if s.name in ("send", "recv")} == {4000}
    picture, trace = trace_run(results, tmp_path / "run.png", "A run.")
    assert (picture.name, trace.name) == ("run.png", "run.json")
    assert json.loads(trace.read_text())["traceEvents"]


def test_named_spans_have_a_label_and_hide_the_operators_inside() -> None:
    def body(ctx: RankContext) -> None:
        for number in range(2):
            with ctx.span("forward", str(number)):
                time.sleep(0.01)
                torch.ones(4).sum()
        model, x = torch.nn.Linear(4, 4), torch.ones(4)
        with ctx.span("forward", "2"):
            model(x)
        model(x)

    slept = ["0", "1"]  # on virtual ranks operators take no time
    real, virtual = run_ranks(body, 2).logs, run_virtual(body, 2).logs
    for logs, want in ((real, [*slept, "2"]), (virtual, slept)):
        for rank in range(2):
            named = [s for s in spans_of(logs) if s.rank == rank and s.label]
            assert [(s.name, s.label) for s in named] == [("forward", label) for label in want]
            assert all(
                s.seconds > 0.009 for s in named if s.label in slept
            )  # or as long as it likes
            assert covered(named) == sum(s.seconds for s in named)


def test_pipeline_is_drawn_with_its_idle_share(tmp_path: Path) -> None:
    spans = [
        Span(0, "compute", "forward", 0.0, 1.0, label="0.3"),
        Span(0, "compute", "weights", 3.0, 4.0, label="2.3"),
        Span(1, "compute", "forward", 1.0, 2.0, label="1.3"),
        Span(1, "compute", "backward", 2.0, 3.0, label="3.3"),
    ]
    assert idle_share(spans) == 0.5
    path = draw_pipeline(spans, tmp_path / "new" / "pipeline.svg", "a title", 0.25)
    text = path.read_text()
    assert "<!-- a title -->" in text
    assert "<!-- bubble: 50.0% measured, 25.0% in theory -->" in text
    assert text.count("<!-- 3 -->") == len(spans)
    assert "<!-- forward, own stage 1 -->" in text
    assert draw_pipeline([], tmp_path / "none.png", "", 0.0).stat().st_size > 0
