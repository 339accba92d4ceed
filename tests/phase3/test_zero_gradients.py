"""Checks of exercise 3.14: the gradients on their owners only, in the bytes of an all-reduce."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from distlab.grading import exercise, expect_equal, expect_refused, fail, trace
from distlab.observe.memory import PeakMemory
from tests.phase3.zero_models import (
    AT_THE_START,
    BUCKET,
    LIMIT,
    MATRIX,
    WHOLE,
    Equal,
    awkward,
    bystanders_of,
    compare,
    groups_of,
    judge_bystanders,
    judge_dtypes,
    loss_of,
    mean_gradients,
    refused_at_the_start,
    steps_in_three_dtypes,
    traced,
    values_of,
    with_bystanders,
)

PLAN = (1, 2, 1)  # backward passes before each step


@exercise("3.14", "virtual gloo cuda")
def test_training_equals_one_process(impl, run, seed, cases):
    """Accumulation and clipping, parameters of one rank only or of none: as one process."""

    def body(ctx):
        model = awkward(seed, ctx.device)
        optimizer = impl.Zero2Optimizer(
            groups_of(model), torch.optim.AdamW, lr=0.05, bucket_bytes=BUCKET
        )
        norms = []
        for step, passes in enumerate(PLAN):
            optimizer.zero_grad()
            for k in range(passes):
                loss_of(model, seed, ctx.rank, 10 * step + k, ctx.device).backward()
            norms.append(float(optimizer.clip_by_global_norm(LIMIT)))
            optimizer.step()
        return norms, values_of(model)

    sizes = cases(3, 2, 5, 1)
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        alone = awkward(seed)
        plain = torch.optim.AdamW(groups_of(alone), lr=0.05)
        want = []
        for step, passes in enumerate(PLAN):
            plain.zero_grad()
            for k in range(passes):
                mean_gradients(alone, seed, world_size, 10 * step + k)
            want.append(float(nn.utils.clip_grad_norm_(alone.parameters(), LIMIT)))
            plain.step()
        for rank, (norms, got) in enumerate(results):
            for step, (norm, right) in enumerate(zip(norms, want, strict=True)):
                if abs(norm - right) > 1e-6 * right:
                    fail(
                        f"{world_size} ranks: the norm of the whole mean gradient in step {step} "
                        f"is {right:.6g}, got {norm:.6g}",
                        cause="norm",
                        rank=rank,
                    )
            if not torch.equal(got["unused"], torch.ones(5, dtype=torch.float64)):
                fail("unused has no gradient and moved", cause="moved", rank=rank)
            compare(got, values_of(alone), f"{world_size} ranks", rank)


@exercise("3.14", "virtual")  # gloo's threads drop their buffers a moment after the wait
def test_gradients_are_one_part_of_w(impl, run, seed):
    """After backward 4Ψ/W bytes of gradients are alive, in backward a few buckets more."""

    def body(ctx):
        model = Equal()
        optimizer = impl.Zero2Optimizer(model.parameters(), torch.optim.SGD, bucket_bytes=MATRIX)
        x = torch.ones(1, 32)
        with PeakMemory() as memory:
            model(x).sum().backward()
            after, peak = memory.current, memory.peak
            optimizer.zero_grad()
            return after, peak, memory.current

    sizes = (4, 2)
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        for rank, (after, peak, cleared) in enumerate(results):
            part = WHOLE / world_size + 2500
            for held, limit, when, cause in (
                (after, part, "after backward", "too-much-memory"),
                (cleared, 2500, "after zero_grad", "not-cleared"),
                (peak, part + 4 * MATRIX, "in backward", "high-peak"),  # MATRIX: a bucket
            ):
                if held > limit:
                    fail(
                        f"rank {rank} of {world_size} holds {held:,} B {when}, expected at most "
                        f"{limit:,.0f} B of {WHOLE:,} B of gradients: reduce a bucket when it is "
                        "complete, and keep the owner's part only",
                        cause=cause,
                        rank=rank,
                    )


@exercise("3.14", "virtual gloo")
def test_bytes_of_a_step(impl, run, seed):
    """Backward and step send (W-1)/W·P bytes each, one half of an all-reduce."""

    def body(ctx):
        model = Equal()
        weights = with_bystanders(model)
        optimizer = impl.Zero2Optimizer(weights, torch.optim.Adam, bucket_bytes=2 * MATRIX)
        with ctx.region("backward"):
            model(torch.ones(1, 32)).sum().backward()
        with ctx.region("step"):
            optimizer.step()
        return bystanders_of(weights)

    sizes = (4, 2, 1)
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        budget = (world_size - 1) / world_size * WHOLE
        for log in results.logs:
            log.all_waited()
            for region in ("backward", "step"):
                log.select(region=region).sent_at_most(budget + 300, "(W-1)/W·P")
        judge_bystanders(results)


@exercise("3.14", "gloo")
def test_equals_torchs_data_parallelism(impl, run, seed):
    """The same parameters as torch's DistributedDataParallel with the plain optimizer."""

    def train(ctx, model, optimizer):
        generator = torch.Generator().manual_seed(seed + ctx.rank)
        for x in torch.randn(3, 4, 32, generator=generator, dtype=torch.float64):
            optimizer.zero_grad()
            (model(x) - 1).square().sum().backward()
            optimizer.step()

    def body(ctx):
        model = Equal().double()
        train(ctx, model, impl.Zero2Optimizer(model.parameters(), torch.optim.AdamW, lr=0.01))
        return values_of(model)

    def reference(ctx):
        model = Equal().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train(ctx, DistributedDataParallel(model), optimizer)
        return values_of(model)

    results = run(body, 2)
    for rank, want in enumerate(run(reference, 2)):
        for name, value in want.items():
            if not torch.allclose(results[rank][name], value, rtol=1e-6, atol=1e-8):
                fail(f"{name} differs from torch's", cause="unlike-torch", rank=rank)


