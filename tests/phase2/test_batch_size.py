"""Checks of exercise 2.4: the largest micro-batch that fits, and a learning rate for the batch."""

from __future__ import annotations

import math
import weakref

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
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

UNIT = 1000  # bytes per sample of the trials that only say what they need


def peak_of(run) -> int:
    """What ``make_trial`` is given to measure with on the CPU."""
    with PeakMemory() as memory:
        run()
    return memory.peak


def unmeasured(run) -> int:
    run()
    return 0


def run_out(kind: str, device) -> None:
    """Run out of memory in one of the ways that there are."""
    if kind == "allocator":
        torch.empty(2**50, device=device)  # 4 PB: refused by the CPU's and by CUDA's allocator
    if kind == "python":
        raise MemoryError
    raise torch.OutOfMemoryError(f"out of memory ({kind})")


# -- learning rate and number of micro-batches ----------------------------------------------------
@exercise("2.4", "virtual")
def test_learning_rate_follows_the_linear_rule(impl, run):
    """k·η after a warm-up from η in equal steps; at once without warm-up or for a small batch."""
    cases = [(256, 1024, 10), (256, 8192, 5), (64, 64, 4), (64, 16, 4), (32, 96, 0), (8, 16, 1)]

    def body(ctx):
        rates = [
            [
                impl.scaled_learning_rate(
                    step, base_lr=0.1, base_batch=base, global_batch=batch, warmup_steps=warmup
                )
                for step in range(14)
            ]
            for base, batch, warmup in cases
        ]
        right = {"step": 0, "base_batch": 8, "global_batch": 8, "warmup_steps": 1, "base_lr": 0.1}
        return rates, [refusal(impl.scaled_learning_rate, **(right | each)) for each in wrong]

    wrong = [{"step": -1}, {"warmup_steps": -1}, {"base_batch": 0}, {"global_batch": 0}]
    rates, refused = run(body, 1)[0]
    for got, (base, batch, warmup) in zip(rates, cases, strict=True):
        what = f"η = 0.1 for batches of {base}, now {batch}, warm-up of {warmup} steps"
        peak = 0.1 * batch / base
        for step, rate in reversed(list(enumerate(got))):  # after the warm-up first
            warm = batch > base and step < warmup
            want = 0.1 + (peak - 0.1) * step / warmup if warm else peak
            if not math.isclose(rate, want, rel_tol=1e-9):
                cause = "warm-up" if warm else "linear-rule"
                fail(f"{what}: step {step} should take {want:g}, got {rate:g}", cause=cause)
    expect_refusals(refused, [(f"a rate for {each}", ()) for each in wrong])


@exercise("2.4", "virtual")
def test_accumulation_steps_divide(impl, run):
    """Micro-batches per rank and step; a batch that does not divide is refused with its numbers."""
    right = [(256, 8, 4, 8), (30, 5, 3, 2), (7, 7, 1, 1), (12, 1, 4, 3)]
    wrong = [(256, 7, 4), (10, 5, 4), (8, 0, 4), (0, 1, 1), (8, 8, 0), (8, 16, 1)]

    def body(ctx):
        steps = [impl.accumulation_steps(*case[:3]) for case in right]
        said = []
        for case in wrong:
            try:
                said.append(f"accepted, {impl.accumulation_steps(*case)} steps")
            except ValueError as error:
                said.append(f"refused: {error}")
        return steps, said

    steps, said = run(body, 1)[0]
    for got, (batch, micro, world, want) in zip(steps, right, strict=True):
        what = f"micro-batches of {micro} per rank for a global batch of {batch} on {world} ranks"
        expect_equal(got, want, what=what, cause="wrong-steps")
    for text, case in zip(said, wrong, strict=True):
        what = f"global batch, micro-batch, ranks = {case}"
        if text.startswith("accepted"):
            fail(f"{what}: expected a ValueError, but it was {text}", cause="accepted")
        if not all(str(number) in text for number in case):
            fail(f"{what}: the message lacks a number: {text!r}", cause="message")


# -- the search -----------------------------------------------------------------------------------
KINDS = ("budget", "allocator", "python", "cuda")


def check_search(run, impl, capacities: list[int], upper: int) -> None:
    """``capacities``: what fits on each rank; each fails in another way beyond it."""

    def body(ctx):
        tried = []

        def trial(size):
            tried.append(size)
            kind = KINDS[ctx.rank % len(KINDS)]
            if size > capacities[ctx.rank] and kind != "budget":
                run_out(kind, ctx.device)
            return size * UNIT if kind == "budget" else 0

        budget = capacities[0] * UNIT + UNIT // 2
        got = impl.largest_micro_batch(trial, upper, budget_bytes=budget, device=ctx.device)
        return got, tried

    results = run(body, len(capacities))
    want = min(*capacities, upper)
    where = f"ranks that hold {capacities}, at most {upper}"
    if len({got for got, _ in results}) > 1:
        fail(
            f"{where}: the ranks have different answers, {[got for got, _ in results]}",
            cause="ranks-differ",
        )
    for rank, (got, tried) in enumerate(results):
        what = f"{where}: largest micro-batch"
        expect_equal(got, want, what=what, rank=rank, cause="not-largest")
        compare_tried(tried, want, upper, f"{where}: rank {rank} tried {tried}", rank)


