"""The ledger sees every communication, by whatever name, with its bytes, line and completion."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from distlab.observe.failure import CheckFailed
from distlab.observe.log import Event, Log, expect_same_sequence, readable, traffic
from distlab.observe.recorder import Ledger
from distlab.picture import chrome_trace, draw, spans_of
from distlab.ranks import RankContext, run_ranks
from distlab.virtual import run_virtual


def logs_of(body, world_size: int = 3, **options) -> list[Log]:
    return run_ranks(body, world_size, learner_files=(__file__,), **options).logs


def test_every_operator_is_recorded_with_its_bytes() -> None:
    def body(ctx: RankContext) -> None:
        w, x = ctx.world_size, torch.ones(6)
        dist.all_reduce(x)
        dist.broadcast(x, 1)
        dist.reduce(x, 2)
        dist.all_gather([torch.empty(6) for _ in range(w)], x)
        dist.all_gather_into_tensor(torch.empty(18), x)
        dist.reduce_scatter_tensor(torch.empty(2), x)
        dist.all_to_all_single(torch.empty(6), x)
        dist.gather(x, [torch.empty(6) for _ in range(w)] if ctx.rank == 0 else None, 0)
        dist.scatter(torch.empty(6), [x] * w if ctx.rank == 0 else None, 0)
        dist.barrier()

    logs = logs_of(body)
    ops = [e.op for e in logs[0].events]
    assert ops == [
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "gather",
        "scatter",
        "barrier",
    ]
    # N = 24 bytes, W = 3
    assert [(e.sent, e.received) for e in logs[0].events] == [
        (32, 32),
        (0, 24),
        (24, 0),
        (48, 48),
        (48, 48),
        (16, 16),
        (16, 16),
        (0, 48),
        (48, 0),
        (0, 0),
    ]
    assert (logs[1].events[1].sent, logs[2].events[2].received) == (24, 24)
    assert all("test_ledger.py" in e.line for e in logs[0].events)
    assert all(e.end is not None and e.end >= e.start for e in logs[0].events)
    assert logs[0].messages == 9
    expect_same_sequence(logs)


def test_no_alias_escapes() -> None:
    def body(ctx: RankContext) -> None:
        x = torch.ones(4)
        hidden = dist.distributed_c10d.all_reduce
        hidden(x)
        group = dist.group.WORLD
        assert group is not None
        group.allreduce([x]).wait()
        group._get_backend(torch.device("cpu")).allreduce([x]).wait()
        functional.all_reduce(x, "sum", group).sum()
        thread = threading.Thread(target=dist.all_reduce, args=(x,))
        thread.start()
        thread.join()
        y = torch.ones(4, requires_grad=True)
        y.register_hook(lambda grad: dist.all_reduce(grad.clone()))
        y.sum().backward()

    for log in logs_of(body, 2):
        assert [e.op for e in log.events] == ["all_reduce"] * 6
        assert log.events[-1].phase == "backward"
        assert not log.unwaited


def test_unwaited_and_overwritten_are_seen() -> None:
    def body(ctx: RankContext) -> None:
        other = 1 - ctx.rank
        x = torch.ones(10)
        received = dist.irecv(torch.empty(10), other)
        sent = dist.isend(x, other)
        x += 1
        sent.wait()
        received.wait()
        dist.all_reduce(torch.ones(2), async_op=True)
        time.sleep(0.05)

    for log in logs_of(body, 2):
        assert [e.op for e in log.unwaited] == ["all_reduce"]
        with pytest.raises(CheckFailed) as caught:
            log.all_waited()
        assert caught.value.cause == "overwritten-in-flight"


def batches_as_nccl_makes_them() -> None:
    """A batch's messages start as ever; one handle, which its end gives, stands for all."""
    group, works = dist.ProcessGroup, []
    wait = dist.Work.wait

    def collected(original):
        def call(*args):
            works.append(original(*args))
            return works[-1]

        return call

    def end(_, device: torch.device) -> dist.Work:
        *others, last = works
        for work in others:
            wait(work)
        works.clear()
        return last

    group.send, group.recv = collected(group.send), collected(group.recv)
    group._start_coalescing, group._end_coalescing = lambda *_: works.clear(), end
    torch._C._distributed_c10d.Backend.supports_coalescing = property(lambda _: True)