@exercise("3.14", "virtual gloo")
def test_works_in_a_group(impl, run, seed):
    """In a group of two of three ranks the mean and the norm are theirs; nobody else takes part."""

    def body(ctx):
        pair = dist.new_group([2, 1])
        if ctx.rank == 0:
            return None
        model = awkward(seed)
        first, second = groups_of(model)
        optimizer = impl.Zero2Optimizer([first], torch.optim.SGD, group=pair, lr=0.05)
        optimizer.add_param_group(second)
        loss_of(model, seed, ctx.rank - 1, 0).backward()
        norm = optimizer.clip_by_global_norm(LIMIT)
        optimizer.step()
        return float(norm), values_of(model)

    alone = awkward(seed)
    plain = torch.optim.SGD(groups_of(alone), lr=0.05)
    mean_gradients(alone, seed, 2, 0)
    want = float(nn.utils.clip_grad_norm_(alone.parameters(), LIMIT))
    plain.step()
    for rank, out in enumerate(run(body, 3)):
        if out is not None:
            if abs(out[0] - want) > 1e-6 * want:
                fail(f"norm of the group {out[0]:.6g}, not {want:.6g}", cause="norm", rank=rank)
            compare(out[1], values_of(alone), "ranks 1 and 2 of 3", rank)


@exercise("3.14", "virtual")
def test_each_dtype_stays(impl, run):
    """Parameters in float32, bfloat16 and float64: at step() all of a piece is in its own dtype."""

    def body(ctx):
        return steps_in_three_dtypes(impl.Zero2Optimizer, share=2 * ctx.rank)

    judge_dtypes(run(body, 2), share=1)


