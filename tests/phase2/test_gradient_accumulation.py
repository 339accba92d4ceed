"""Checks of exercises 2.1 and 2.2: micro-batches, one reduction per step."""

from __future__ import annotations

import math
from itertools import islice

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import nn

from distlab.grading import exercise, expect_equal, expect_refusals, fail, refusal, trace
from distlab.reference.workloads import build_model, digits
from tests.phase2.windows import (
    RANKS,
    Watched,
    compare,
    counted,
    each_alone,
    expect_freed,
    expect_number,
    expect_numbers,
    expected,
    gradients,
    net,
    plain,
    window_of,
)

WINDOW = [(1, 0), (9, 2), (3, 0), (2, 2)]


# -- 2.1 ------------------------------------------------------------------------------------------
@exercise(
    "2.1", "virtual", asserts="gradient total ignored frozen sum once parameters dtype layout"
)
def test_window_equals_the_full_batch(impl, run, seed):
    """Micro-batches of 1, 7, 3 and 0 counted targets give the gradient of the batch of 11."""

    def body(ctx):
        model = net(seed, mixed=True)
        for p in model.frozen.parameters():
            p.grad = torch.ones_like(p)
        weights = [p.detach().clone() for p in model.parameters()]
        loss = plain(impl.accumulate(model, iter(window_of(seed, 0, WINDOW)), 0.55))
        same = all(map(torch.equal, weights, model.parameters()))
        return gradients(model), loss, same, plain(impl.accumulate(model, iter([]), 5.0))

    ((got, loss, same, empty),) = run(body, 1)
    model = net(seed, mixed=True)
    losses = expected(model, [window_of(seed, 0, WINDOW)], 0.55)
    want = gradients(model)
    for name in ("unused", "empty"):  # autograd leaves them without gradient, zeros are as good
        got.setdefault(name, want[name])
    want |= {f"frozen.{n}": torch.ones_like(p) for n, p in model.frozen.named_parameters()}
    terms = each_alone(seed, window_of(seed, 0, WINDOW), 0.55)
    terms = [want | term for term in terms]  # frozen parameters have none
    compare(got, want, "4 micro-batches of 1, 7, 3 and 0 targets, total 0.55", 0, terms=terms)
    expect_equal(same, True, what="the weights are unchanged", cause="weights-changed")
    (loss,) = expect_numbers((loss,), [float], "the sum of the losses", 0)
    expect_number(loss, losses, "the sum of the 11 losses", "loss-value", 0)
    expect_equal(empty, 0.0, what="the sum of the losses of an empty window", cause="loss-value")


@exercise("2.1", "virtual", asserts="adds life alone")
def test_gradients_add_to_what_is_there(impl, run, seed):
    """Accumulating twice gives the sum, and a window without targets adds nothing to it."""

    def body(ctx):
        model = net(seed)
        for k in range(2):
            impl.accumulate(model, window_of(seed + k, 0, [(3, 0)]), 6.5)
        once = gradients(model)
        without = plain(impl.accumulate(model, window_of(seed, 1, [(2, 2), (1, 1)]), 6.0))
        return once, gradients(model), without

    ((once, twice, without),) = run(body, 1)
    model = net(seed)
    expected(model, [window_of(seed + k, 0, [(3, 0)]) for k in range(2)], 6.5)
    want = {name: g for name, g in gradients(model).items() if name in once or g.any()}
    compare(once, want, "two windows one after the other", 0)
    compare(twice, want, "and a third one without targets", 0)
    expect_equal(without, 0.0, what="the losses of a window without targets", cause="loss-value")


@exercise("2.1", "virtual", asserts="freed by-itself resources")
def test_one_micro_batch_is_alive_at_a_time(impl, run, seed):
    """Each micro-batch goes through the model by itself and runs backward at once."""
    shape = [(3, 0), (2, 2), (4, 1), (1, 0), (5, 0)]

    def body(ctx):
        model = Watched()
        impl.accumulate(model, iter(window_of(seed, 0, shape)), 12.0)
        return model.seen

    expect_freed(run(body, 1)[0], shape)


