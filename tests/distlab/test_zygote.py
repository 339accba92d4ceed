"""Ranks of GPUs are forked from a process that has asked CUDA nothing, where the grader has."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from distlab.grading import plugin
from distlab.host import gpus
from distlab.host.processes import children
from distlab.ranks import RankContext, RankFailure, process, run_ranks, start, zygote

PLACES: list[str] = []  # what this process has noted, and whoever is forked from it then


@pytest.fixture
def grader(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A grader on a machine with two GPUs; its zygote's pid. CUDA tells it then that there is none,
    as after a first backward with hidden GPUs."""
    monkeypatch.setattr(gpus, "_before", None)
    monkeypatch.setattr(gpus, "_found", 0)
    monkeypatch.setattr(gpus, "_spent", False)
    monkeypatch.setenv(gpus.VISIBLE, "4,6")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(visible()))
    monkeypatch.setattr(process, "_device", on_the_cpu)
    before = children()
    PLACES.append("before the zygote")
    zygote.prepare()
    (pid,) = children() - before
    PLACES.append("after it")
    monkeypatch.setattr(gpus, "_spent", True)
    yield pid
    zygote.end()
    PLACES.clear()
    assert children() == before


def visible() -> list[str]:
    """What this process is shown."""
    return [number for number in os.environ.get(gpus.VISIBLE, "").split(",") if number]


def on_the_cpu(rank: int, world_size: int, kind: str) -> tuple[torch.device, str]:
    gpus.show()
    return torch.device("cpu"), "gloo"


class Seen:
    """Becomes, where it is read, what is visible there: as if a module of the task had asked."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return visible, ()


def train(ctx: RankContext, factor: float, seen: Seen) -> list[object]:
    x = torch.ones(3, requires_grad=True)
    (factor * x).sum().backward()
    assert x.grad is not None
    dist.all_reduce(x.grad)
    return [x.grad.tolist(), seen, visible(), list(PLACES), os.getppid(), os.environ.get("ADDED")]


def test_ranks_are_forked_from_it(grader: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.ones(3, requires_grad=True).sum().backward()  # from here on no fork of this one could
    assert "no GPU" in start.fork_problem("cuda")
    monkeypatch.setenv("ADDED", "later")
    for factor in (2.0, 3.0):
        results = run_ranks(train, 2, factor, Seen(), device="cuda")
        both = ["4", "6"]
        shown = [[2 * factor] * 3, both, both, ["before the zygote"], os.getpid(), "later"]
        assert [*results] == [shown, shown]
        assert len(results.logs[1].events) == 1
    assert grader in children()


def test_closures_and_what_they_print(grader: int) -> None:
    def body(ctx: RankContext) -> int:
        print("rank", ctx.rank, "of", grader)
        return ctx.rank + grader

    results = run_ranks(body, 2, device="cuda")
    assert [*results] == [grader, grader + 1]
    for rank, output in enumerate(results.output):  # torch 2.8 prints a line of gloo's before
        assert output.endswith(f"rank {rank} of {grader}\n")


def test_the_death_of_a_rank_is_told(grader: int) -> None:
    def body(ctx: RankContext) -> None:
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankFailure, match="SIGKILL") as caught:
        run_ranks(body, 2, device="cuda")
    assert caught.value.rank == 1


def test_where_it_is_gone_there_is_none(grader: int) -> None:
    os.kill(grader, signal.SIGKILL)
    while zygote.fork((), 0, 1) is not None:
        pass
    assert zygote.current() is None
    assert grader not in children()


@pytest.mark.parametrize(("tiers", "made"), [(["virtual", "gloo"], 0), (["gloo", "cuda"], 1)])
def test_the_grader_makes_it_before_the_first_check_on_gpus(
    tiers: list[str], made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(plugin.zygote, "prepare", lambda: calls.append(1))
    items = [SimpleNamespace(callspec=SimpleNamespace(params={"tier": tier})) for tier in tiers]
    config = SimpleNamespace(stash={plugin.SESSION: SimpleNamespace(view=None)})
    plugin.pytest_collection_finish(SimpleNamespace(items=items, config=config))
    assert sum(calls) == made


def test_on_the_cpu_there_is_none() -> None:
    before = children()
    zygote.prepare()
    assert children() == before
    assert zygote.current() is None
