"""Checks of exercise 2.4: the largest micro-batch that fits, and a learning rate for the batch."""

from __future__ import annotations

import contextlib
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
from tests.phase2.windows import plain

UNIT = 1000  # bytes per sample of the trials that only say what they need


def peak_of(run) -> int:
    """The memory meter that ``make_trial`` gets on the CPU."""
    with PeakMemory() as memory:
        run()
    return memory.peak


def unmeasured(run) -> int:
    run()
    return 0


def run_out(kind: str, device) -> None:
    """Run out of memory in one of the possible ways."""
    if kind == "allocator":
        torch.empty(2**50, device=device)  # 4 PB: refused by the CPU's and by CUDA's allocator
    if kind == "python":
        raise MemoryError
    raise torch.OutOfMemoryError(f"out of memory ({kind})")


# -- learning rate and number of micro-batches ----------------------------------------------------
@exercise("2.4", "virtual", asserts="rate rate-refused refusals")
def test_learning_rate_follows_the_linear_rule(impl, run):
    """k·η after a warm-up from η in equal steps; at once without warm-up or for a small batch."""
    cases = [(256, 1024, 10), (256, 8192, 5), (64, 64, 4), (64, 16, 4), (32, 96, 0), (8, 16, 1)]
    cases += [(10, 25, 3), (64, 16, 0), (3, 4, 2), (1, 2, 13)]

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
    wrong += [{"base_batch": -8, "global_batch": -8}, {"step": -1, "warmup_steps": 0}]
    rates, refused = run(body, 1)[0]
    for got, (base, batch, warmup) in zip(rates, cases, strict=True):
        what = f"η = 0.1 for batches of {base}, now {batch}, warm-up of {warmup} steps"
        peak = 0.1 * batch / base
        for step, rate in reversed(list(enumerate(got))):  # after the warm-up first
            warm = batch > base and step < warmup
            want = 0.1 + (peak - 0.1) * step / warmup if warm else peak
            if not isinstance(rate, int | float) or not math.isclose(rate, want, rel_tol=1e-9):
                cause = "warm-up" if warm else "linear-rule"
                fail(f"{what}: step {step} should take {want:.9g}, got {rate!r}", cause=cause)
    expect_refusals(refused, [f"a rate for {each}" for each in wrong])