@exercise("2.1", "virtual", asserts="lists new-lists lazy refused refusals")
def test_windows_cut_the_stream(impl, run):
    """Windows of the wanted size, the incomplete last one too, read no further than needed."""

    def body(ctx):
        cut = [list(islice(impl.windows(iter(range(n)), 3), 9)) for n in (7, 6, 0, 2)]
        ones = list(islice(impl.windows(iter([[], None, 0, [3]]), 1), 9))
        cut.append(list(islice(impl.windows([0, 1, 2, 3], 3), 9)))  # not an iterator
        read = []

        def stream():
            for k in range(9):
                read.append(k)
                yield k

        divided = impl.windows(stream(), 2)
        counts = [len(read)]
        first = [next(divided)]
        counts.append(len(read))
        first.append(next(divided))
        counts.append(len(read))
        refused = [refusal(impl.windows, stream(), n) for n in (0, -1)]
        same = [len(got) > 1 and all(window is got[0] for window in got) for got in cut]
        return (cut, same, ones, first, counts, len(read)), refused

    (cut, same, ones, first, counts, later), refused = run(body, 1)[0]
    want = [[[0, 1, 2], [3, 4, 5], [6]], [[0, 1, 2], [3, 4, 5]], [], [[0, 1]], [[0, 1, 2], [3]]]
    for n, got, reused, right in zip((7, 6, 0, 2, 4), cut, same, want, strict=True):
        what = f"windows of 3 from {n} micro-batches"
        lost = not all(isinstance(w, list) for w in got) or sum(map(len, got)) < n
        cause = "list-reused" if reused else "window-lost" if lost else "wrong-windows"
        expect_equal(got, right, what=what, cause=cause)
    expect_equal(ones, [[[]], [None], [0], [[3]]], what="windows of 1", cause="window-lost")
    expect_equal(first, [[0, 1], [2, 3]], what="the first windows of 2", cause="wrong-windows")
    what = "read when called, after one and after two windows of 2"
    expect_equal(counts, [0, 2, 4], what=what, cause="reads-ahead")
    expect_refusals(refused, ["windows of 0 steps", "windows of -1 steps"])
    expect_equal(later, 4, what="read before a refusal", cause="late-check")


# -- 2.2 ------------------------------------------------------------------------------------------
def check_reduced(
    run, impl, seed: int, shapes: list, scale: float, groups: list[list[int]], mixed: bool
) -> None:
    """Two windows, one after the other, of the ranks of every group; the
    second window is judged."""
    size = len(shapes)

    def body(ctx):
        made = [dist.new_group(ranks) for ranks in groups]
        mine = [g for g, ranks in zip(made, groups, strict=True) if ctx.rank in ranks]
        model = net(seed, mixed).to(ctx.device)
        for p in model.parameters():  # from before: must not be counted
            p.grad = torch.ones_like(p)
        weights = [p.detach().clone() for p in model.parameters()]
        for turn in range(2):
            model.rare.requires_grad_(turn == 1)  # frozen at first
            answer = impl.accumulate_and_reduce(
                model,
                window_of(seed + turn, ctx.rank, shapes[ctx.rank], ctx.device),
                loss_scale=scale,
                group=mine[0] if mine else None,
            )
        same = all(map(torch.equal, weights, model.parameters()))
        return gradients(model), plain(answer), same

    results = run(body, size)
    windows = [window_of(seed + 1, rank, shape) for rank, shape in enumerate(shapes)]
    counts = [counted(shape) for shape in shapes]
    model = net(seed, mixed)
    world_losses = expected(model, windows, sum(counts))
    world = {n: g * scale for n, g in gradients(model).items()}
    for ranks in groups or [list(range(size))]:
        members = sorted(ranks)
        total = sum(counts[r] for r in members)
        model = net(seed, mixed)
        losses = expected(model, [windows[r] for r in members], total)
        want = {n: g * scale for n, g in gradients(model).items()}
        owns = []
        for r in members:
            alone = net(seed, mixed)
            expected(alone, [windows[r]], max(1, counts[r]))
            owns.append({n: g * scale for n, g in gradients(alone).items()})
        rules = [("group", "it is the mean over all ranks, not over the group's", world)]
        rules = rules * bool(groups) + old_gradients(seed, members, shapes, total, want, scale)
        what = f"ranks {members} with {[counts[r] for r in members]} counted targets"
        for rank in reversed(members):
            got, answer, same = results[rank]
            loss, targets = expect_numbers(answer, [float, int], f"{what}: the return value", rank)
            cause = "group" if targets == sum(counts) != total else "targets"
            expect_equal(targets, total, what=f"{what}: targets", rank=rank, cause=cause)
            weights = [counts[r] for r in members]
            compare(got, want, what, rank, owns=owns, weights=weights, rules=rules)
            for name in ("second.bias", "frozen.weight", "frozen.bias"):
                if name in got and got[name].any() and not bool((got[name] == 1).all()):
                    message = f"{what}: the gradient of the frozen {name} has changed"
                    fail(message, cause="frozen-changed", rank=rank)
            if not same:
                fail(f"{what}: the weights have changed", cause="weights-changed", rank=rank)
            of_all = abs(loss * total - world_losses) <= 1e-9 * world_losses
            cause = "group" if of_all and groups else "loss-value"
            expect_number(loss, losses / total, f"{what}: the mean loss", cause, rank)