@exercise("3.14", "virtual")
def test_clipping(impl, run):
    """Only a norm beyond the limit changes anything; it has float32's range, or float64's."""
    kinds = [["float16", "float16"], ["bfloat16", "float32"], ["float16", "float64"]]

    def body(ctx):
        found = []
        for kind in kinds:
            weights = [nn.Parameter(torch.ones(8, dtype=getattr(torch, name))) for name in kind]
            optimizer = impl.Zero2Optimizer(weights, torch.optim.SGD)
            sum(512 * p.float().sum() for p in weights).backward()
            norms = [optimizer.clip_by_global_norm(limit) for limit in (2500.0, 1024.0, 1e9)]
            dtypes = {str(norm.dtype).removeprefix("torch.") for norm in norms}
            found.append([*map(float, norms), *dtypes])
        return found

    for rank, found in enumerate(run(body, 2)):
        for kind, (before, unchanged, clipped, *dtypes) in zip(kinds, found, strict=True):
            what = f"16 gradients of 512 in {' and '.join(kind)}"
            wide = "float64" if "float64" in kind else "float32"
            expect_equal(
                dtypes, [wide], what=f"dtype of the norm of {what}", rank=rank, cause="norm-dtype"
            )
            for norm, want, when, cause in (
                (before, 2048, "", "norm"),
                (unchanged, 2048, " and after clip_by_global_norm(2500) as well", "enlarged"),
                (clipped, 1024, " after clip_by_global_norm(1024)", "not-clipped"),
            ):
                if not abs(norm - want) < 0.01 * want:
                    fail(
                        f"the norm of {what} is {want}{when}, got {norm:.6g}",
                        cause=cause,
                        rank=rank,
                    )


@exercise("3.14", "virtual")
def test_gradients_leave_during_backward(impl, run, seed):
    """The last layer's gradient is on its way before the first layer's exists."""

    def body(ctx):
        model = Equal()
        impl_optimizer = impl.Zero2Optimizer(
            model.parameters(), torch.optim.SGD, bucket_bytes=MATRIX
        )
        issued = []
        first = model.layers[0].weight
        first.register_hook(lambda _: issued.append([p.grad is None for p in model.parameters()]))
        model(torch.ones(1, 32)).sum().backward()
        left = all(p.grad is None for p in model.parameters())
        impl_optimizer.step()
        return sum(issued[0]), left

    for rank, (gone, left) in enumerate(run(body, 2)):
        if gone < 10:
            fail(
                f"when the first layer's gradient came, only {gone} of 12 parameters were without "
                "one: send a bucket as soon as it is complete, and free it",
                cause="no-overlap",
                rank=rank,
            )
        expect_equal(left, True, what="grad is None after backward", rank=rank, cause="not-freed")


@exercise("3.14", "virtual")
def test_wrong_calls_are_refused(impl, run):
    """A foreign group and no bucket size, before anything is sent."""

    def body(ctx):
        return refused_at_the_start(impl.Zero2Optimizer)

    expect_refused(run(body, 2), AT_THE_START)


@exercise("3.14", "virtual")
def test_a_gradient_that_is_complete_twice_is_an_error(impl, run):
    """A layer in two reentrant checkpoints, behind one that is in none: RuntimeError."""

    def body(ctx):
        shared, head = nn.Linear(4, 4), nn.Linear(4, 1)
        late = nn.Parameter(torch.ones(1))  # unused, and first to go: nothing is on its way yet
        weights = [*shared.parameters(), *head.parameters(), late]
        optimizer = impl.Zero2Optimizer(weights, torch.optim.SGD)
        x = torch.ones(2, 4, requires_grad=True)
        for _ in range(2):
            x = checkpoint(shared, x, use_reentrant=True)
        try:
            head(x).sum().backward()
        except RuntimeError as error:
            return str(error)
        optimizer.step()
        return None

    for rank, said in enumerate(run(body, 2)):
        if said is None:
            fail(
                "a parameter's gradient was complete twice in one backward, the second time when "
                "the first may have left: expected RuntimeError",
                cause="twice-accepted",
                rank=rank,
            )


@trace("3.14")
def trace_zero2(impl):
    """Two steps of twelve equal layers in four buckets."""
    return traced(lambda *args, **options: impl.Zero2Optimizer(*args, **options))
