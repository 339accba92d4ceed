"""Checks of exercises 2.1 to 2.3: micro-batches, one reduction per step, clipping."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.nn.functional as F
from torch import nn

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refusals,
    fail,
    refusal,
    trace,
)
from distlab.observe.memory import PeakMemory
from distlab.reference.workloads import build_model, digits

CLASSES = 3


class Odd(nn.Module):
    """Tied, frozen and unused parameters, and two dtypes of gradients are possible."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(self.frozen(x))))))


def net(seed: int) -> Odd:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Odd().double()


def micro_batch(seed: int, n: int, ignored: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """``n`` samples, the last ``ignored`` of which have no target."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, CLASSES, (n,), generator=generator)
    targets[n - ignored :] = -100
    return inputs, targets


# (samples, without target) per micro-batch, per rank: 1, 7 and 3 counted targets and so on
WINDOW = [(1, 0), (9, 2), (3, 0), (2, 2)]
RANKS = [[(1, 0), (9, 2), (3, 0)], [(4, 1)], [], [(2, 2), (5, 0)], [(6, 3)]]


def window_of(seed: int, rank: int, shape: list[tuple[int, int]]):
    return [micro_batch(seed * 100 + rank * 10 + k, *s) for k, s in enumerate(shape)]


def joined(windows: list) -> tuple[torch.Tensor, torch.Tensor]:
    """All micro-batches of all windows as one batch."""
    every = [pair for window in windows for pair in window]
    return torch.cat([x for x, _ in every]), torch.cat([y for _, y in every])


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def whole_batch(seed: int, windows: list) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients and mean loss of one process on everything at once."""
    model = net(seed)
    loss = F.cross_entropy(model(joined(windows)[0]), joined(windows)[1])
    loss.backward()
    return gradients(model), loss.item()


def compare_gradients(got: dict, want: dict, rank: int, what: str, **explanation) -> None:
    for name, value in want.items():
        expect_close(
            got.get(name),
            value,
            what=f"{what}: gradient of {name}",
            rank=rank,
            rtol=1e-10,
            atol=1e-12,
            **explanation,
        )


# -- 2.1 ------------------------------------------------------------------------------------------
@exercise("2.1", "virtual")
def test_window_equals_the_full_batch(impl, run, seed):
    """Micro-batches of 1, 7, 3 and 0 counted targets give the gradient of the batch of 11."""

    def body(ctx):
        model = net(seed)
        loss = impl.accumulate(model, window_of(seed, 0, WINDOW), 11)
        return gradients(model), float(loss)

    ((got, loss),) = run(body, 1)
    want, mean = whole_batch(seed, [window_of(seed, 0, WINDOW)])
    compare_gradients(got, want, 0, "4 micro-batches of 1, 7, 3 and 0 targets")
    if abs(loss - 11 * mean) > 1e-9:
        fail(f"the sum of the 11 losses is {11 * mean}, got {loss}", cause="loss-value")


@exercise("2.1", "virtual")
def test_gradients_add_to_what_is_there(impl, run, seed):
    """Accumulating twice gives the sum: nothing is forgotten between windows."""

    def body(ctx):
        model = net(seed)
        for k in range(2):
            impl.accumulate(model, window_of(seed + k, 0, [(3, 0)]), 6)
        return gradients(model)

    (got,) = run(body, 1)
    want, _ = whole_batch(seed, [window_of(seed + k, 0, [(3, 0)]) for k in range(2)])
    compare_gradients(got, want, 0, "two windows one after the other")


@exercise("2.1", "gloo")
def test_one_micro_batch_is_alive_at_a_time(impl, run, seed):
    """Eight micro-batches need the memory of one: each runs backward at once."""

    def body(ctx):
        peaks = []
        for count in (1, 8):
            model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)], nn.Linear(256, 3))
            window = [(torch.zeros(512, 256), torch.zeros(512, dtype=torch.int64))] * count
            impl.accumulate(model, window[:1], 1.0)  # gradients are there
            with PeakMemory() as memory:
                impl.accumulate(model, iter(window), 512.0 * count)
            peaks.append(memory.peak)
        return peaks

    one, eight = run(body, 1, process_group=False, ledger=False)[0]
    if eight > 1.5 * one:
        fail(
            f"8 micro-batches hold {eight / 1e6:.1f} MB at their peak, one holds {one / 1e6:.1f}: "
            "all graphs are alive at once; run backward for each micro-batch",
            cause="graphs-kept",
        )


