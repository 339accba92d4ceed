"""The answers to phase 4's small cases: each is computed, and stands in its folded answer."""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.ranks import RankContext
from distlab.virtual import run_virtual
from given import safe_format
from given.profile_files import Span, Trace
from given.safe_format import write_trees
from solutions.phase1_data_parallel.data_loader import ShardedBatchSampler, ShardedSampler
from solutions.phase4_production import profile_reading
from solutions.phase4_production.checkpoint_folder import ASIDE, CheckpointFolder
from solutions.phase4_production.elastic import chunk_of
from solutions.phase4_production.elastic_sampler import ElasticSampler, loss_weight
from solutions.phase4_production.fault_tolerance import CheckpointError, CheckpointStore
from solutions.phase4_production.flops import count_flops
from solutions.phase4_production.joining import fresh_store
from solutions.phase4_production.monitoring import covered
from solutions.phase4_production.sinks import find_bottleneck
from solutions.phase4_production.watchdog import Beat, Watchdog
from tests.guidelines.folded import answer, cases, says, sections


def virtual(body: Callable[[RankContext], Any], ranks: int) -> list[Any]:
    return [*run_virtual(body, ranks, learner_files=(__file__,))]


def test_every_exercise_has_a_case_with_an_answer() -> None:
    assert cases(4) == {name for name in sections(4) if name[0].isdigit()}
    assert all(answer(4, name) for name in cases(4))


class Killed(BaseException):
    """The process ends before the next operation."""


def loaded_after(monkeypatch: pytest.MonkeyPatch, root: Path, last: int) -> tuple[int, list[int]]:
    """Operations of a save that is killed after number ``last``; the steps to load then."""
    files = CheckpointFolder(root)
    root.mkdir()
    done = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            if done == last:
                raise Killed
            done += 1
            return call(*args, **kwargs)

        return act

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", counted(Path.mkdir))
        patch.setattr(os, "fsync", counted(os.fsync))
        patch.setattr(os, "rename", counted(os.rename))
        patch.setattr(safe_format, "open", counted(open), raising=False)
        try:
            name = files.begin(1)
            entries = write_trees(root / (name + ASIDE), {"state": {"x": torch.ones(2)}})
            files.finish(name, {"step": 1, "score": None, "files": entries})
        except Killed:
            pass
    return done, files.steps()


def test_4_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    total, steps = loaded_after(monkeypatch, tmp_path / "all", 99)
    assert steps == [1]
    survive = [k for k in range(total + 1) if loaded_after(monkeypatch, tmp_path / f"{k}", k)[1]]
    says(4, "4.1", f"after {survive[0]} loads", f"needs {total}", f"{total} flush the folder")


def test_4_15(tmp_path: Path) -> None:
    def body(ctx: RankContext) -> int:
        store, reached = CheckpointStore(tmp_path), 0
        agree = store._agree

        def counted(action: Callable[[], Any]) -> list[Any]:
            nonlocal reached
            reached += 1
            return agree(action)

        store.save(1, {"x": torch.ones(2)})
        store._agree = counted  # type: ignore[method-assign]
        with pytest.raises(CheckpointError):  # what can't be saved fails like a full disk
            store.save(2, {"x": torch.ones(2)}, {"x": object()} if ctx.rank else None)
        return reached

    (reached,) = set(virtual(body, 2))
    assert reached == 3
    assert [p.name for p in tmp_path.iterdir()] == ["000001-step-00000001"]
    says(4, "4.15", "Each rank reaches three", "nothing of the new one")


def test_4_16() -> None:
    seeds = [(epoch, i) for epoch in range(3) for i in range(3) if epoch + i == 2]
    says(4, "4.16", "Samples {}, {} and {} of epochs 0, 1 and 2".format(*(i for _, i in seeds)))


def test_4_2() -> None:
    sampler = ShardedSampler(22, rank=1, world_size=2, shuffle=False)
    steps = [*ShardedBatchSampler(sampler, 2)]
    epoch, batch = divmod(8, len(steps))
    says(4, "4.2", f"{len(sampler)} samples", f"{len(steps)} steps", f"of {len(steps[-1])} sample")
    says(4, "4.2", f"epoch {epoch}, batch {batch}", f"2·2 = {sum(map(len, steps[:batch]))} entries")
    says(4, "4.2", "positions {} and {}".format(*steps[batch]))


def test_4_3() -> None:
    size, memory, disk, step = 10, 20, 1, 0.5
    says(4, "4.3", f"{size / disk:.0f} s", f"{size / memory} s", f"{size / disk / step:.0f} steps")


def test_4_18() -> None:
    samplers = [
        ElasticSampler(10, global_batch_size=4, rank=r, world_size=3, shuffle=False)
        for r in range(3)
    ]
    for sampler in samplers:
        sampler.skip = 4
    first, second = zip(*samplers, strict=True)
    (a, b), (c,), (d,) = first
    says(4, "4.18", f"rank 0 gets {a} and {b}, rank 1 gets {c}, rank 2 gets {d}")
    (e,), (f,), nothing = second
    assert nothing == []
    says(4, "4.18", f"{e}, {f} and none")
    for parts in (first, second):
        size = sum(map(len, parts))
        says(4, "4.18", ", ".join(f"{loss_weight(len(part), size, 3):g}" for part in parts))


def test_4_4() -> None:
    for rank in range(3):
        mine = set(chunk_of(10, 3, rank))
        a, b = [old for old in range(4) if mine & set(chunk_of(10, 4, old))]
        says(4, "4.4", f"old shards {a} and {b}")