@exercise("2.4", "virtual", asserts="steps refused refusals")
def test_accumulation_steps_divide(impl, run):
    """Micro-batches per rank and step; a batch that does not divide is refused."""
    right = [(256, 8, 4, 8), (30, 5, 3, 2), (7, 7, 1, 1), (12, 1, 4, 3), (3 * 2**54 + 3, 3, 1, 0)]
    wrong = [(256, 7, 4), (10, 5, 4), (8, 0, 4), (0, 1, 1), (8, 8, 0), (8, 16, 1)]
    wrong += [(-8, 2, 4), (8, -2, 4), (8, 2, -4), (8, -2, -4), (-8, -2, 4), (2**55 + 1, 2, 1)]

    def body(ctx):
        steps = [impl.accumulation_steps(*case[:3]) for case in right]
        return plain(steps), [refusal(impl.accumulation_steps, *case) for case in wrong]

    steps, refused = run(body, 1)[0]
    for got, (batch, micro, world, _) in zip(steps, right, strict=True):
        what = f"micro-batches of {micro} per rank for a global batch of {batch} on {world} ranks"
        expect_equal(got, batch // (micro * world), what=what, cause="wrong-steps")
        expect_equal(isinstance(got, int), True, what=f"{what}: an int", cause="type")
    expect_refusals(refused, [f"global batch, micro-batch, ranks = {case}" for case in wrong])


# -- the search -----------------------------------------------------------------------------------
KINDS = ("budget", "allocator", "python", "cuda")


def check_search(run, impl, capacities: list[int], upper: int) -> None:
    """``capacities``: the batch that fits on each rank; beyond it each
    rank fails in another way."""

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
    if len({tuple(tried) for _, tried in results}) > 1:
        text = f"the ranks tried different sizes: {[tried for _, tried in results]}"
        fail(text, cause="ranks-differ")
    for log, (_, tried) in zip(results.logs, results, strict=True):
        sizes = [(event.op, event.numel) for event in log.events]
        if [numel for _, numel in sizes] != [1] * len(tried):
            text = f"rank {log.rank} sent {sizes} in {len(tried)} trials: one integer each"
            fail(text, cause="cost", rank=log.rank)


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


@exercise(
    "2.4",
    "virtual gloo cuda",
    nccl=True,
    asserts="largest equal-sizes few-trials bounded tried agree out-of-memory cost alone",
)
def test_search_finds_the_largest_on_all_ranks(impl, run, cases):
    """largest_micro_batch fits on all ranks, in whichever way one of them runs out of memory."""
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


@exercise("2.4", "virtual", asserts="search-refused alone refusals")
def test_refusals_are_the_same_on_all_ranks(impl, run):
    """If not even 1 fits on one rank, all raise ValueError; for a limit
    below 1 before any trial."""
    calls = ((8, math.inf), (8, 512.0), (0, math.inf), (-3, 1e9))

    def body(ctx):
        tried, refused, trials = [], [], []

        def trial(size):
            tried.append(size)
            if ctx.rank == 1:
                run_out("cuda", ctx.device)
            return 700

        for upper, budget in calls:
            tried.clear()
            with ctx.region("early" if upper < 1 else ""):
                search = impl.largest_micro_batch
                refused.append(refusal(search, trial, upper, budget_bytes=budget))
            trials.append(len(tried))
        return refused, trials

    results = run(body, 3)
    names = ["1 does not fit on rank 1", "1 does not fit into 512 bytes", "at most 0", "at most -3"]
    for rank, (refused, trials) in enumerate(results):
        expect_refusals(refused, names, rank=rank)
        what = "trials before each refusal"
        expect_equal(trials, [1, 1, 0, 0], what=what, rank=rank, cause="late-check")
        sent = len(results.logs[rank].select(region="early").events)
        expect_equal(sent, 0, what="messages before a bad limit was refused", cause="late-check")


MISTAKES = (
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    RuntimeError("memory format is not supported: out of range"),
    ValueError("can't allocate memory"),
    KeyError("a sample"),
)


@exercise("2.4", "virtual", asserts="other-errors nobody-alone told-by-type life alone")
def test_other_errors_come_out(impl, run):
    """Wrong shapes are a mistake: the same error comes out, and no rank goes on alone."""

    def body(ctx):
        found = []
        for error in MISTAKES:

            def trial(size, error=error, mine=True):
                if size > 4 and mine:
                    raise error
                return size

            try:
                found.append(f"returned {impl.largest_micro_batch(trial, 64)}")
            except Exception as came:
                found.append("" if came is error else f"raised {type(came).__name__}: {came}")
        mine = ctx.rank == 1  # only this rank has the last error
        try:
            some = impl.largest_micro_batch(lambda size: trial(size, mine=mine), 64)
            found.append(f"returned {some}")
        except Exception as came:
            same = came is error if mine else isinstance(came, RuntimeError)
            found.append("" if same else f"raised {type(came).__name__}: {came}")

        def both(size):
            if size > 4 and not mine:
                run_out("cuda", ctx.device)
            return trial(size, mine=mine)

        try:  # rank 1 has the last error where the others run out of memory
            found.append(f"returned {impl.largest_micro_batch(both, 64)}")
        except Exception as came:
            same = came is error if mine else isinstance(came, RuntimeError)
            same &= not isinstance(came, torch.OutOfMemoryError)
            found.append("" if same else f"raised {type(came).__name__}: {came}")
        out = [*OUT, RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")]
        tell = getattr(impl, "is_out_of_memory", None)  # another program may have no such part
        if tell is None:
            return found, [True], [False]
        return found, [tell(error) for error in out], [tell(error) for error in MISTAKES]

    for rank, (found, told, others) in enumerate(run(body, 2)):
        *everywhere, alone, beside = found
        for error, said in zip(MISTAKES, everywhere, strict=True):
            what = f"what became of a trial's {error!r}"
            expect_equal(said, "", what=what, rank=rank, cause="error-swallowed")
        what = f"rank 1 alone raises {MISTAKES[-1]!r}, the other one a RuntimeError, but it"
        expect_equal(alone, "", what=what, rank=rank, cause="goes-on-alone")
        what += ", also where it runs out of memory itself,"
        expect_equal(beside, "", what=what, rank=rank, cause="goes-on-alone")
        expect_equal(all(told), True, what="errors that are a lack of memory", cause="not-told")
        expect_equal(any(others), False, what="other errors", cause="error-swallowed")


OUT = (
    torch.OutOfMemoryError("full"),
    MemoryError(),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
)


@exercise("2.4", "virtual gloo cuda", asserts="freed resources")
def test_a_trial_leaves_no_memory_behind(impl, run):
    """When a trial begins, no tensor of earlier trials is alive, although errors hold frames."""

    def body(ctx):
        made, alive = [], []

        def trial(size):
            alive.append(sum(made_before() is not None for made_before in made))
            activations = torch.zeros(size, device=ctx.device)
            made.append(weakref.ref(activations))
            itself = [activations]
            itself.append(itself)  # only the garbage collector frees it
            if size > 5:
                error = torch.OutOfMemoryError("out of memory")
                raise error  # it refers to this frame, which refers to it
            return 0

        found = impl.largest_micro_batch(trial, 40, device=ctx.device)
        return found, alive

    for rank, (found, alive) in enumerate(run(body, 2)):
        if any(alive):
            fail(
                f"tensors of earlier trials alive when each trial began: {alive}. Leave the except "
                "clause (its error holds the frames, they hold the tensors) and collect garbage",
                cause="memory-kept",
                rank=rank,
            )
        expect_equal(found, 5, what="largest micro-batch", rank=rank, cause="not-largest")


@exercise("2.4", "virtual", asserts="group")
def test_search_in_a_subgroup(impl, run):
    """Only the ranks of the group take part and count."""

    def body(ctx):
        ours, theirs = dist.new_group([3, 1]), dist.new_group([0, 2])
        budget = [2, 11, 3, 29][ctx.rank] * UNIT
        group = ours if ctx.rank in (1, 3) else theirs
        trial = lambda size: size * UNIT
        return impl.largest_micro_batch(trial, 64, budget_bytes=budget, group=group)

    what = "largest for ranks 0 and 2, which hold 2 and 3, and for 1 and 3, which hold 11 and 29"
    expect_equal(list(run(body, 4)), [2, 11, 2, 11], what=what, cause="group")


# -- trials with a model --------------------------------------------------------------------------
class Net(nn.Module):
    """Few parameters, large activations, and everything that a forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.drop, self.last = nn.Dropout(0.3), nn.Conv1d(4, 2, 1)
        self.last.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x):
        self.calls += 1
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


@exercise("2.4", "virtual", asserts="peak-returned budget")
def test_budget_in_bytes_is_kept(impl, run, seed):
    """Forward and backward of the answer stay within the budget; those of
    one sample more do not."""

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


@exercise("2.4", "virtual gloo cuda", asserts="no-trace budget life parameters resources")
def test_trials_train_nothing(impl, run, seed, cases):
    """make_trial leaves weights, gradients, buffers, optimizer and random state as they are."""
    for fails in cases(True, False):
        check_untouched(run, impl, seed, fails)


STOPPED = 9  # samples of a trial that ends with a KeyError


def check_untouched(run, impl, seed: int, fails: bool) -> None:
    def body(ctx):
        model = net(seed, ctx.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        trial = impl.make_trial(model, lambda size: loss_of(size), unmeasured)  # trained later
        model(torch.ones(2, 2, 16, device=ctx.device)).backward()
        optimizer.step()
        model.first.bias.grad = None
        model.last.bias.grad = torch.ones(2, device=ctx.device)
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

        clean = []

        def loss_of(size):
            clean.append(all(p.grad is None for p in model.parameters()))
            loss = model(x[:size])
            if size == STOPPED or (fails and size > 3):
                loss.backward()  # gradients are there already when it happens
            if size == STOPPED:
                raise KeyError("a sample")
            if fails and size > 3:
                run_out("cuda", ctx.device)
            return loss

        before, same = state(), [p.grad for p in model.parameters()]
        held = list(model.buffers())
        got = impl.largest_micro_batch(trial, 8, device=ctx.device)
        with contextlib.suppress(KeyError):
            trial(STOPPED)
        kept = [p.grad is g for p, g in zip(model.parameters(), same, strict=True)]
        kept += [a is b for a, b in zip(model.buffers(), held, strict=True)]
        return got, before, state(), kept, all(clean)

    for rank, (got, before, after, kept, clean) in enumerate(run(body, 2)):
        differ = [
            kind
            for kind, tensors in before.items()
            if not all(map(torch.equal, tensors, after[kind]))
        ]
        if differ or not all(kept):
            fail(
                f"the search has changed {', '.join(differ) or 'which tensor a gradient is'}: "
                "put back what forward and backward change, also after an error",
                cause="trained",
                rank=rank,
            )
        what = "a trial's forward begins without any gradient"
        expect_equal(clean, True, what=what, rank=rank, cause="over-budget")
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