@exercise("2.1", "gloo")
def test_windows_cut_the_stream(impl, run):
    """Windows of the wanted size, the incomplete last one too, read no further than needed."""

    def body(ctx):
        cut = [list(map(list, impl.windows(iter(range(n)), 3))) for n in (7, 6, 0, 2)]
        read = []

        def stream():
            for k in range(9):
                read.append(k)
                yield k

        first = list(next(iter(impl.windows(stream(), 2))))
        read_ahead = len(read)
        return cut, first, read_ahead, [refusal(impl.windows, stream(), n) for n in (0, -1)]

    cut, first, read, refused = run(body, 1, process_group=False)[0]
    want = [[[0, 1, 2], [3, 4, 5], [6]], [[0, 1, 2], [3, 4, 5]], [], [[0, 1]]]
    for n, got, right in zip((7, 6, 0, 2), cut, want, strict=True):
        lost = sum(map(len, got)) < n
        what = f"windows of 3 from {n} micro-batches"
        expect_equal(got, right, what=what, cause="window-lost" if lost else "wrong-windows")
    expect_equal(first, [0, 1], what="the first window of 2")
    if read > 2:
        fail(f"{read} micro-batches were read for a window of 2", cause="reads-ahead")
    expect_refusals(refused, [("windows of 0 steps", ()), ("windows of -1 steps", ())])


# -- 2.2 ------------------------------------------------------------------------------------------
def own_gradients(seed: int, window: list) -> dict[str, torch.Tensor]:
    """Of the mean over the window's own targets; zeros if it has none."""
    model = net(seed)
    found = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
    if any((y != -100).any() for _, y in window):
        found |= whole_batch(seed, [window])[0]
    return found


def check_reduced(run, impl, seed: int, world_size: int, scale: float) -> None:
    shapes = RANKS[:world_size]

    def body(ctx):
        model = net(seed)
        frozen = list(model.frozen.parameters())
        for p in model.parameters():  # from before: must not be counted
            p.grad = torch.ones_like(p)
        with ctx.region("window"):
            loss, total = impl.accumulate_and_reduce(
                model, window_of(seed, ctx.rank, shapes[ctx.rank]), loss_scale=scale
            )
        return gradients(model), float(loss), int(total), [p.grad for p in frozen]

    results = run(body, world_size)
    windows = [window_of(seed, rank, shape) for rank, shape in enumerate(shapes)]
    want, mean = whole_batch(seed, windows)
    want = {n: g * scale for n, g in want.items()}
    counts = [int(sum((y != -100).sum() for _, y in window)) for window in windows]
    owns = [own_gradients(seed, window) for window in windows]
    what = f"{world_size} ranks with {counts} counted targets"
    for rank in reversed(range(world_size)):
        got, loss, total, frozen = results[rank]
        for name, value in want.items():
            expect_close(
                got.get(name),
                value,
                what=f"{what}: gradient of {name}",
                rank=rank,
                contributions=[own[name] * scale for own in owns],
                weights=counts,
                rtol=1e-10,
                atol=1e-12,
            )
        expect_equal(total, sum(counts), what=f"{what}: number of targets", rank=rank)
        changed = not all(grad is None or bool((grad == 1).all()) for grad in frozen)
        expect_equal(changed, False, what="frozen parameters changed", rank=rank)
        if abs(loss - mean) > 1e-9:
            fail(f"{what}: the mean loss is {mean}, got {loss}", cause="loss-value", rank=rank)


@exercise("2.2", "virtual gloo cuda")
def test_window_of_all_ranks_equals_one_process(impl, run, seed, cases):
    """The gradient of all ranks' targets, with uneven windows, some empty, and a loss scale."""
    for world_size, scale in cases((3, 1.0), (5, 8.0), (1, 1.0), (2, 1024.0)):
        check_reduced(run, impl, seed, world_size, scale)


@exercise("2.2", "virtual gloo")
def test_gradients_travel_once_per_window(impl, run, seed):
    """Bytes and messages don't grow with the number of micro-batches, and frozen ones stay."""

    def body(ctx):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 3))
        model[0].requires_grad_(False)
        window = [(torch.ones(2, 64), torch.zeros(2, dtype=torch.int64))] * (2 + 3 * ctx.rank)
        with ctx.region("window"):
            impl.accumulate_and_reduce(model, window)

    nbytes = (64 * 64 + 64 + 64 * 3 + 3) * 4  # of the two layers that are not frozen
    for log in run(body, 3, delays=True).logs:
        log = log.select(region="window")
        log.all_waited()
        share = 4 / 3 * nbytes
        log.sent_at_most(share + 200, "2(W-1)/W of the trainable bytes, once per window")
        log.sent_at_least(share - 16, "2(W-1)/W of the trainable bytes")
        if log.messages > 3:
            fail(
                f"rank {log.rank} issued {log.messages} collectives for a window, at most 3 needed",
                cause="too-many-messages",
                rank=log.rank,
            )


@exercise("2.2", "virtual")
def test_window_without_any_target(impl, run, seed):
    """No rank has a target: zero gradients, (0.0, 0), and nobody hangs or divides by zero."""

    def body(ctx):
        model = net(seed)
        window = window_of(seed, ctx.rank, [(2, 2)] * ctx.rank)
        loss, total = impl.accumulate_and_reduce(model, window)
        largest = max(float(g.abs().max()) for g in gradients(model).values())
        return [float(loss), int(total), largest]

    for rank, got in enumerate(run(body, 2)):
        expect_equal(got, [0.0, 0, 0.0], what="loss, targets, largest gradient", rank=rank)