def test_4_5() -> None:
    counts = ((15, "running"), (14, "running"), (15, "done"))
    beats = [Beat(attempt="", host="h", pid=1, count=n, status=status) for n, status in counts]
    watchdog, ended = Watchdog.__new__(Watchdog), []
    watchdog.timeout = 60.0
    watchdog._end = lambda what, blamed, silent: ended.append(blamed)  # type: ignore[method-assign]
    watchdog._judge(beats, {0: 61.0, 1: 5.0, 2: 70.0})
    ((blamed,),) = ended
    says(4, "4.5", f"the report names rank {blamed}")


def test_4_13() -> None:
    store = dist.HashStore()
    for key in ("hello/0", "hello/1", "call", "answer/1"):
        store.set(key, '["old 0", "old 1"]' if key == "call" else "old 0")
    with pytest.raises(TimeoutError):
        fresh_store(store, 1, 2, 0.1)
    assert store.get("answer/1") == b"old 0"
    assert store.get("hello/1") != b"old 0"
    says(4, "4.13", "so it does not answer")


def test_4_14() -> None:
    done: Counter[int] = Counter()
    saved = 0
    for dies_in, dies_saving in ((11, 0), (0, 12), (0, 0)):
        for step in range(saved + 1, 15):
            if step == dies_in:
                break
            done[step] += 1
            if step == dies_saving:
                break
            if step % 4 == 0:
                saved = step
    times = {n: [step for step in range(1, 13) if done[step] == n] for n in (1, 2, 3)}
    assert times == {1: [*range(1, 9)], 2: [11, 12], 3: [9, 10]}
    says(4, "4.14", "1 to 8 are done once, 9 and 10 three times, 11 and 12 twice")


def test_4_10() -> None:
    for speed in (1, 2):
        first = (20.0, 20 + 30 / speed)
        begin = max(45.0, first[1])
        flights = [first, (begin, begin + 40 / speed)]
        exposed = max(0.0, flights[1][1] - 60)
        says(4, "4.10", f"{exposed:.0f} ms", f"{covered(flights) - exposed:.0f} ms")


def test_4_17() -> None:
    model, x = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), torch.zeros(4, 5)
    everything = count_flops(model, x)
    for p in model[0].parameters():
        p.requires_grad_(False)
    frozen = count_flops(model, x)
    for p in model.parameters():
        p.requires_grad_(False)
    forward = count_flops(model, x)
    says(
        4, "4.17", f"= {forward}", f"weight: {everything - forward}", f"weight: {frozen - forward}"
    )


def test_4_11() -> None:
    own = [10.0, 10.0, 11.0, 20.0]
    median = statistics.median(own[:3])
    mad = statistics.median(abs(x - median) for x in own[:3])
    sigma = statistics.stdev(own)
    says(4, "4.11", f"median is {median:g}", f"MAD {mad:g}", f"{statistics.mean(own)} ms")
    says(4, "4.11", f"{sigma:.2f} ms", f"{(20 - statistics.mean(own)) / sigma:.2f}")
    assert [w for w in range(2, 30) if (w - 1) / math.sqrt(w) < 3][-1] == 10


def test_4_19() -> None:
    host, stream = (1, 1), (0, 7)
    kernels = [(30, 60, 26), (75, 80, 74), (90, 95, 89)]
    spans = [
        Span("step", "step", host, 0, 100, 0),
        Span("data", "data", host, 0, 25, 0),
        Span("optimizer", "optimizer", host, 70, 100, 70),
        *(Span("compute", "kernel", stream, *times) for times in kernels),
        Span("communication", "all-gather", (0, 20), 50, 70, 48),
    ]
    trace = Trace(tuple(spans))
    found = profile_reading.parts(trace)
    assert sum(found.values()) == 100
    for name in ("compute", "communication", "data", "optimizer", "launch"):
        assert f"{name} {found[name]} µs" in answer(4, "4.19").lower()
    second, third = (launch - end for (_, end, _), (_, _, launch) in pairwise(kernels))
    says(4, "4.19", f"74 - 60 = {second} µs", f"89 - 80 = {third} µs")
    says(4, "4.19", f"so {profile_reading.launch_gaps(trace)[stream]} µs")
    worst = profile_reading.bottleneck(trace)
    says(4, "4.19", f"is {worst.part}, with {worst.amount} of {worst.whole} µs")


def test_4_12() -> None:
    own, waits = (1.0, 1.0, 2.0, 1.0), (1.1, 1.1, 0.1, 1.1)
    record = {f"own_seconds_rank{r}": seconds for r, seconds in enumerate(own)} | {
        "stragglers": [2],
        "step_seconds": own[0] + waits[0],
        "data_seconds": 0.0,
        "exposed_communication_seconds": statistics.mean(waits),
        "least_exposed_communication_seconds": min(waits),
        "memory_share": 0.0,
        **dict.fromkeys(("forward_seconds", "backward_seconds", "optimizer_seconds"), 0.0),
    }
    shares = find_bottleneck([record]).shares
    says(4, "4.12", f"{shares['straggler']:.0%}".replace("%", " %"))
    says(4, "4.12", f"{shares['communication']:.0%}".replace("%", " %"))
    says(
        4,
        "4.12",
        f"{statistics.mean(waits):.2f} s",
        f"{statistics.mean(waits) / 2.1:.0%}".replace("%", " %"),
    )
