"""Checks of exercise 3.11: buffers and checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from distlab.grading import exercise, expect_close, expect_equal, fail, trace
from distlab.reference.workloads import digits

# -- buffers --------------------------------------------------------------------------------------
LARGE = 2**53 + 1  # no float64 holds it
NAMES = [*(name for k in range(6) for name in (f"calls{k}", f"mean{k}"))]
NAMES += ["rough", "phase", "flag"]
LISTS = 3 + 3 + 1 + 1 + 1  # 144 B of int64, 144 B of float32, and one of three, 48 B at a time


class Counting(nn.Module):
    """Counts its calls in buffers of five dtypes, by rank; ``seen`` notes what it found."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        for k in range(6):
            self.register_buffer(f"calls{k}", torch.full((3,), LARGE))
            self.register_buffer(f"mean{k}", torch.zeros(2, 3).t(), persistent=k % 2 == 0)
        self.register_buffer("rough", torch.zeros(1, dtype=torch.bfloat16))
        self.register_buffer("phase", torch.zeros(1, dtype=torch.complex64))
        self.quiet = nn.Module().eval()  # as a frozen norm; the first ranks' stay as they are
        self.quiet.register_buffer("flag", torch.tensor(False))
        self.seen: list[list[list[float]]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rank = dist.get_rank()
        self.seen.append([b.flatten().tolist() for b in self.buffers()])
        self.rough = self.rough + (rank + 1)  # another tensor, as some modules do
        for b in [*self.buffers()][:-3]:
            b += rank + 1
        self.quiet.flag |= rank > 1
        self.phase += 1j * (rank > 1)
        return self.layer(x)


def counted(calls: int, members: Sequence[int]) -> list[list[float]]:
    """The counts of the first rank."""
    more = calls * (members[0] + 1)
    return [[LARGE + more] * 3, [more] * 6] * 6 + [[more], [0j], [False]]


@exercise("3.11", "virtual", asserts="buffers buffers-cost training-mode dtype layout group")
def test_training_forward_reads_the_first_ranks_buffers(impl, run):
    """Before each forward, few messages for each dtype; not in evaluation, nor in no_sync."""
    groups = [1, 3], [0, 2]

    def body(ctx):
        group = [dist.new_group(members) for members in groups][ctx.rank % 2 == 0]
        model = Counting()
        wrapped = impl.DDP(model, group=group, bucket_bytes=48, first_bucket_bytes=16)
        for step in range(3):
            wrapped.training = step > 0  # the wrapper's own mode does not count
            with ctx.region("training"):
                loss = wrapped(torch.ones(2, 2)).sum()
            loss.backward()
        trained = model.seen[:]
        model.eval()
        with ctx.region("alone"), torch.no_grad():
            wrapped(torch.ones(2, 2))
        model.train()
        with ctx.region("alone"), wrapped.no_sync():
            wrapped(torch.ones(2, 2)).sum().backward()
        wrapped(torch.ones(2, 2)).sum().backward()
        plain = impl.DDP(nn.Linear(2, 1), group=group)
        with ctx.region("alone"):
            plain(torch.ones(2, 2))
        return trained, model.seen[-1]

    results = run(body, 4)
    for rank, (trained, last) in enumerate(results):
        members = groups[rank % 2 == 0]
        first = results[members[0]]
        found, firsts = [*trained, last], [*first[0], first[1]]
        alone = [counted(k, members) for k in (0, 1, 2, 5)]
        for call, one, its, right in zip((1, 2, 3, 6), found, firsts, alone, strict=True):
            for name, *values in zip(NAMES, one, its, right, strict=True):
                what = f"{name} that forward {call} finds: "
                said = f"{what}that of the group's first rank"
                expect_equal(values[0], values[1], what=said, rank=rank, cause="buffers-differ")
                said = f"{what}what the first rank had counted"
                expect_equal(values[0], values[2], what=said, rank=rank, cause="buffers-mixed")
        log = results.logs[rank]
        if log.select(region="alone").events:
            fail(
                f"rank {rank} communicates in evaluation, inside no_sync or without buffers",
                rank=rank,
                cause="sends-alone",
            )
        sent = log.select(region="training").messages
        if sent > 3 * LISTS:
            fail(
                f"rank {rank} issued {sent} messages before 3 forwards, expected {3 * LISTS}: one "
                "for each bucket_bytes of a dtype",
                rank=rank,
                cause="too-many-messages",
            )


# -- checkpoints ----------------------------------------------------------------------------------
def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters()}