# -- 2.3 ------------------------------------------------------------------------------------------
@exercise("2.3", "gloo")
def test_clipping_scales_all_by_one_factor(impl, run, seed):
    """The joint norm of all gradients, tied once; small ones and infinite ones are left alone."""

    def body(ctx):
        out = []
        for factor, limit in ((1.0, 2.0), (1.0, 1e9), (float("inf"), 1.0)):
            model = net(seed)
            generator = torch.Generator().manual_seed(seed)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype) * factor
            model.unused.grad = None
            listed = [*model.parameters(), model.second.weight]
            before = gradients(model)
            norm = impl.clip_by_global_norm(iter(listed), limit)
            out.append([float(norm), before, gradients(model)])
        clip, parameters = impl.clip_by_global_norm, net(seed).parameters
        return out, [refusal(clip, parameters(), limit) for limit in (0.0, -1.0)]

    out, refused = run(body, 1, process_group=False)[0]
    for (got, before, after), limit in zip(out, (2.0, 1e9, None), strict=True):
        flat = torch.cat([g.flatten() for g in before.values()])
        norm = float(flat.norm())
        if limit is None:
            if any(not torch.equal(after[n].isnan(), g.isnan()) for n, g in before.items()):
                fail("infinite gradients were turned into NaN", cause="not-finite")
            continue
        if abs(got - norm) > 1e-9 * norm:
            fail(f"the norm of all gradients before clipping is {norm}, got {got}", cause="norm")
        factor = min(1.0, limit / norm)
        for name, value in before.items():
            what = f"gradient of {name}, norm {norm:.3f} clipped to {limit:g}"
            expect_close(after[name], value * factor, what=what, rtol=1e-6, atol=1e-9)
    expect_refusals(refused, [("a limit of 0", ()), ("a limit of -1", ())])


@exercise("2.3", "virtual gloo cuda")
def test_clipped_step_equals_one_process(impl, run, seed, cases):
    """Reduce, unscale, clip, step: weights, loss and norm are those of one process."""
    for world_size, scale, limit in cases((3, 64.0, 0.05), (2, 1.0, 0.05), (4, 4.0, None)):
        check_step(run, impl, seed, world_size, scale, limit)


def check_step(run, impl, seed, world_size: int, scale: float, limit: float | None) -> None:
    shapes = RANKS[:world_size]

    def body(ctx):
        model = net(seed)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        own = window_of(seed, ctx.rank, shapes[ctx.rank])
        loss, norm = impl.train_window(
            model, optimizer, own, max_norm=limit, loss_scale=scale
        )
        return float(loss), float(norm), {n: p.detach() for n, p in model.named_parameters()}

    results = run(body, world_size)
    windows = [window_of(seed, rank, shape) for rank, shape in enumerate(shapes)]
    grads, mean = whole_batch(seed, windows)
    norm = float(torch.cat([g.flatten() for g in grads.values()]).norm())
    factor = 1.0 if limit is None else min(1.0, limit / norm)
    start = dict(net(seed).named_parameters())
    what = f"{world_size} ranks, loss scale {scale:g}, clipped to {limit}"
    for rank, (loss, got, weights) in enumerate(results):
        if abs(got - norm) > 1e-6 * norm:
            ratio = got / norm
            cause = "norm-scaled" if abs(ratio - scale) < 1e-3 * scale and scale > 1 else "norm"
            fail(f"{what}: the gradient's norm is {norm}, got {got}", cause=cause, rank=rank)
        if abs(loss - mean) > 1e-9:
            fail(f"{what}: the mean loss is {mean}, got {loss}", cause="loss-value", rank=rank)
        for name, p in start.items():
            want = (p - factor * grads[name]).detach() if name in grads else p.detach()
            expect_close(
                weights[name],
                want,
                what=f"{what}: {name} after the step",
                rank=rank,
                before=p.detach() if name in grads else None,
                rtol=1e-6,
                atol=1e-9,
            )


@exercise("2.3", "virtual")
def test_window_without_targets_steps_nothing(impl, run, seed):
    """Without targets anywhere, momentum and weight decay must not move the weights either."""

    def body(ctx):
        model = net(seed)
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=1.0, momentum=0.9, weight_decay=0.1)
        before = [p.detach().clone() for p in trainable]
        got = impl.train_window(model, optimizer, [], max_norm=1.0)
        return float(got[0]), float(got[1]), before, [p.detach() for p in trainable]

    for rank, (loss, norm, before, after) in enumerate(run(body, 2)):
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        got = [loss, norm, same]
        expect_equal(got, [0.0, 0.0, True], what="loss, norm, weights kept", rank=rank)


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
