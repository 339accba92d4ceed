"""Checks of exercise 2.13: the split backward, ZB-H1, and the pipeline that runs it."""

from __future__ import annotations

import torch
import torch._dynamo  # a dispatch mode imports it: once here, not per rank
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refusals,
    fail,
    refusal,
    trace,
)
from distlab.reference.workloads import Block
from tests.phase2.pipeline_orders import any_order, as_steps, completed, placement, plain
from tests.phase2.pipeline_runs import (
    UNIT,
    check_bubble,
    check_executed,
    check_order,
    check_peaks,
    check_run,
    paced_scenario,
)

SPLIT = {"F": 1.0, "B": 1.0, "W": 1.0}


class Odd(nn.Module):
    """A parameter of its own, a tied layer that is used twice, a frozen one, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4))
        self.twice, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.twice.weight
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.twice(torch.tanh(self.twice(self.frozen(x + self.shift))))
        return self.norm(self.tied(x))


def modules(seed: int) -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """(module, input) by name; the words take integers and so want no gradient of the input."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = {
            "layers": (nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5)), (3, 6)),
            "odd": (Odd(), (3, 4)),
            "transformer": (Block(8, 2), (2, 5, 8)),
            "convolution": (nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), (2, 1, 5, 5)),
        }
        pairs = {
            name: (module.double(), torch.randn(shape, dtype=torch.float64))
            for name, (module, shape) in found.items()
        }
        words = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)).double()
        return pairs | {"words": (words, torch.randint(0, 7, (5,)))}


def named_gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


# -- the split ------------------------------------------------------------------------------------
@exercise("2.13", "gloo")
def test_both_halves_make_the_whole_gradient(impl, run, seed):
    """Output, input's gradient and weights' gradients are those of an ordinary backward."""

    def body(ctx):
        out = {}
        for name, (module, x) in modules(seed).items():
            x = x.requires_grad_(x.is_floating_point())
            output, later = impl.split_forward(module, x)
            output.square().sum().backward()
            of_input = x.grad.clone() if x.requires_grad else None
            impl.weight_gradients(later)
            impl_left = len(later)
            hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())
            out[name] = [output.detach(), of_input, named_gradients(module), impl_left, hooks]
        return out

    (results,) = run(body, 1, process_group=False, ledger=False)
    for name, (module, x) in modules(seed).items():
        x = x.requires_grad_(x.is_floating_point())
        want = module(x)
        want.square().sum().backward()
        output, of_input, grads, left, hooks = results[name]
        close = {"rtol": 1e-10, "atol": 1e-12}
        expect_close(output, want.detach(), what=f"{name}: output", **close)
        if x.requires_grad:
            expect_close(of_input, x.grad, what=f"{name}: gradient of the input", **close)
        for parameter, value in named_gradients(module).items():
            what = f"{name}: gradient of {parameter}"
            expect_close(grads.get(parameter), value, what=what, **close)
        expect_equal(sorted(grads), sorted(named_gradients(module)), what=f"{name}: gradients")
        expect_equal(left, 0, what=f"{name}: entries left after weight_gradients", cause="kept")
        expect_equal(hooks, 0, what=f"{name}: hooks left on the module", cause="hooks-left")


@exercise("2.13", "gloo")
def test_backward_leaves_the_weights_alone(impl, run, seed):
    """After the first half no layer's weight has a gradient, after the second all have."""

    def body(ctx):
        module, x = modules(seed)["layers"]
        output, later = impl.split_forward(module, x.requires_grad_())
        output.sum().backward()
        before = sorted(named_gradients(module))
        impl.weight_gradients(later)
        return before, sorted(named_gradients(module))

    before, after = run(body, 1, process_group=False, ledger=False)[0]
    if before:
        text = f"the backward from the output already gave {', '.join(before)} a gradient"
        fail(f"{text}: that is W's work", cause="not-split")
    expect_equal(len(after), 4, what="gradients after W", cause="missing")


