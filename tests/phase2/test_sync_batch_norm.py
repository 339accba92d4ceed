"""Checks of exercise 2.28: values, gradients and running statistics are those of one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refusals,
    fail,
    refusal,
)
from tests.phase2.batch_norms import (
    CHANNELS,
    EXACT,
    INNER,
    OneProcess,
    given_to,
    input_of,
    rows_of,
    running_of,
)
from tests.phase2.parallel_values import values


def trained(layer, x, weights):
    """Output, and gradients of the input and of the parameters, of one forward and backward."""
    layer.zero_grad()
    y = layer(x)
    (y * weights).sum().backward()
    grads = {name: p.grad.cpu() for name, p in layer.named_parameters() if p.grad is not None}
    return y.detach().cpu(), None if x.grad is None else x.grad.cpu(), grads


@exercise(
    "2.28",
    "virtual gloo cuda",
    nccl=True,
    asserts="moments same gradients uneven own-part alone life",
)
def test_equals_one_process(impl, run, seed, cases):
    """Outputs, gradients and running statistics over uneven ranks, in two steps."""
    worlds = cases(4, 1, 2, 3)

    def drawn(rank, w, inner, step):
        x = input_of(seed + 100 * step, rank, rows_of(rank, w), *inner)
        return x, values(seed, 20 + rank + 10 * step, *x.shape)

    def body(ctx):
        out = []
        for inner in INNER:
            layer = given_to(impl.SyncBatchNorm(CHANNELS).double(), seed).to(ctx.device)
            steps = []
            for step in (0, 1):
                x, weights = (
                    t.to(ctx.device) for t in drawn(ctx.rank, ctx.world_size, inner, step)
                )
                steps.append((*trained(layer, x.requires_grad_(), weights), running_of(layer)))
            out.append(steps)
        return out

    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        for number, inner in enumerate(INNER):
            one = OneProcess(seed)
            for step in (0, 1):
                parts = [drawn(rank, w, inner, step) for rank in range(w)]
                ys, of_x = one(*map(list, zip(*parts, strict=True)))
                place = f"{w} ranks, shape (rows, {CHANNELS}, {inner}), step {step}: "
                found = [rank[number][step] for rank in results]
                for rank, (y, grad, _, running) in enumerate(found):
                    expect_close(y, ys[rank], what=f"{place}the output", rank=rank, **EXACT)
                    what = f"{place}the gradient of x"
                    expect_close(grad, of_x[rank], what=what, rank=rank, **EXACT)
                    for name, right in one.running().items():
                        what = f"{place}{name}"
                        expect_close(running[name], right, what=what, rank=rank, **EXACT)
                for name, right in one.parameters().items():
                    total = sum(grads[name] for _, _, grads, _ in found)
                    what = f"{place}the sum of the ranks' gradients of {name}"
                    expect_close(total, right, what=what, **EXACT)


@exercise("2.28", "virtual gloo", asserts="moments no-rows alone")
def test_moments_of_the_group(impl, run, seed):
    """Mean, biased variance and number in float64, equal on all ranks; zeros without rows."""

    def drawn(rank, inner):
        return input_of(seed, rank, rows_of(rank, 4), *inner)

    def body(ctx):
        found = [impl.group_moments(drawn(ctx.rank, inner).float()) for inner in INNER]
        nothing = impl.group_moments(torch.zeros(0, CHANNELS, 4))
        needs = impl.group_moments(torch.ones(2, CHANNELS, requires_grad=True))
        grown = [t.requires_grad for t in needs]
        single = impl.group_moments(torch.full((int(ctx.rank == 1), 1), 3.0))
        return found, nothing, grown, [float(each) for each in single]

    results = run(body, 4)
    for rank, (found, nothing, grown, single) in enumerate(results):
        for inner, (mean, var, n) in zip(INNER, found, strict=True):
            x = torch.cat([drawn(r, inner).float().double() for r in range(4)]).transpose(0, 1)
            x = x.flatten(1)
            what = f"moments of (rows, {CHANNELS}, {inner}): "
            right = torch.tensor(x.shape[1]).double()
            expect_close(n.reshape(()), right, what=f"{what}n", rank=rank, **EXACT)
            close = {"rtol": 1e-5, "atol": 1e-6}
            expect_close(mean, x.mean(1), what=f"{what}the mean", rank=rank, **close)
            right = x.var(1, correction=0)
            expect_close(var, right, what=f"{what}the variance", rank=rank, **close)
        for zero, what in zip(nothing, ("mean", "variance", "number"), strict=True):
            text = f"the {what}, if no rank has a row"
            expect_close(zero, torch.zeros(zero.shape).double(), what=text, rank=rank, **EXACT)
        what = "mean, variance and number if the group has the value 3 alone, on rank 1"
        expect_equal(single, [3.0, 0.0, 1.0], what=what, rank=rank, cause="single")
        what = "whether the moments carry a graph that nobody can follow"
        expect_equal(grown, [False] * 3, what=what, rank=rank, cause="graph")
        pairs = zip(sum(found, ()), sum(results[0][0], ()), strict=True)
        same = [torch.equal(*pair) for pair in pairs]
        what = "whether the moments equal those of rank 0"
        expect_equal(all(same), True, what=what, rank=rank, cause="ranks-differ")


@exercise("2.28", "virtual", asserts="digits")
def test_variance_beside_a_large_mean(impl, run, seed):
    """The variance keeps four digits if the mean is 10⁴ times the deviation."""

    def drawn(rank):
        return (values(seed, rank, 200, 3) + 1e4 + rank / 4).float()

    def body(ctx):
        return impl.group_moments(drawn(ctx.rank))[1]

    right = torch.cat([drawn(rank).double() for rank in range(3)]).var(0, correction=0)
    for rank, var in enumerate(run(body, 3)):
        off = float((var / right - 1).abs().max())
        if not off < 1e-4:
            text = f"the variance beside a mean of 10⁴ is {off:.1%} off: the sum of squares is "
            text += "a small difference of large numbers in float32"
            fail(text, cause="cancelled", rank=rank)


@exercise("2.28", "virtual", asserts="tracked average fewer")
def test_running_statistics(impl, run, seed, cases):
    """Unbiased variance of the group's count, any momentum; too small batches change nothing."""
    momenta = cases(None, 0.1, 0.3, 0.0, 1.0)
    sizes = ((0, 1), (2, 3), (0, 0), (1, 0), (0, 4), (1, 1))  # rows of both ranks, step by step

    def drawn(rank, step):
        x = input_of(seed + step, rank, sizes[step][rank])
        return x.fill_(torch.inf) if step == 3 else x  # its one row changes nothing

    def body(ctx):
        out = []
        for momentum in momenta:
            layer = given_to(impl.SyncBatchNorm(CHANNELS, momentum=momentum).double(), seed)
            out.append([])
            for step in range(len(sizes)):
                layer(drawn(ctx.rank, step))
                out[-1].append(running_of(layer))
        return out

    for rank, result in enumerate(run(body, 2)):
        for momentum, found in zip(momenta, result, strict=True):
            one = OneProcess(seed, momentum=momentum)
            for step, running in enumerate(found):
                if sum(sizes[step]) > 1:
                    one([drawn(r, step) for r in (0, 1)])
                place = f"momentum {momentum}, after batches of {sizes[: step + 1]} rows"
                place += ", the one row of the fourth infinite: " if step > 2 else ": "
                for name, right in one.running().items():
                    expect_close(running[name], right, what=f"{place}{name}", rank=rank, **EXACT)