class Checkpointed(nn.Module):
    """Three layers in reentrant checkpoints; two of them may be the same layer."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))
        self.order = (self.one, self.two, self.one if shared else self.three)
        self.double()

    def forward(self, x: torch.Tensor) -> Mapping[str, tuple[list[torch.Tensor]]]:
        for layer in self.order:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        outputs = {"first": x + 1, "outputs": ([3 * x],), "last": 2 * x}
        return MappingProxyType(outputs)  # a mapping that is no dictionary


def checkpointed(shared: bool) -> Checkpointed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Checkpointed(shared)


def samples(seed: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + rank)
    return torch.randn(5, 4, generator=generator, dtype=torch.float64).requires_grad_()


def chosen(outputs: Mapping[str, Any], name: str) -> torch.Tensor:
    """One of the outputs, wherever it stands."""
    return outputs[name][0][0] if name == "outputs" else outputs[name]


@exercise("3.11", "virtual", asserts="outermost cost")
def test_checkpoints_reduce_once(impl, run, seed, cases):
    """Reentrant checkpoints run backward inside backward: the end of the first is not the end."""
    for output in cases("outputs", "first", "last"):

        def body(ctx):
            model, x = checkpointed(shared=False), samples(seed, ctx.rank)
            wrapped = impl.DDP(model, bucket_bytes=100, first_bucket_bytes=100)
            for step in range(2):
                wrapped.zero_grad()
                with wrapped.no_sync() if step else contextlib.nullcontext():  # for forward alone
                    outputs = wrapped(x)
                with ctx.region(f"step {step}"):
                    chosen(outputs, output).square().sum().backward()
            return gradients(model)

        parts = []
        for rank in range(2):
            alone = checkpointed(shared=False)
            chosen(alone(samples(seed, rank)), output).square().sum().backward()
            parts.append(gradients(alone))
        results = run(body, 2)
        for rank, got in enumerate(results):
            part = results.logs[rank].select(region="step 1")
            need = sum(g.nbytes for g in got.values())
            part.sent_at_most(need + 16, "2(W-1)/W of the trainable bytes, W = 2, once")
            for name in got:
                each = [p[name] for p in parts]
                expect_close(
                    got[name],
                    torch.stack(each).mean(0),
                    what=f"checkpointed, loss of the output {output!r}: {name}",
                    rank=rank,
                    contributions=each,
                    rtol=1e-9,
                    atol=1e-11,
                )


@exercise("3.11", "virtual", asserts="twice refusals alone told")
def test_a_gradient_that_is_complete_twice_is_an_error(impl, run, cases):
    """A layer in two reentrant checkpoints, on all ranks or on one: RuntimeError there."""
    for sharing in cases([0, 1], [1]):

        def body(ctx):
            sizes = {"bucket_bytes": 100, "first_bucket_bytes": 100}
            model = checkpointed(shared=True)
            wrapped = impl.DDP(model, agree=True, **sizes)
            if ctx.rank not in sharing:
                model.order = (model.one, model.two, model.three)
            said = []
            for _ in range(2):
                outputs = wrapped(torch.ones(2, 4).double().requires_grad_())["outputs"][0][0]
                try:
                    outputs.sum().backward()
                    said.append("nothing")
                except impl.StepAborted:
                    said.append("StepAborted")
                except RuntimeError:
                    said.append("RuntimeError")
                if ctx.rank in sharing:
                    wrapped.abort()
            return said

        for rank, said in enumerate(run(body, 2)):
            want = "RuntimeError" if rank in sharing else "StepAborted"
            for each in said:
                if each == want:
                    continue
                fail(
                    f"rank {rank} raised {each}, expected {want}: on rank {sharing[-1]} a "
                    "gradient was complete twice in one backward, after its bucket may have left",
                    cause="twice-accepted" if rank in sharing else "failure-not-told",
                    rank=rank,
                )


@trace("3.11")
def trace_window(impl):
    """Two steps of two micro-batches: nothing leaves in the first; the ranks agree at the end."""
    digits()

    def body(ctx):
        images, labels = digits()[64 * ctx.rank : 64 * ctx.rank + 64]
        wide = [layer for _ in range(4) for layer in (nn.Linear(768, 768), nn.ReLU())]
        layers = nn.Flatten(), nn.Linear(64, 768), nn.BatchNorm1d(768), *wide, nn.Linear(768, 10)
        model = nn.Sequential(*layers)
        wrapped = impl.DDP(model, bucket_bytes=2_500_000, first_bucket_bytes=1_000_000, agree=True)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        for step in range(4):
            if step == 2:
                dist.barrier()
                ctx.start_picture()
            optimizer.zero_grad()
            with wrapped.no_sync():
                F.cross_entropy(wrapped(images[:32]), labels[:32]).backward()
            F.cross_entropy(wrapped(images[32:]), labels[32:]).backward()
            optimizer.step()

    return body