def compare_tried(tried: list[int], answer: int, upper: int, what: str, rank: int) -> None:
    most = 2 * math.log2(upper) + 2
    if len(tried) > most:
        text = f"{what}: {len(tried)} trials, at most {most:.1f} = 2·log2(upper) + 2 are needed"
        fail(text, cause="too-many-trials", rank=rank)
    if max(tried) > min(upper, 2 * answer):
        text = f"{what}, which is more than twice the answer {answer} or more than {upper}"
        fail(text, cause="tried-too-large", rank=rank)
    if answer not in tried or min(tried) < 1:
        fail(f"{what}, but returned {answer}", cause="never-tried", rank=rank)


@exercise("2.4", "virtual gloo cuda")
def test_search_finds_the_largest_on_all_ranks(impl, run, cases):
    """largest_micro_batch is what fits on all ranks, whichever way one of them runs out."""
    for capacities, upper in cases(
        ([23, 37, 50, 91], 100),
        ([90, 12, 8, 30], 64),
        ([40, 1, 40], 1000),
        ([63, 80, 64], 63),
        ([200], 150),
        ([3, 2], 2),
        ([5, 5], 1),
    ):
        check_search(run, impl, capacities, upper)


@exercise("2.4", "virtual")
def test_refusals_are_the_same_on_all_ranks(impl, run):
    """Not even 1 fits on one rank: ValueError on all; so for a limit below 1, before any trial."""

    def body(ctx):
        tried, out = [], []

        def trial(size):
            tried.append(size)
            if ctx.rank == 1:
                run_out("cuda", ctx.device)
            return 700

        for upper, budget in ((8, math.inf), (8, 512.0), (0, math.inf), (-3, 1e9)):
            tried.clear()
            try:
                got = impl.largest_micro_batch(trial, upper, budget_bytes=budget)
                out.append([f"returned {got}", len(tried)])
            except ValueError as error:
                out.append([f"refused: {error}", len(tried)])
        return out

    for rank, out in enumerate(run(body, 3)):
        for (said, trials), upper in zip(out, (8, 8, 0, -3), strict=True):
            what = f"at most {upper}" if upper < 1 else "not even 1 fits on rank 1"
            if not said.startswith("refused"):
                fail(f"{what}: expected a ValueError, but it {said}", cause="accepted", rank=rank)
            if upper < 1 and trials:
                fail(f"{what}: refused only after {trials} trials", cause="late-check", rank=rank)
            if upper < 1 and str(upper) not in said:
                fail(f"{what}: the message lacks the number: {said!r}", cause="message", rank=rank)
        if "512" not in out[1][0]:
            fail(f"the message lacks the budget of 512: {out[1][0]!r}", cause="message", rank=rank)


@exercise("2.4", "virtual")
def test_other_errors_come_out(impl, run):
    """Wrong shapes are a mistake, not a lack of memory."""

    def body(ctx):
        def trial(size):
            if size > 4:
                torch.ones(2, 3) @ torch.ones(2, 3)
            return size

        try:
            return f"returned {impl.largest_micro_batch(trial, 64)}"
        except RuntimeError as error:
            return f"raised {error}"

    for rank, said in enumerate(run(body, 2)):
        if "shapes cannot be multiplied" not in said:
            text = f"a trial with a mistake in it: its RuntimeError must come out, but it {said}"
            fail(text, cause="error-swallowed", rank=rank)


@exercise("2.4", "virtual gloo cuda")
def test_a_trial_leaves_no_memory_behind(impl, run):
    """When a trial begins, nothing of the earlier ones is alive, though errors hold frames."""

    def body(ctx):
        made, alive = [], []

        def trial(size):
            alive.append(sum(made_before() is not None for made_before in made))
            activations = torch.zeros(size, device=ctx.device)
            made.append(weakref.ref(activations))
            if size > 5:
                error = torch.OutOfMemoryError("out of memory")
                raise error  # it refers to this frame, which refers to it
            return 0

        found = impl.largest_micro_batch(trial, 40, device=ctx.device)
        return found, alive

    for rank, (found, alive) in enumerate(run(body, 2)):
        if any(alive):
            fail(
                f"tensors of earlier trials alive when each trial began: {alive}; leave the except "
                "clause (its error holds the frames, they hold the tensors) and collect garbage",
                cause="memory-kept",
                rank=rank,
            )
        expect_equal(found, 5, what="largest micro-batch", rank=rank, cause="not-largest")