def old_gradients(
    seed: int, members: list, shapes: list, total: int, want: dict, scale: float
) -> list[tuple[str, str, dict]]:
    """Rules: idle ranks, or all, add their old gradients: ones at first,
    then the first window's."""
    if not total or any(w.dtype != torch.float64 for w in want.values()):
        return []
    model = net(seed)
    expected(model, [window_of(seed, r, shapes[r]) for r in members], total)
    first = gradients(model)
    idle = sum(not shapes[r] for r in members)
    text = "it contains gradients from before, which must be forgotten"
    return [
        (
            "old-gradients",
            f"{text}, on {'ranks without micro-batches' if n == idle else 'every rank'}",
            {name: w + n * (scale * first[name] + n) for name, w in want.items()},
        )
        for n in {idle, len(members)} - {0}
    ]


@exercise(
    "2.2",
    "virtual gloo cuda",
    asserts="global-mean uneven forgotten zero-gradient frozen returned alone parameters life",
)
def test_window_of_all_ranks_equals_one_process(impl, run, seed, cases):
    """The gradient of all ranks' targets, with uneven windows, some empty, and a loss scale."""
    for world_size, scale in cases((3, 1.0), (5, 0.75), (1, 1.0), (2, 1024.0)):
        check_reduced(run, impl, seed, RANKS[:world_size], scale, [], False)


@exercise("2.2", "virtual", asserts="group dtype own-dtype any-layout parameters layout")
def test_only_the_ranks_of_the_group_count(impl, run, seed):
    """Ranks 1 and 3, in a group, and ranks 0 and 2: each pair has its own mean; four dtypes."""
    shapes = [RANKS[3], RANKS[0], RANKS[4], RANKS[1]]
    check_reduced(run, impl, seed, shapes, 4.0, [[3, 1], [0, 2]], True)


