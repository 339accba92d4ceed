"""Checks of exercise 2.13: the split backward, ZB-H1, and the pipeline that runs it."""

from __future__ import annotations

import contextlib

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


class Two(nn.Module):
    """A layer of two inputs, one that takes a name, and between them a
    layer that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.both = nn.Linear(4, 4), nn.Bilinear(4, 4, 4)
        self.relu, self.last = nn.ReLU(inplace=True), nn.Linear(4, 2)
        self.last.weight.requires_grad_(False)
        self.added, self.shifted = Added(4, 4), Shifted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shifted(self.added(x, other=x.square()))
        return self.last(input=self.both(self.relu(self.first(x)), x))


class Added(nn.Linear):
    """A layer of one tensor, and of another that has a name."""

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x) if other is None else super().forward(x) + other


class Shifted(nn.Module):
    """A parameter of its own and one child."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.child = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x + self.shift)


class Useless(nn.Linear):
    """A layer that uses none of its parameters, or not its input."""

    def __init__(self, constant: bool) -> None:
        super().__init__(4, 4)
        self.constant = constant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bias.expand(x.shape) if self.constant else x * 2


class Second(nn.Linear):
    """A layer of one argument that is no tensor: (name, tensor)."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, named: tuple[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(named[1])


class Named(nn.Module):
    """A name and the tensor; no parameters."""

    def forward(self, x: torch.Tensor) -> tuple[str, torch.Tensor]:
        return "x", x


class Stopped(nn.Module):
    """A layer that acts as if Ctrl-C were pressed for a batch of one; it has a hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.first.register_forward_pre_hook(lambda layer, args: (args[0] + 1,))
        self.first.register_forward_hook(lambda layer, args, output: output * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if len(x) == 1:
            raise KeyboardInterrupt
        return x


class Strict(nn.Module):
    """A layer that can't take a batch of one, behind one that can."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))


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
            "two inputs": (Two(), (3, 4)),
            "batch norm": (Strict(), (3, 4)),
            "interrupted": (Stopped().eval(), (3, 4)),
            "a tuple for a layer": (nn.Sequential(Named(), Second()), (3, 4)),
            "useless": (nn.Sequential(*map(Useless, (False, True, False))), (3, 4)),
            "one layer": (nn.Linear(4, 3), (3, 4)),
        }
        pairs = {
            name: (module.double(), torch.randn(shape, dtype=torch.float64))
            for name, (module, shape) in found.items()
        }
        words = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)).double()
        frozen = nn.Sequential(nn.Embedding(7, 4), Useless(False), nn.Linear(4, 3)).double()
        frozen[0].requires_grad_(False)
        pairs |= {
            "words": (words, torch.randint(0, 7, (5,))),
            "frozen words": (frozen, torch.randint(0, 7, (5,))),
        }
        half = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)).bfloat16()
        turned = torch.randn(4, 3).bfloat16().t()
    for name in ("layers", "odd"):  # what is there already is added to
        for p in pairs[name][0].parameters():
            p.grad = torch.full_like(p, 2.0)
    return pairs | {"bfloat16 with dropout": (half, turned)}


def named_gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


# -- the split ------------------------------------------------------------------------------------
@exercise(
    "2.13", "gloo", asserts="values halves empties as-it-was parameters dtype layout life resources"
)
def test_both_halves_make_the_whole_gradient(impl, run, seed):
    """Output, input's gradient and weights' gradients equal those of an ordinary backward."""

    def body(ctx):
        out = {}
        for name, (module, x) in modules(seed).items():
            if name in ("batch norm", "interrupted"):
                with contextlib.suppress(ValueError, KeyboardInterrupt):
                    impl.split_forward(module, x[:1])
            x = x.requires_grad_(x.is_floating_point())
            torch.manual_seed(seed)
            runs = [impl.split_forward(module, x) for _ in range(2)]
            found = []
            for output, _ in runs[::-1]:
                output.square().sum().backward()
                found.append(None if x.grad is None else x.grad.clone())
            for _, later in runs:
                impl.weight_gradients(later)
            left = [len(later) for _, later in runs]
            hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())
            hooks += sum("forward" in vars(m) for m in module.modules())
            hooks += sum(m.training for m in module.modules()) * 10
            outputs = [output.detach() for output, _ in runs]
            buffers = dict(module.named_buffers())
            out[name] = [outputs, found[-1], named_gradients(module), left, hooks, buffers]
        return out

    (results,) = run(body, 1, process_group=False, ledger=False)
    for name, (module, x) in modules(seed).items():
        if name in ("batch norm", "interrupted"):
            with contextlib.suppress(ValueError, KeyboardInterrupt):
                module(x[:1])
        x = x.requires_grad_(x.is_floating_point())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            want = [module(x) for _ in range(2)]
        for each in want[::-1]:
            each.square().sum().backward()
        outputs, of_input, grads, left, hooks, buffers = results[name]
        own = sum(10 * m.training for m in module.modules()) + 2 * (name == "interrupted")
        text = f"{name}: forward hooks on the module, and 10 for each part that trains"
        expect_equal(hooks, own, what=text, cause="hooks-left")
        low = x.dtype == torch.bfloat16
        close = {"rtol": 0.05, "atol": 0.05} if low else {"rtol": 1e-10, "atol": 1e-12}
        for number, each in enumerate(want):
            expect_close(outputs[number], each.detach(), what=f"{name}: output", **close)
        if x.grad is not None:
            expect_close(of_input, x.grad, what=f"{name}: gradient of the input", **close)
        if x.grad is None:
            something = of_input is not None and bool(of_input.any())
            expect_equal(something, False, what=f"{name}: whether an unused input has a gradient")
        for parameter, value in named_gradients(module).items():
            what = f"{name}, called twice: gradient of {parameter}"
            expect_close(grads.get(parameter), value, what=what, **close)
        expect_equal(sorted(grads), sorted(named_gradients(module)), what=f"{name}: gradients")
        for buffer, value in module.named_buffers():
            expect_close(buffers[buffer], value, what=f"{name}: {buffer}", **close)
        expect_equal(left, [0, 0], what=f"{name}: entries left after W", cause="kept")


@exercise("2.13", "gloo", asserts="split parameters")
def test_backward_leaves_the_weights_alone(impl, run, seed):
    """After the first half no layer's weight has a gradient, other parameters and inputs have."""
    early = {  # parameters that belong to no layer that is called with one tensor
        "odd": ["shift"],
        "a tuple for a layer": ["1.bias", "1.weight"],
        "two inputs": [
            "added.bias",
            "added.weight",
            "both.bias",
            "both.weight",
            "last.bias",
            "shifted.shift",
        ],
    }

    def body(ctx):
        out = {}
        for name, (module, x) in modules(seed).items():
            module.zero_grad()
            x = x.requires_grad_(x.is_floating_point())
            output, later = impl.split_forward(module, x)
            empty = len(later)
            output.sum().backward()
            before = sorted(named_gradients(module))
            impl.weight_gradients(later)
            out[name] = [empty, before, len(named_gradients(module)), x.grad is not None]
        return out

    (results,) = run(body, 1, process_group=False, ledger=False)
    for name, (module, x) in modules(seed).items():
        empty, before, after, of_input = results[name]
        expect_equal(empty, 0, what=f"{name}: entries of the list before backward", cause="kept")
        if set(before) - set(early.get(name, [])):
            text = f"{name}: the backward from the output already gave {', '.join(before)} a "
            fail(f"{text}gradient: that is W's work", cause="not-split")
        what = f"{name}: parameters with a gradient before W"
        expect_equal(before, early.get(name, []), what=what, cause="missing")
        module.zero_grad()
        module(x).sum().backward()
        count = len(named_gradients(module))
        expect_equal(after, count, what=f"{name}: gradients after W", cause="missing")
        if x.is_floating_point() and name != "useless" and not of_input:
            text = f"{name}: the input has no gradient after B, for which the stage before waits"
            fail(text, cause="missing")


@exercise("2.13", "gloo", asserts="no-more")
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
@exercise("2.13", "gloo", asserts="order short kept resources")
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


@exercise("2.13", "gloo", asserts="numbers refusals")
def test_zero_bubble_refuses_bad_numbers(impl, run):
    """No ranks or no micro-batches: ValueError."""
    calls = [(0, 2), (2, 0), (-1, 2), (2, -1)]

    def body(ctx):
        return [refusal(impl.zero_bubble, *numbers) for numbers in calls]

    (refused,) = run(body, 1, process_group=False, ledger=False)
    expect_refusals(refused, [f"zero_bubble{numbers}" for numbers in calls])


# -- run ------------------------------------------------------------------------------------------
@exercise("2.13", "virtual gloo cuda", asserts="pipeline halves group")
def test_zero_bubble_equals_one_process(impl, run, seed, cases):
    """Gradients of every layer and the loss on all ranks, of any schedule with or without W."""
    sizes = cases(
        (3, 4, False, False),
        (2, 3, False, "FBW"),
        (2, 3, False, "FB"),
        (2, 1, False, False),
        (4, 2, True, False),
    )
    for ranks, m, frozen, chance in sizes:
        order = any_order(seed, placement("round", ranks, 1), m, chance or "FBW")
        by_chance = completed(seed, order)

        def make(module):
            if chance:
                return as_steps(module, by_chance)
            complete = module.module("pipeline_schedules").with_messages
            return complete(module.zero_bubble(ranks, m))

        kind = "ZeroBubblePipeline"
        check_run(run, impl, seed, ranks, m, make, frozen=frozen, pipeline=kind, steps=2)


@exercise("2.13", "virtual", asserts="short kept freed cost")
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