def test_the_handle_of_a_batch_is_for_all_its_messages() -> None:
    def body(ctx: RankContext, waits: bool) -> tuple[list[str], int, int]:
        batches_as_nccl_makes_them()
        other, two = 1 - ctx.rank, torch.zeros(2, 3)
        with Ledger() as ledger:
            batch = [dist.P2POp(dist.irecv, row, other) for row in two]
            batch += [dist.P2POp(dist.isend, torch.full((3,), 1.0 + k), other) for k in range(2)]
            handles = dist.batch_isend_irecv(batch)
            if waits:
                handles[0].wait()
            dist.all_reduce(torch.ones(1), async_op=True).wait()  # beside the batch
        unwaited = Log(ctx.rank, ledger.events, []).unwaited
        return [e.op for e in ledger.events], len(unwaited), len(handles)

    ops = ["recv", "recv", "send", "send", "all_reduce"]
    for waits, left in ((True, 0), (False, 4)):
        assert list(run_ranks(body, 2, waits, ledger=False)) == [(ops, left, 1)] * 2


def test_a_future_that_was_waited_for_has_ended() -> None:
    """Whoever waits for a future goes on, perhaps to the end, before its callbacks are called."""

    def body(ctx: RankContext) -> None:
        end = ctx.ledger.end

        def late(event: Event) -> None:
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.5)
            end(event)

        ctx.ledger.end = late
        dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()

    for log in run_ranks(body, 2).logs:
        assert not log.unwaited


@pytest.mark.parametrize("runner", [run_ranks, run_virtual])
def test_writing_beside_what_is_sent_is_no_overwriting(runner) -> None:
    """Pipelines write to one part of a tensor while another is in flight."""

    def body(ctx: RankContext, beside: bool) -> None:
        x = torch.ones(10)
        other = 1 - ctx.rank
        received = dist.irecv(torch.empty(5), other)
        sent = dist.isend(x[:5], other)
        x[5:].add_(1) if beside else x[4:].add_(1)
        sent.wait()
        received.wait()

    for beside in (True, False):
        for log in runner(body, 2, beside).logs:
            assert [e.overwritten for e in log.events if e.op == "send"] == [not beside]


def test_subgroups_and_regions() -> None:
    def body(ctx: RankContext) -> None:
        group = dist.new_group([0, 2])
        if ctx.rank != 1:
            with ctx.region("inside"):
                dist.broadcast(torch.ones(3), 2, group=group)

    logs = logs_of(body)
    event = logs[0].select(region="inside").events[0]
    assert (event.group, event.peer, event.received) == ((0, 2), 2, 12)
    assert logs[1].select(region="inside").events == []


def make(op: str, sent: int = 0, **fields: object) -> Event:
    values = {"group": (0, 1), "peer": None, "numel": 1, "dtype": "float32", "payload": 4}
    return Event(op=op, sent=sent, received=0, start=0.0, **(values | fields))  # type: ignore


def test_assertions_are_readable() -> None:
    log = Log(1, [make("all_reduce", 4000, end=1.0), make("send", 100, peer=0)], [])
    with pytest.raises(CheckFailed, match="rank 1 used all_reduce, which this exercise forbids"):
        log.forbid("all_reduce")
    with pytest.raises(CheckFailed, match=r"too many bytes: 4,100 B, expected at most 3,000 B = N"):
        log.sent_at_most(3000, "N")
    with pytest.raises(CheckFailed, match="too few bytes"):
        log.sent_at_least(5000)
    with pytest.raises(CheckFailed, match="never waited"):
        log.all_waited()
    log.sent_at_most(4100)
    log.sent_at_least(4100)
    other = Log(0, [make("all_reduce"), make("barrier")], [])
    with pytest.raises(CheckFailed) as caught:
        expect_same_sequence([other, log])
    assert caught.value.cause == "mismatch"
    assert readable(1234567) == "1.23 MB"


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_what_is_sent_is_received(world_size: int) -> None:
    """Over all ranks, each operator receives as many bytes as it sends."""
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        ranks = [traffic(op, world_size, 40, is_root=r == 0) for r in range(world_size)]
        assert sum(s for s, _ in ranks) == sum(r for _, r in ranks)
    assert traffic("all_reduce", 1, 40, is_root=True) == (0, 0)


def test_pictures_and_traces(tmp_path) -> None:
    def body(ctx: RankContext) -> None:
        layer = torch.nn.Linear(8, 8)
        for _ in range(2):
            layer(torch.ones(4, 8)).sum().backward()
            dist.all_reduce(layer.weight.grad)

    spans = spans_of(logs_of(body, 2))
    names = {s.name for s in spans}
    assert {"forward", "backward", "all_reduce"} <= names
    png = draw(spans, tmp_path / "t.png", "test")
    svg = draw(spans, tmp_path / "t.svg", "test")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()[:2000]
    chrome_trace(spans, tmp_path / "t.json")
