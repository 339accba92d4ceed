"""The cost of virtual ranks: time by number of messages, and a large data-parallel step."""

from __future__ import annotations

import resource
import time

import torch
import torch._dynamo  # imported by torch.optim: once here
import torch.distributed as dist

from distlab.ranks import RankContext
from distlab.simulate.plan import Plan
from distlab.simulate.prediction import simulate
from distlab.virtual import run_virtual

from .common import Table

RINGS = (16, 64, 256, 1024)
NUMEL = 16  # of one chunk: messages are measured, not arithmetic


def ring(ctx: RankContext) -> float:
    """A plain ring all-reduce from isend and recv: 2(W-1) messages per rank."""
    w, r = ctx.world_size, ctx.rank
    chunks, buffer = list(torch.ones(w * NUMEL).chunk(w)), torch.empty(NUMEL)
    for step in range(2 * (w - 1)):
        send, receive = (r - step) % w, (r - step - 1) % w
        handle = dist.isend(chunks[send], (r + 1) % w)
        dist.recv(buffer, (r - 1) % w)
        handle.wait()
        if step < w - 1:
            chunks[receive].add_(buffer)
        else:
            chunks[receive].copy_(buffer)
    return float(chunks[0][0])


def _peak_gib() -> float:
    """Most memory that a child of this process has used so far."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20


def measure(repeats: int = 3) -> Table:
    """Seconds of wall clock, best of ``repeats`` where that is short."""
    rows = []
    for world_size in RINGS if repeats > 1 else RINGS[:2]:
        times = []
        for _ in range(repeats if world_size < 1000 else 1):
            begun = time.perf_counter()
            results = run_virtual(ring, world_size, ledger=False, timeout=600)
            times.append(time.perf_counter() - begun)
            assert results[-1] == world_size
        messages = 2 * (world_size - 1) * world_size
        each = min(times) / messages * 1e6
        what = f"ring all-reduce, {world_size} ranks"
        rows.append([what, f"{messages:,}", f"{min(times):.2f}", f"{each:.0f} µs"])
    gpus = 256 if repeats > 1 else 4
    begun = time.perf_counter()
    (answer,) = simulate(Plan(model="resnet50", gpus=(gpus,), cluster="dgx-h100"))
    took = time.perf_counter() - begun
    what = f"two data-parallel steps of ResNet-50, {gpus} GPUs (meta tensors)"
    rows.append([what, "", f"{took:.1f}", f"{_peak_gib():.2f} GiB at most"])
    assert answer.gpus == gpus
    return Table(
        "Virtual ranks: wall clock",
        ["what", "messages", "seconds", "per message, or memory"],
        rows,
        f"Best of {repeats} runs (1,024 ranks: one run). Goals: 0.5 s for 64 ranks, 2 s for 256 "
        "and 15 s for 1,024. A step of ResNet-50 on 256 GPUs may take 60 s and 4 GB. The goals "
        "for 256 and 1,024 ranks leave 15 µs and 7 µs for a message. Tried: greenlets instead "
        "of threads take 63 µs where threads take 79 µs. But PyTorch keeps the gradient mode, "
        "the table of groups and the engine of autograd by thread: one rank's `no_grad` held "
        "for all, and backward with a hook that communicates failed. With a process group that "
        "does nothing, PyTorch's own `isend` and `irecv` with their waits take 3.7 µs for a "
        "message, `send` and `recv` 7.0 µs, and the addition 1.2 µs. The rest is for copying, "
        "the clock, matching and two changes of the rank.",
    )


if __name__ == "__main__":
    print(measure().markdown())