@exercise("2.4", "virtual")
def test_search_in_a_subgroup(impl, run):
    """Only the ranks of the group take part and count."""

    def body(ctx):
        group = dist.new_group([1, 3])
        capacity = [2, 11, 3, 29][ctx.rank]
        if ctx.rank in (1, 3):
            trial = lambda size: size * UNIT
            budget = capacity * UNIT
            return impl.largest_micro_batch(trial, 64, budget_bytes=budget, group=group)
        return None

    _, first, _, second = run(body, 4)
    expect_equal([first, second], [11] * 2, what="largest for ranks 1 and 3 that hold 11 and 29")


# -- trials with a model --------------------------------------------------------------------------
class Net(nn.Module):
    """Few parameters, large activations, and everything that a forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.drop, self.last = nn.Dropout(0.3), nn.Conv1d(4, 2, 1)

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.norm(self.first(x))))).square().mean()


def net(seed: int, device="cpu") -> nn.Module:
    torch.manual_seed(seed)
    return Net().to(device)


def peaks_by_size(seed: int) -> list[int]:
    """Bytes at the peak of forward and backward of 1, 2, … 24 samples."""
    peaks = []
    with torch.random.fork_rng(devices=[]):
        for size in range(1, 25):
            model, x = net(seed), torch.zeros(size, 2, 512)
            peaks.append(peak_of(lambda model=model, x=x: model(torch.zeros_like(x)).backward()))
    return peaks


@exercise("2.4", "virtual")
def test_budget_in_bytes_is_kept(impl, run, seed):
    """Forward and backward of the answer stay within the budget, one sample more does not."""

    peaks = peaks_by_size(seed)
    budget = (peaks[12] + peaks[13]) / 2  # 13 fit

    def body(ctx):
        model = net(seed)
        trial = impl.make_trial(model, lambda size: model(torch.zeros(size, 2, 512)), peak_of)
        return impl.largest_micro_batch(trial, 24, budget_bytes=budget)

    for rank, got in enumerate(run(body, 2)):
        if got == 13:
            continue
        needed = f"{peaks[got - 1]:,} bytes" if 1 <= got <= 24 else "?"
        text = f"budget {budget:,.0f} bytes: 13 samples fit, got {got}, which take {needed}"
        fail(text + " with backward", cause="over-budget" if got > 13 else "not-largest", rank=rank)


@exercise("2.4", "virtual gloo cuda")
def test_trials_train_nothing(impl, run, seed, cases):
    """make_trial leaves weights, gradients, buffers, optimizer and random state as they are."""
    for fails in cases(True, False):
        check_untouched(run, impl, seed, fails)


def check_untouched(run, impl, seed: int, fails: bool) -> None:
    def body(ctx):
        model = net(seed, ctx.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 2, 16, device=ctx.device)).backward()
        optimizer.step()
        model.first.bias.grad = None
        x = torch.rand(8, 2, 16, device=ctx.device)

        def state():
            moments = [s["exp_avg"] for s in optimizer.state.values()]
            grads = [torch.zeros(0) if p.grad is None else p.grad for p in model.parameters()]
            where = {"parameters": list(model.parameters()), "gradients": grads}
            where |= {"buffers": list(model.buffers()), "optimizer": moments}
            where["random state"] = [torch.get_rng_state()]
            return {
                kind: [t.detach().cpu().clone() for t in tensors] for kind, tensors in where.items()
            }

        def loss_of(size):
            loss = model(x[:size])
            if fails and size > 3:
                loss.backward()  # gradients are there already when it happens
                run_out("cuda", ctx.device)
            return loss

        before, same = state(), [p.grad for p in model.parameters()]
        trial = impl.make_trial(model, loss_of, unmeasured)
        got = impl.largest_micro_batch(trial, 8, device=ctx.device)
        kept = [p.grad is g for p, g in zip(model.parameters(), same, strict=True)]
        return got, before, state(), kept

    for rank, (got, before, after, kept) in enumerate(run(body, 2)):
        differ = [
            kind
            for kind, tensors in before.items()
            if not all(map(torch.equal, tensors, after[kind]))
        ]
        if differ or not all(kept):
            fail(
                f"the search has changed {', '.join(differ) or 'which tensor a p.grad is'}: "
                "put back what forward and backward change, also after an error",
                cause="trained",
                rank=rank,
            )
        expect_equal(got, 3 if fails else 8, what="largest micro-batch", rank=rank)


def test_k_small_steps_equal_one_scaled_step():
    """The linear rule is exact where gradients don't depend on the weights: its derivation."""
    parts = torch.randn(4, 5, dtype=torch.float64)
    small = sum(-0.1 * part for part in parts)
    expect_close(-0.4 * parts.mean(0), small, what="one step of 4·η on the mean of 4 batches")


@trace("2.4")
def trace_search(impl):
    """The search for a micro-batch of digits that needs at most 4 MB, on all ranks."""
    digits()

    def body(ctx):
        images, labels = digits().tensors
        model = build_model("cnn", 0)
        loss = nn.CrossEntropyLoss()
        trial = impl.make_trial(
            model, lambda size: loss(model(images[:size]), labels[:size]), peak_of
        )
        ctx.start_picture()
        impl.largest_micro_batch(trial, 512, budget_bytes=4e6)

    return body