@exercise("2.13", "gloo")
def test_nothing_is_computed_twice(impl, run, seed):
    """B and W together have the FLOPs of one backward, and each about half of them."""

    def inputs() -> tuple[nn.Module, torch.Tensor]:
        module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
        return module, torch.ones(8, 64, requires_grad=True)

    def body(ctx):
        module, x = inputs()
        with FlopCounterMode(display=False) as forward:
            output, later = impl.split_forward(module, x)
        with FlopCounterMode(display=False) as first:
            output.sum().backward()
        with FlopCounterMode(display=False) as second:
            impl.weight_gradients(later)
        return [counter.get_total_flops() for counter in (forward, first, second)]

    again, first, second = run(body, 1, process_group=False, ledger=False)[0]
    module, x = inputs()
    with FlopCounterMode(display=False) as counter:
        output = module(x)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    whole = counter.get_total_flops()
    if again > forward:
        fail(f"the split forward takes {again} FLOPs, the module {forward}", cause="forward-twice")
    if first + second > whole:
        text = f"B takes {first} FLOPs and W {second}, an ordinary backward {whole}"
        fail(f"{text}: {(first + second) / whole:.2f} times the work", cause="double-work")
    if max(first, second) > 0.6 * whole:
        text = f"B takes {first} and W {second} of {whole} FLOPs: each should take half"
        fail(text, cause="not-split")


# -- the order ------------------------------------------------------------------------------------
@exercise("2.13", "gloo")
def test_zero_bubble_is_short_and_keeps_no_more_than_1f1b(impl, run):
    """Complete, the bubble of theory for m >= p, at most min(m, p) kept on every rank."""
    sizes = [(4, 8), (3, 3), (2, 1), (1, 4), (8, 11), (4, 2)]

    def body(ctx):
        complete = impl.module("pipeline_schedules").with_messages
        orders = [impl.zero_bubble(p, m) for p, m in sizes]
        return [[plain(order), plain(complete(order))] for order in orders]

    found = run(body, 1, process_group=False, ledger=False)[0]
    for (p, m), (order, schedule) in zip(sizes, found, strict=True):
        what = f"zero bubble with {p} ranks and {m} micro-batches"
        check_order(order, schedule, p, m, what)
        kinds = {kind for steps in order for kind, _, _ in steps}
        expect_equal(kinds, {"F", "B", "W"}, what=f"{what}: steps", cause="not-split")
        check_peaks(order, [min(m, p)] * p, what)
        longest = 3 * (m + p - 1) if m < p else 3 * m + p - 1
        check_bubble(order, [SPLIT], 1 - 3 * m / longest, what)


@exercise("2.13", "gloo")
def test_zero_bubble_refuses_bad_numbers(impl, run):
    """No ranks or no micro-batches: ValueError."""

    def body(ctx):
        return [refusal(impl.zero_bubble, 0, 2), refusal(impl.zero_bubble, 2, 0)]

    (refused,) = run(body, 1, process_group=False, ledger=False)
    expect_refusals(refused, [("a schedule of 0 ranks", ()), ("one of 0 micro-batches", ())])


# -- run ------------------------------------------------------------------------------------------
@exercise("2.13", "virtual gloo cuda")
def test_zero_bubble_equals_one_process(impl, run, seed, cases):
    """Gradients of every layer and the loss on all ranks, and of any schedule with W steps."""
    sizes = cases((3, 4, False, False), (2, 3, False, True), (4, 2, True, False))
    for ranks, m, frozen, chance in sizes:
        order = any_order(seed, placement("round", ranks, 1), m, "FBW")
        by_chance = completed(seed, order)

        def make(module):
            if chance:
                return as_steps(module, by_chance)
            complete = module.module("pipeline_schedules").with_messages
            return complete(module.zero_bubble(ranks, m))

        kind = "ZeroBubblePipeline"
        check_run(run, impl, seed, ranks, m, make, frozen=frozen, pipeline=kind)


@exercise("2.13", "virtual")
def test_zero_bubble_takes_the_time_of_theory(impl, run):
    """Run under a virtual clock with up to 16 stages: 3m + p-1 times a forward, min(m, p) kept."""
    for ranks, m in ((4, 8), (16, 16)):
        make = lambda module: module.module("pipeline_schedules").with_messages(
            module.zero_bubble(ranks, m)
        )
        limits = [min(m, ranks)] * ranks
        seconds = (3 * m + ranks - 1) * UNIT
        check_executed(run, impl, make, ranks, m, 1, seconds, limits, "ZeroBubblePipeline")


@trace("2.13", bubble=3 / 27)
def trace_zero_bubble(impl):
    """ZB-H1 with 8 micro-batches; F, B and W take the same time."""
    make = lambda module: module.module("pipeline_schedules").with_messages(
        module.zero_bubble(4, 8)
    )
    return paced_scenario(make, parts=(1, 1, 1), kind="ZeroBubblePipeline")(impl)
