"""Checks of exercise 3.11: buffers and checkpoints."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from distlab.grading import exercise, expect_close, expect_equal, fail, trace
from distlab.reference.workloads import digits


# -- buffers --------------------------------------------------------------------------------------
class Counting(nn.Module):
    """Counts its calls in buffers of two dtypes, by rank; ``seen`` notes what it found."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        for k in range(6):
            self.register_buffer(f"calls{k}", torch.zeros(3, dtype=torch.int64))
            self.register_buffer(f"mean{k}", torch.zeros(2), persistent=k % 2 == 0)
        self.seen: list[list[float]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rank = dist.get_rank()
        self.seen.append([float(b.sum()) for b in self.buffers()])
        for b in self.buffers():
            b += rank + 1
        return self.layer(x)


@exercise("3.11", "virtual")
def test_training_forward_reads_the_first_ranks_buffers(impl, run):
    """Before each forward, in two messages for two dtypes; not in evaluation, nor in no_sync."""

    def body(ctx):
        model = Counting()
        wrapped = impl.DDP(model)
        for _ in range(3):
            with ctx.region("training"):
                loss = wrapped(torch.ones(2, 2)).sum()
            loss.backward()
        trained = model.seen[:]
        wrapped.eval()
        with ctx.region("alone"), torch.no_grad():
            for _ in range(1 + ctx.rank):  # ranks have different numbers of batches
                wrapped(torch.ones(2, 2))
        wrapped.train()
        with ctx.region("alone"), wrapped.no_sync():
            wrapped(torch.ones(2, 2)).sum().backward()
        wrapped(torch.ones(2, 2)).sum().backward()
        return trained, model.seen[-1]

    results = run(body, 3)
    alone = [[3.0 * calls, 2.0 * calls] * 6 for calls in (0, 1, 2, 5)]  # what rank 0 has counted
    for rank, (trained, last) in enumerate(results):
        what = "buffers that forward finds"
        expect_equal(trained, results[0][0], what=what, rank=rank, cause="buffers-differ")
        expect_equal(last, results[0][1], what=what, rank=rank, cause="buffers-differ")
        what = "buffers that forward finds: the first rank's own, not a mean over the ranks"
        expect_equal([*trained, last], alone, what=what, rank=rank, cause="buffers-mixed")
        log = results.logs[rank]
        if log.select(region="alone").events:
            fail(
                f"rank {rank} communicates in evaluation or inside no_sync",
                rank=rank,
                cause="sends-alone",
            )
        if log.select(region="training").messages > 3 * 2:
            fail(
                f"rank {rank} issued {log.select(region='training').messages} messages before 3 "
                "forwards for buffers of two dtypes: join them",
                rank=rank,
                cause="too-many-messages",
            )


# -- checkpoints ----------------------------------------------------------------------------------
def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters()}


class Checkpointed(nn.Module):
    """Three layers in reentrant checkpoints; two of them may be the same one."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))
        self.order = (self.one, self.two, self.one if shared else self.three)
        self.double()

    def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        for layer in self.order:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return {"outputs": [x]}


def checkpointed(shared: bool) -> Checkpointed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Checkpointed(shared)


def samples(seed: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + rank)
    return torch.randn(5, 4, generator=generator, dtype=torch.float64).requires_grad_()


@exercise("3.11", "virtual")
def test_checkpoints_reduce_once(impl, run, seed):
    """Reentrant checkpoints run backward inside backward: the end of the first is not the end."""

    def body(ctx):
        model, x = checkpointed(shared=False), samples(seed, ctx.rank)
        wrapped = impl.DDP(model, bucket_bytes=100, first_bucket_bytes=100)
        for step in range(2):
            wrapped.zero_grad()
            outputs = wrapped(x)["outputs"][0]
            with ctx.region(f"step {step}"):
                outputs.square().sum().backward()
        return gradients(model)

    parts = []
    for rank in range(2):
        alone = checkpointed(shared=False)
        alone(samples(seed, rank))["outputs"][0].square().sum().backward()
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
                what=f"checkpointed: {name}",
                rank=rank,
                contributions=each,
                rtol=1e-9,
                atol=1e-11,
            )


@exercise("3.11", "virtual")
def test_a_gradient_that_is_complete_twice_is_an_error(impl, run, seed):
    """A layer in two reentrant checkpoints: RuntimeError on every rank, and abort() cleans up."""

    def body(ctx):
        wrapped = impl.DDP(checkpointed(shared=True), bucket_bytes=100, first_bucket_bytes=100)
        said = []
        for _ in range(2):
            try:
                wrapped(torch.ones(2, 4).double().requires_grad_())["outputs"][0].sum().backward()
                said.append("nothing")
            except RuntimeError as error:
                said.append(str(error))
            wrapped.abort()
        return said

    for rank, said in enumerate(run(body, 2)):
        for sentence in said:
            if sentence == "nothing":
                fail(
                    "a parameter's gradient was complete twice in one backward, after its bucket "
                    "may have left: expected RuntimeError",
                    cause="twice-accepted",
                    rank=rank,
                )
            if "shape" not in sentence and "parameter" not in sentence:
                fail(
                    f"the error does not name the parameter: {sentence}", cause="unclear", rank=rank
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
