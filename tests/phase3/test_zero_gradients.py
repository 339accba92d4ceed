"""Checks of exercise 3.14: the gradients on their owners only, in the bytes of an all-reduce."""

from __future__ import annotations

import time

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_few_waits,
    expect_refusals,
    expect_refused,
    fail,
    refusal,
    trace,
)
from distlab.observe.memory import PeakMemory
from tests.phase3.breaking import Breaks
from tests.phase3.zero_models import (
    AT_THE_START,
    BUCKET,
    LIMIT,
    MATRIX,
    STILL,
    WHOLE,
    Equal,
    awkward,
    bystanders_of,
    clip,
    compare,
    groups_of,
    judge_bystanders,
    judge_dtypes,
    loaded,
    loss_of,
    mean_gradients,
    refused_at_the_start,
    steps_in_three_dtypes,
    traced,
    values_of,
    with_bystanders,
)

PLAN = (1, 2, 1)  # backward passes before each step


@exercise(
    "3.14", "virtual gloo cuda", asserts="like-whole clip unmoved layout parameters alone life"
)
def test_training_equals_one_process(impl, run, seed, cases):
    """Accumulation and clipping, parameters of one rank only or of none: as one process."""

    def body(ctx):
        model = awkward(seed, ctx.device)
        optimizer = impl.Zero2Optimizer(
            groups_of(model), torch.optim.AdamW, lr=0.05, bucket_bytes=BUCKET
        )
        norms = []
        for step, passes in enumerate(PLAN):
            if step < 2:  # the last backward adds to the gradients that have been stepped
                optimizer.zero_grad()
            for k in range(passes):
                loss_of(model, seed, ctx.rank, 10 * step + k, ctx.device).backward()
            norms.append(float(optimizer.clip_by_global_norm(LIMIT)))
            optimizer.step()
        return norms, values_of(model)

    sizes = cases(3, 2, 5, 1)
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        alone = awkward(seed)
        alone.frozen.weight.grad = None
        plain = torch.optim.AdamW(groups_of(alone), lr=0.05)
        want, wrong = [], []
        for step, passes in enumerate(PLAN):
            if step < 2:
                plain.zero_grad()
            for k in range(passes):
                before = gradients_of(alone)
                mean_gradients(alone, seed, world_size, 10 * step + k)
            wrong.append(wrong_norms(before, gradients_of(alone), world_size))
            want.append(clip(alone, LIMIT))
            plain.step()
        for rank, (norms, got) in enumerate(results):
            for step, (norm, right) in enumerate(zip(norms, want, strict=True)):
                what = f"{world_size} ranks: the norm of the whole mean gradient in step {step}"
                judge_norm(norm, right, wrong[step], what, rank)
            first = awkward(seed).state_dict()
            for name in STILL:
                if not torch.equal(got[name], first[name]):
                    fail(f"{name} has no gradient and moved", cause="moved", rank=rank)
            compare(got, values_of(alone), f"{world_size} ranks", rank)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies, by name, of the trained parameters that are there."""
    named = model.named_parameters()
    return {n: p.grad.clone() for n, p in named if p.requires_grad and p.grad is not None}


def wrong_norms(before: dict, after: dict, world_size: int) -> dict[str, tuple[str, float]]:
    """The norms that known mistakes give, in words, by cause."""

    def norm(gradients: dict[str, torch.Tensor]) -> float:
        return float(torch.cat([g.flatten() for g in gradients.values()]).norm())

    last = {n: g - before[n] if n in before else g for n, g in after.items()}
    part = {n: g for n, g in after.items() if n != "sometimes"}
    return {
        "not-accumulated": ("that of the last backward alone, which adds", norm(last)),
        "none-alone": ("that without the parameter that one rank alone has used", norm(part)),
        "summed": ("that of the sum over the ranks", world_size * norm(after)),
    }


def judge_norm(norm: float, right: float, wrong: dict, what: str, rank: int) -> None:
    """The norm is right, or the message names the norm that it is instead."""
    if abs(norm - right) <= 1e-6 * right:
        return
    for cause, (words, value) in wrong.items():
        if abs(norm - value) <= 1e-6 * value:
            said = f"{what} is {right:.6g}, got {norm:.6g}: {words}"
            fail(said, cause=cause, rank=rank)
    fail(f"{what} is {right:.6g}, got {norm:.6g}", cause="norm", rank=rank)


# not on gloo, whose threads drop their buffers a moment after the wait
@exercise("3.14", "virtual", asserts="part freed resources")
def test_gradients_are_one_part_of_w(impl, run, seed):
    """After backward 4Ψ/W bytes of gradients are alive, in backward a few buckets more."""

    def body(ctx):
        model = Equal()
        optimizer = impl.Zero2Optimizer(model.parameters(), torch.optim.SGD, bucket_bytes=MATRIX)
        x = torch.ones(1, 32)
        with PeakMemory() as memory:
            model(x).sum().backward()
            after, peak = memory.current, memory.peak
            optimizer.zero_grad(set_to_none=False)
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
                        f"{limit:,.0f} B of {WHOLE:,} B of gradients. Reduce a bucket when it is "
                        "complete, let two travel at most, and keep the owner's part only",
                        cause=cause,
                        rank=rank,
                    )


@exercise("3.14", "virtual gloo", asserts="bytes cost")
def test_bytes_of_a_step(impl, run, seed):
    """Backward and step send (W-1)/W·P bytes each, one half of an all-reduce."""

    def body(ctx):
        model = Equal()
        weights = with_bystanders(model)
        groups = [{"params": weights[:7]}, {"params": weights[7:]}]
        optimizer = impl.Zero2Optimizer(groups, torch.optim.Adam, bucket_bytes=2 * MATRIX)
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
            for region, more in (("backward", 1), ("step", 0)):
                part = log.select(region=region)
                part.sent_at_most(budget + 300, "(W-1)/W·P")
                largest = max((event.payload for event in part.events), default=0)
                if part.messages > 12 + more or largest > 2 * MATRIX:
                    fail(
                        f"rank {log.rank} issued {part.messages} messages of up to {largest:,} B "
                        f"in {region} for 12 parameters in buckets of {2 * MATRIX:,} B",
                        cause="messages",
                        rank=log.rank,
                    )
        judge_bystanders(results)


@exercise("3.14", "gloo", asserts="like-whole")
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


@exercise("3.14", "virtual gloo", asserts="like-whole clip group")
def test_works_in_a_group(impl, run, seed):
    """Ranks 1 and 3 of four have their own mean and norm, beside ranks 0 and 2 with theirs."""
    groups = [1, 3], [0, 2]

    def body(ctx):
        made = [dist.new_group(members) for members in groups]
        k = int(ctx.rank % 2 == 0)
        model = awkward(seed + k)
        first, second = groups_of(model)
        optimizer = impl.Zero2Optimizer([first], torch.optim.AdamW, group=made[k], lr=0.05)
        optimizer.add_param_group(second)
        number = groups[k].index(ctx.rank) + k  # in the second group nobody uses ``sometimes``
        loss_of(model, seed + k, number, 0).backward()
        norm = optimizer.clip_by_global_norm(LIMIT)
        optimizer.step()
        return float(norm), values_of(model)

    results = run(body, 4)
    for k, members in enumerate(groups):
        alone = awkward(seed + k)
        alone.frozen.weight.grad = None
        plain = torch.optim.AdamW(groups_of(alone), lr=0.05)
        losses = [loss_of(alone, seed + k, number + k, 0) for number in range(2)]
        (sum(losses) / 2).backward()
        want = clip(alone, LIMIT)
        plain.step()
        for rank in members:
            norm, got = results[rank]
            words = "the sum over the 2 ranks is divided by the 4 of the world"
            wrong = {"divided-by-world": (words, want / 2)}
            judge_norm(norm, want, wrong, f"the norm of ranks {members} of 4", rank)
            compare(got, values_of(alone), f"ranks {members} of 4", rank)


@exercise("3.14", "virtual", asserts="dtypes dtype")
def test_each_dtype_stays(impl, run):
    """Parameters in float32, bfloat16 and float64: at step() all of a piece is in its own dtype."""

    def body(ctx):
        return steps_in_three_dtypes(impl.Zero2Optimizer, share=2 * ctx.rank)

    judge_dtypes(run(body, 2), share=1)


@exercise("3.14", "virtual", asserts="clip clip-bytes dtype refused refusals cost")
def test_clipping(impl, run):
    """Only a finite norm beyond max_norm changes anything; one number of 8 bytes travels."""
    kinds = [["float16", "float16"], ["bfloat16", "float32"], ["float16", "float64"]]
    limits = (2500.0, 1024.0, 1e9, 0.0, -1.0, float("nan"))

    def body(ctx):
        found, refusals = [], []
        for kind in kinds:
            weights = [nn.Parameter(torch.ones(8, dtype=getattr(torch, name))) for name in kind]
            optimizer = impl.Zero2Optimizer(weights, torch.optim.SGD, lr=1.0)
            sum(512 * p.float().sum() for p in weights).backward()
            with ctx.region("clip"):
                norms = [float(optimizer.clip_by_global_norm(max_norm=m)) for m in limits[:3]]
            with ctx.region("refused"):
                refusals += [refusal(optimizer.clip_by_global_norm, m) for m in limits[3:]]
            optimizer.zero_grad()
            (float("inf") * weights[0][0] + 3 * weights[1].sum()).backward()
            norms.append(float(optimizer.clip_by_global_norm(1.0)))
            optimizer.step()
            found.append((norms, weights[1].tolist()))
        return found, refusals

    results = run(body, 2)
    for rank, (found, refusals) in enumerate(results):
        expect_refusals(refusals, [f"max_norm={m}" for m in limits[3:]] * 3, rank=rank)
        log = results.logs[rank]
        sent = [(event.op, event.payload) for event in log.select(region="clip").events]
        if any(op != "all_reduce" or payload > 8 for op, payload in sent) or len(sent) != 9:
            fail(f"one all-reduce of 8 B per call, got {sent}", cause="clip-bytes", rank=rank)
        if log.select(region="refused").events:
            fail(f"rank {rank} sends before it refuses", cause="late-check", rank=rank)
        for kind, ((before, unchanged, clipped, infinite), after) in zip(kinds, found, strict=True):
            what = f"16 gradients of 512 in {' and '.join(kind)}"
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
            if infinite not in (float("inf"), float("-inf")) and infinite == infinite:
                fail(f"the norm of an infinite gradient: {infinite}", cause="norm", rank=rank)
            what = "the finite gradients beside an infinite one, after a step with lr=1: 1 - 3"
            expect_equal(after, [-2.0] * 8, what=what, rank=rank, cause="infinite-clipped")


@exercise("3.14", "virtual", asserts="overlap freed cost")
def test_gradients_leave_during_backward(impl, run, seed):
    """One or two buckets travel while backward goes on, never more; then their gradients go."""

    def body(ctx):
        model = Equal()
        optimizer = impl.Zero2Optimizer(model.parameters(), torch.optim.SGD, bucket_bytes=MATRIX)
        gone, flying = [], []

        def look(_):
            now = time.monotonic()
            gone.append(sum(p.grad is None for p in model.parameters()))
            flying.append(sum(e.end is None or e.end > now for e in ctx.ledger.events))

        model.layers[0].weight.register_hook(look)
        with ctx.region("backward"):
            model(torch.ones(1, 32)).sum().backward()
        left = all(p.grad is None for p in model.parameters())
        optimizer.step()
        return gone[0], flying[0], left

    results = run(body, 2)
    for rank, (gone, flying, left) in enumerate(results):
        if gone < 10:
            fail(
                f"when the first layer's gradient came, only {gone} of 12 parameters were without "
                "one. Send a bucket as soon as it is complete, and free it",
                cause="no-overlap",
                rank=rank,
            )
        if not flying:
            fail(
                "when the first layer's gradient came nothing was on its way. Each bucket has been "
                "waited for when it left, so backward stood still",
                cause="waits-at-once",
                rank=rank,
            )
        if max(loaded(results.logs[rank], "backward")) > 2:
            fail("more than two buckets are on their way", cause="high-peak", rank=rank)
        expect_equal(left, True, what="grad is None after backward", rank=rank, cause="not-freed")


@exercise("3.14", "virtual", asserts="refused refusals")
def test_wrong_calls_are_refused(impl, run):
    """A foreign group, no bucket size and a parameter given twice, before anything is sent."""

    def body(ctx):
        return refused_at_the_start(impl.Zero2Optimizer)

    expect_refused(run(body, 2), AT_THE_START)


@exercise("3.14", "virtual", asserts="given-up life alone")
def test_a_backward_that_raises(impl, run, cases):
    """On one rank or on all: zero_grad there ends the others' backward with NaN;
    later steps are right."""
    for broken in cases([1], [0, 1, 2]):

        def body(ctx):
            model = Equal()
            optimizer = impl.Zero2Optimizer(
                model.parameters(), torch.optim.SGD, lr=1e-3, bucket_bytes=2 * MATRIX
            )
            said = []
            for step in range(3):
                x = torch.full((1, 32), 1.0 + ctx.rank + step)
                for k, layer in enumerate(model.layers):
                    x = Breaks.apply(x) if step == 1 and k == 6 and ctx.rank in broken else x
                    x = layer(x)
                try:
                    x.sum().backward()
                except KeyError:
                    optimizer.zero_grad()
                norm = float(optimizer.clip_by_global_norm(1e9))
                said.append("finite" if norm < float("inf") else "nan")
                if said[-1] == "finite":
                    optimizer.step()
                optimizer.zero_grad()
            return said, values_of(model)

        alone = Equal()
        plain = torch.optim.SGD(alone.parameters(), lr=1e-3)
        for step in (0, 2):
            plain.zero_grad()
            losses = [alone(torch.full((1, 32), 1.0 + rank + step)).sum() for rank in range(3)]
            (sum(losses) / 3).backward()
            plain.step()
        for rank, (said, got) in enumerate(run(body, 3)):
            want = ["finite", "nan" if broken == [1] else "finite", "finite"]
            what = f"three steps, backward of ranks {broken} raises in the second: the norms"
            expect_equal(said, want, what=what, rank=rank, cause="failure-not-told")
            for name, value in values_of(alone).items():
                what = f"the step that failed left out: {name}"
                expect_close(got[name], value, what=what, rank=rank, rtol=1e-4, atol=1e-6)


@exercise("3.14", "virtual", asserts="given-up alone")
def test_nan_tells_of_a_backward_that_raised(impl, run):
    """After a step on gradients that one rank gave up, all buckets that had not left hold NaN."""

    def body(ctx):
        model = Equal()
        optimizer = impl.Zero2Optimizer(
            model.parameters(), torch.optim.SGD, lr=1e-3, bucket_bytes=2 * MATRIX
        )
        x = torch.ones(1, 32)
        for k, layer in enumerate(model.layers):
            x = layer(Breaks.apply(x) if k == 6 and ctx.rank == 1 else x)
        try:
            x.sum().backward()
        except KeyError:
            optimizer.zero_grad()
        optimizer.step()
        return [bool(layer.weight.isnan().any()) for layer in model.layers]

    for rank, layers in enumerate(run(body, 3)):
        got = [any(pair) for pair in zip(layers[::2], layers[1::2], strict=True)]
        what = "pairs of layers, a bucket each, with NaN after a step of all ranks; backward of "
        what += "rank 1 raised between layers 6 and 5"
        expect_equal(got, [True] * 3 + [False] * 3, what=what, rank=rank, cause="no-nan")


@exercise("3.14", "virtual", asserts="taken-over life bytes")
def test_a_second_optimizer_takes_over(impl, run):
    """Parameters of a second Zero2Optimizer are reduced once, for this one alone."""

    def body(ctx):
        model = Equal()
        made = [impl.Zero2Optimizer(model.parameters(), torch.optim.SGD, lr=1e-3) for _ in range(2)]

        def closure():
            with ctx.region("backward"):
                model(torch.full((1, 32), 1.0 + ctx.rank)).sum().backward()
            return 7

        said = []
        for _ in range(2):
            said.append(made[1].step(closure))
            made[1].zero_grad()
        return said, values_of(model)

    alone = Equal()
    plain = torch.optim.SGD(alone.parameters(), lr=1e-3)
    for _ in range(2):
        plain.zero_grad()
        (sum(alone(torch.full((1, 32), 1.0 + rank)).sum() for rank in range(2)) / 2).backward()
        plain.step()
    results = run(body, 2)
    for rank, (said, got) in enumerate(results):
        expect_equal(said, [7, 7], what="what step(closure) returns", rank=rank, cause="no-loss")
        for name, value in values_of(alone).items():
            expect_close(got[name], value, what=name, rank=rank, rtol=1e-4, atol=1e-6)
        part = results.logs[rank].select(region="backward")
        part.sent_at_most(2 * (WHOLE / 2 + 100), "(W-1)/W·P in each of two backward passes")


@exercise("3.14", "virtual", asserts="twice refusals")
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
        except RuntimeError:
            return "refused"
        optimizer.step()
        return "accepted"

    for rank, said in enumerate(run(body, 2)):
        if said != "refused":
            fail(
                "a parameter's gradient was complete twice in one backward, the second time when "
                "the first may have left: expected RuntimeError",
                cause="twice-accepted",
                rank=rank,
            )


@trace("3.14", measures="hidden")
def trace_zero2(impl):
    """Two steps of twelve equal layers in four buckets."""
    return traced(lambda *args, **options: impl.Zero2Optimizer(*args, **options))


@exercise("3.14", "nccl", asserts="host")
def test_backward_waits_twice_for_the_gpu(impl, run, seed):
    """The host waits for its GPU twice at most in a backward, and once for the norm."""

    def body(ctx):
        model = awkward(seed, ctx.device)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = impl.Zero2Optimizer(parameters, torch.optim.SGD, lr=0.1, bucket_bytes=300)
        loss = loss_of(model, seed, ctx.rank, 0, ctx.device)
        with ctx.region("backward"):
            loss.backward()
        with ctx.region("clip"):
            optimizer.clip_by_global_norm(1e-3)

    results = run(body, 2)
    expect_few_waits(results, 2, "a backward", "backward")
    expect_few_waits(results, 1, "clip_by_global_norm", "clip")