@exercise("2.28", "virtual gloo", asserts="eval eval-own life")
def test_eval_sends_nothing(impl, run, seed):
    """By the running statistics, or without them by the rank's own rows; nothing is sent."""
    settings = ({}, {"affine": False}, {"track_running_stats": False}, {"momentum": None})

    def drawn(rank, step=0):
        return input_of(seed + step, rank, (4, 0)[rank], 3)

    def body(ctx):
        out = []
        for options in settings:
            layer = given_to(impl.SyncBatchNorm(CHANNELS, **options).double(), seed)
            layer(drawn(ctx.rank))
            layer.eval()
            mine = drawn(ctx.rank, 1) if layer.running_mean is not None else drawn(0, 1)
            with ctx.region("eval"):
                ys, running = [layer(mine)], running_of(layer)
            layer.train()
            ys.append(layer(drawn(ctx.rank, 2)))
            out.append(([y.detach() for y in ys], running))
        return out

    results = run(body, 2)
    for rank, result in enumerate(results):
        for options, (ys, running) in zip(settings, result, strict=True):
            one = OneProcess(seed, **options)
            one([drawn(0), drawn(1)])
            one.layer.eval()
            mine = drawn(rank, 1) if one.layer.running_mean is not None else drawn(0, 1)
            what = f"SyncBatchNorm({options}) in eval: "
            right = one.layer(mine).detach()
            expect_close(ys[0], right, what=f"{what}the output", rank=rank, **EXACT)
            for name, want in one.running().items():
                expect_close(running[name], want, what=f"{what}{name}", rank=rank, **EXACT)
            one.layer.train()
            want = one([drawn(r, 2) for r in (0, 1)])[0][rank]
            what = f"SyncBatchNorm({options}): the output in training after eval"
            expect_close(ys[1], want, what=what, rank=rank, **EXACT)
        sent = [str(event) for event in results.logs[rank].select(region="eval").events]
        expect_equal(sent, [], what="messages in eval", rank=rank, cause="sent-in-eval")