class Wide(nn.Module):
    """A frozen layer, a float32 layer, a float64 layer that is used twice, and one in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64).requires_grad_(False)
        self.second = nn.Linear(64, 64)
        self.third = nn.Linear(64, 64, dtype=torch.float64)
        self.again = self.third
        self.brain = nn.Parameter(torch.zeros(600, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x)).double()
        return self.again(self.third(x))[:, :3] + self.brain[:3].double()


STEEP = 2**20 + math.log(2) + 40 * math.log1p(2 * math.exp(-4))  # losses of steep_window


def steep() -> nn.Module:
    """Logits x, 0, 0."""
    model = nn.Linear(1, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0], [0.0], [0.0]]))
    return model


def steep_window() -> list:
    """A micro-batch with so large a loss that the losses of the 40 others
    vanish beside it in float32."""
    target = torch.zeros(1, dtype=torch.int64)
    return [(torch.full((1, 1), x), target) for x in (-(2.0**20), *[4.0] * 40)]


@exercise("2.2", "virtual gloo", asserts="cost once-per-dtype tied-once frozen returned")
def test_gradients_travel_once_per_window(impl, run, seed):
    """Bytes and messages don't grow with the number of micro-batches, and frozen ones stay."""

    def body(ctx):
        model = Wide()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        window = [(torch.ones(2, 64), torch.zeros(2, dtype=torch.int64))] * (2 + 3 * ctx.rank)
        with ctx.region("window"):
            impl.accumulate_and_reduce(model, window)
        low = nn.Linear(4, 3, dtype=torch.bfloat16)
        many = torch.zeros(261 + ctx.rank, dtype=torch.int64)
        inputs = torch.ones(len(many), 4, dtype=torch.bfloat16)
        counted = plain(impl.accumulate_and_reduce(low, [(inputs, many)]))
        return counted, plain(impl.accumulate_and_reduce(steep(), steep_window()))

    nbytes = (64 * 64 + 64) * 12 + 600 * 2  # of the parameters that are not frozen, each once
    results = run(body, 3, delays=True)
    for rank, (answer, uneven) in enumerate(results):
        _, targets = expect_numbers(answer, [float, int], "a model in bfloat16", rank)
        what = "261, 262 and 263 targets, a model in bfloat16: targets"
        expect_equal(targets, 786, what=what, rank=rank, cause="targets")
        what = "a micro-batch whose loss is 2^20, 40 whose loss is 0.036, in float32"
        loss, targets = expect_numbers(uneven, [float, int], what, rank)
        if not abs(loss * targets / 3 - STEEP) <= 0.2:
            text = f"{what}: their sum is {STEEP:.2f}, got {loss * targets / 3:.2f}: add in float64"
            fail(text, cause="losses-rounded", rank=rank)
    for log in results.logs:
        log = log.select(region="window")
        log.all_waited()
        share = 4 / 3 * nbytes
        log.sent_at_most(share + 200, "2(W-1)/W of the trainable bytes, once per window")
        log.sent_at_least(share - 16, "2(W-1)/W of the trainable bytes")
        if len(log.events) > 5:
            fail(
                f"rank {log.rank} issued {len(log.events)} collectives for a window with "
                "parameters of 3 dtypes; at most 5 are needed",
                cause="too-many-messages",
                rank=log.rank,
            )


@exercise("2.2", "virtual", asserts="no-target alone")
def test_window_without_any_target(impl, run, seed):
    """No rank has a target: zero gradients, (0.0, 0), and no rank hangs or divides by zero."""

    def body(ctx):
        model = net(seed)
        window = window_of(seed, ctx.rank, [(2, 2)] * ctx.rank)
        for p in model.parameters():  # from before: must be forgotten
            p.grad = torch.ones_like(p) if p.requires_grad else None
        answer = plain(impl.accumulate_and_reduce(model, window, loss_scale=8.0))
        return answer, gradients(model)

    for rank, (answer, got) in enumerate(run(body, 2)):
        expect_numbers(answer, [float, int], "without targets", rank)
        cause = "no-target"
        expect_equal(list(answer), [0.0, 0], what="loss and targets", rank=rank, cause=cause)
        model = net(seed)
        expected(model, [], 1)
        compare(got, gradients(model), "no rank has a target", rank)


@exercise("2.2", "virtual", asserts="freed resources")
def test_reduction_keeps_no_graph(impl, run, seed):
    """The activations of one micro-batch are freed before the next one runs."""

    def body(ctx):
        model = Watched()
        impl.accumulate_and_reduce(model, window_of(seed, ctx.rank, RANKS[ctx.rank]))
        return model.seen

    for seen, shape in zip(run(body, 2), RANKS, strict=False):
        expect_freed(seen, shape)


@trace("2.1")
@trace("2.2")
@trace("2.3")
def trace_windows(impl):
    """Two optimizer steps of four micro-batches each, on the digits."""
    digits()

    def body(ctx):
        images, labels = digits()[ctx.rank :: ctx.world_size]
        model = build_model("mlp", 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in ctx.steps(3):
            chosen = [slice(32 * k, 32 * k + 32) for k in range(4 * step, 4 * step + 4)]
            window = [(images[c], labels[c]) for c in chosen]
            impl.train_window(model, optimizer, window, max_norm=1.0)

    return body