@exercise("2.28", "virtual", asserts="group")
def test_each_group_has_its_own_statistics(impl, run, seed):
    """Two groups that are no prefix, at the same time: each has the statistics of its members."""
    groups = ((3, 1), (0, 2))

    def body(ctx):
        made = [dist.new_group(list(ranks)) for ranks in groups]
        mine = made[ctx.rank % 2 == 0]
        layer = given_to(impl.SyncBatchNorm(CHANNELS, group=mine).double(), seed)
        inside = impl.convert_batch_norms(nn.Sequential(nn.BatchNorm1d(CHANNELS)), mine).double()
        x = input_of(seed, ctx.rank, 2 + ctx.rank).requires_grad_()
        found = trained(layer, x, values(seed, ctx.rank, *x.shape))
        inside(x)
        other = made[ctx.rank % 2]
        outside = [
            refusal(impl.SyncBatchNorm, 3, group=other),
            refusal(impl.convert_batch_norms, nn.BatchNorm1d(3), other),
            refusal(impl.convert_batch_norms, nn.Linear(2, 2), other),
        ]
        return found, inside[0].running_mean, outside

    results = run(body, 4)
    for ranks in groups:
        xs = [input_of(seed, rank, 2 + rank) for rank in ranks]
        weights = [values(seed, r, *x.shape) for r, x in zip(ranks, xs, strict=True)]
        ys, of_x = OneProcess(seed)(xs, weights)
        for k, rank in enumerate(ranks):
            (y, grad, _), mean, outside = results[rank]
            expect_close(y, ys[k], what=f"output in group {ranks}", rank=rank, **EXACT)
            what = f"gradient of x in group {ranks}"
            expect_close(grad, of_x[k], what=what, rank=rank, **EXACT)
            right = torch.cat(xs).mean(0) * 0.1
            what = f"running mean of a converted layer in group {ranks}"
            expect_close(mean, right, what=what, rank=rank, **EXACT)
            calls = "layer", "conversion", "conversion of a model without batch norms"
            calls = [f"{call} for a group without this rank" for call in calls]
            expect_refusals(outside, calls, rank=rank)
