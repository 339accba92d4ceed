"""Checks of exercise 2.27: whatever is kept, a call is the plain call, seen from outside."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn

from distlab.grading import (
    exercise,
    expect_equal,
    expect_refusals,
    fail,
    refusal,
)
from tests.phase2.chosen import (
    F64,
    PRODUCTS,
    WIDTH,
    Counting,
    Layer,
    drawn,
    every_second,
    everything,
    gradients,
    nothing,
    these,
)

POLICIES = ("nothing", "everything", "products", "every second")


def policy(name: str) -> Any:
    """A new one: one of them counts."""
    if name == "every second":
        return every_second()
    return {"nothing": nothing, "everything": everything, "products": these(*PRODUCTS)}[name]


def plain(keep: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
    """The results that a call must equal."""
    return fn(*args, **kwargs)


def compare(got: list, want: list, what: str, cause: str = "wrong-value") -> None:
    """Outputs and gradients, one after the other; None must be None."""
    for number, (ours, right) in enumerate(zip(got, want, strict=True)):
        if ours is None or right is None:
            same = ours is None and right is None
            expect_equal(same, True, what=f"{what}: value {number} is there", cause="no-gradient")
        elif not torch.allclose(ours, right, rtol=1e-9, atol=1e-9):
            off = (ours - right).abs().max().item()
            fail(f"{what}: value {number} is off by {off:.3g} at most", cause=cause)


# -- 2.27 -----------------------------------------------------------------------------------------
@exercise("2.27", "virtual cuda", asserts="outputs nested parameters dtype layout")
def test_outputs_and_gradients_are_those_of_the_plain_call(impl, run, seed):
    """Outputs and gradients equal those of the plain call, whatever is kept."""

    def scenario(call, device):
        found = []
        for name in POLICIES:
            layer = Layer(seed, device)
            layer.up.bias.requires_grad_(False)
            x = drawn(seed + 20, 2, 5, WIDTH, grad=True, device=device)
            scale = drawn(seed + 21, WIDTH, 5, grad=True, device=device)
            rows = torch.tensor([4, 0, 4], device=device)

            def fn(x, options, *, times, layer=layer):
                x.register_hook(lambda grad: 2 * grad)
                h = layer(x) * options["scale"].T * times
                return {"h": h, "picked": [h[:, options["rows"]], x]}, h.detach().float(), "end"

            more, still, end = call(policy(name), fn, x, {"scale": scale, "rows": rows}, times=2)
            loss = more["h"].square().sum() + more["picked"][0].sum() + more["picked"][1].sum()
            loss.backward()
            values = [more["h"], *more["picked"], still]
            needs = [t.requires_grad for t in values]
            found.append(
                (
                    [t.detach().cpu() for t in values],
                    gradients(x, scale, *layer.parameters()),
                    [end, needs, str(still.dtype)],
                )
            )
        return found

    def body(ctx):
        return scenario(impl.selective_checkpoint, ctx.device)

    (got,) = run(body, 1, process_group=False)
    want = scenario(plain, torch.device("cpu"))
    for name, ours, right in zip(POLICIES, got, want, strict=True):
        expect_equal(ours[2], right[2], what=f"{name} is kept: other results", cause="structure")
        compare(ours[0], right[0], f"{name} is kept, outputs")
        compare(ours[1], right[1], f"{name} is kept, gradients")


@exercise("2.27", "virtual cuda", asserts="higher second life")
def test_gradients_by_grad_twice_and_of_gradients(impl, run, seed):
    """torch.autograd.grad, a second backward and gradients of gradients give the plain numbers."""

    def scenario(call, device):
        found = []
        for name in POLICIES:
            layer = Layer(seed, device)
            x = drawn(seed + 20, 4, WIDTH, grad=True, device=device)

            def fn(x, layer=layer):
                return torch.sin(layer(x)), torch.cos(x)

            out, other = call(policy(name), fn, x)
            (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x, retain_graph=True)
            out.square().sum().backward(retain_graph=True)
            (out.square() + other).sum().backward()
            found.append([t.detach().cpu() for t in (first, second)])
            found[-1] += gradients(x, layer.up.weight)
        return found

    def body(ctx):
        return scenario(impl.selective_checkpoint, ctx.device)

    (got,) = run(body, 1, process_group=False)
    for name, ours, right in zip(POLICIES, got, scenario(plain, "cpu"), strict=True):
        compare(ours, right, f"{name} is kept, the second gradients")


@exercise("2.27", "virtual cuda", asserts="asked no-grad")
def test_the_policy_is_asked_once_about_each_new_output(impl, run, seed):
    """Asked once per operator that makes new tensors, in their order, in forward alone."""

    def fn(layer, x):
        return torch.sin(layer(x).T).mul_(2) * torch.rand_like(x.T)

    def scenario(ctx, call):
        layer = Layer(seed, ctx.device)
        x = drawn(seed + 20, 4, WIDTH, grad=True, device=ctx.device)
        return call(fn, layer, x)

    def body(ctx):
        asked: list[str] = []

        def keep(operation):
            asked.append(str(operation.op))
            return operation.nbytes > 100 and operation.flops > 0 and not operation.kwargs

        def call(fn, layer, x):
            out = impl.selective_checkpoint(keep, fn, layer, x)
            forward = list(asked)
            out.sum().backward()
            with torch.no_grad():
                still = impl.selective_checkpoint(keep, fn, layer, x)
            return forward, len(asked), still.requires_grad

        return scenario(ctx, call)

    def reference(ctx):
        def call(fn, layer, x):
            with Counting() as counting:
                fn(layer, x)
            return counting.order

        return scenario(ctx, call)

    (want,) = run(reference, 1, process_group=False)
    ((asked, after, recorded),) = run(body, 1, process_group=False)
    views = [name for name in asked if name not in want]
    if views:
        fail(f"asked about {views[0]}, which makes no new tensor", cause="asked-about-views")
    expect_equal(asked, want, what="operators that the policy is asked about", cause="asked")
    what = "questions after backward, and after a call without grad mode"
    expect_equal(after, len(want), what=what, cause="asked-again")
    expect_equal(recorded, False, what="without grad mode a gradient is needed", cause="recorded")


@exercise("2.27", "virtual", asserts="makes-new")
def test_views_and_writes_make_nothing_new(impl, run):
    """Views, writes in place, ``out=`` and collectives make no new tensors; products do."""
    new = ("mm.default", "native_layer_norm.default", "_unsafe_view.default", "rand_like.default")
    old = ("t.default", "relu_.default", "split.Tensor", "add.out", "detach.default")
    old = (*old, "_foreach_add_.Scalar", "native_batch_norm.out", "normal_.default")
    old = (*old, "_unpack_dual.default")
    names = [f"aten.{name}" for name in (*new, *old)] + ["c10d.allreduce_.default"]

    def body(ctx):
        return [impl.makes_new(operator.attrgetter(name)(torch.ops)) for name in names]

    (found,) = run(body, 1, process_group=False)
    for number, (name, got) in enumerate(zip(names, found, strict=True)):
        right = number < len(new)
        what = f"makes_new of {name}"
        expect_equal(bool(got), right, what=what, cause="not-new" if right else "views")


@exercise("2.27", "virtual", asserts="limit refused refusals")
def test_a_limit_in_flops_per_byte(impl, run, seed):
    """An output is kept from the limit on; a negative limit, or none, is refused."""
    inner, limits = 6, (0.0, 1.4, 1.5, 1.6)

    def body(ctx):
        a, b = drawn(seed, 3, inner), drawn(seed + 1, inner, 5)

        def kept(limit):
            names: list[str] = []

            def keep(operation):
                if impl.at_least(limit)(operation):
                    names.append(str(operation.op))
                return False

            a.requires_grad_()
            impl.selective_checkpoint(keep, lambda a: torch.sin(a @ b), a)
            return names

        refused = [refusal(impl.at_least, limit) for limit in (-1.0, float("nan"))]
        return [kept(limit) for limit in limits], refused

    ((kept, refused),) = run(body, 1, process_group=False)
    product, sine = "aten.mm.default", "aten.sin.default"
    for limit, names in zip(limits, kept, strict=True):
        want = [product] * (limit <= 2 * inner / 8) + [sine] * (limit == 0)
        what = f"kept from {limit:g} FLOPs per byte on; the product saves {2 * inner / 8:g}"
        expect_equal(names, want, what=what, cause="limit")
    expect_refusals(refused, ["at_least(-1.0)", "at_least(nan)"])


@exercise("2.27", "virtual cuda", asserts="random randomness")
def test_random_numbers_are_those_of_the_first_forward(impl, run, seed):
    """Kept or not, random numbers of ``fn`` and of the program are those of the plain call."""
    policies = {
        "nothing": nothing,
        "everything": everything,
        "the first mask": these("aten.rand_like.default"),
        "the last mask": these("aten.bernoulli.p", "aten.bernoulli.default"),
    }

    def fn(x):
        first = torch.rand_like(x)
        h = torch.dropout(torch.sin(x * first), 0.5, True)
        return h * torch.bernoulli(torch.full_like(h, 0.5)) * torch.rand_like(h)

    def scenario(ctx, call):
        found = []
        for keep in policies.values():
            x = drawn(seed, 4, WIDTH, grad=True, device=ctx.device)
            torch.manual_seed(seed)
            out = call(keep, fn, x)
            between = torch.rand(3, device=ctx.device)
            out.sum().backward()
            after = torch.rand(3, device=ctx.device)
            found.append([between.cpu(), after.cpu(), *gradients(x)])
        return found

    def body(ctx):
        return scenario(ctx, impl.selective_checkpoint)

    def reference(ctx):  # in a rank: random numbers depend on the device
        return scenario(ctx, plain)

    results = run(body, 1, process_group=False)
    (want,) = run(reference, 1, process_group=False)
    for name, ours, right in zip(policies, results[0], want, strict=True):
        text = f"{name} is kept, random numbers after the"
        compare(ours[:1], right[:1], f"{text} forward", cause="random-forward")
        compare(ours[1:2], right[1:2], f"{text} backward", cause="random-outside")
        compare(ours[2:], right[2:], f"{name} is kept, gradient", cause="other-random")


@exercise("2.27", "virtual cuda", asserts="autocast dtype")
def test_autocast_is_that_of_the_first_forward(impl, run, seed):
    """A weight that autocast's cache holds already, and one used twice: both forwards agree."""

    def scenario(call, device):
        layer = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            layer.weight.copy_(drawn(seed, WIDTH, WIDTH))
            layer.bias.copy_(drawn(seed + 1, WIDTH))
        layer.to(device)
        x = drawn(seed + 2, 4, WIDTH, device=device).float().requires_grad_()
        seen = []

        def fn(x):
            h = layer(torch.tanh(layer(x)))
            seen.append(str(h.dtype))
            return torch.sin(h)

        with torch.autocast(device.type, dtype=torch.bfloat16):
            out = call(these(*PRODUCTS), fn, layer(x))
            out = layer(out)
        with torch.autocast(device.type, dtype=torch.float16):
            out.float().square().sum().backward()
        return gradients(x, layer.weight), seen

    def body(ctx):
        return scenario(impl.selective_checkpoint, ctx.device)

    (got, seen) = run(body, 1, process_group=False)[0]
    want, _ = scenario(plain, torch.device("cpu"))
    what = "dtype of a product in both forwards"
    expect_equal(seen, ["torch.bfloat16"] * 2, what=what, cause="autocast")
    for ours, right in zip(got, want, strict=True):
        off = float((ours - right).norm() / right.norm())
        if off > 0.05:
            fail(f"with autocast a gradient is off by {off:.0%}", cause="autocast-cache")


@exercise("2.27", "virtual cuda", asserts="written")
def test_a_kept_output_that_was_written_into(impl, run, seed):
    """``fn`` or the program writes into a kept output: it is computed again."""

    def scenario(call, device, write=True):
        found = []
        w = drawn(seed + 1, WIDTH, WIDTH, device=device)
        for keep in (everything, these("aten.mm.default")):
            x = drawn(seed, 4, WIDTH, grad=True, device=device)

            def inside(x):
                h = x @ w
                h[1:].mul_(2)
                return torch.sin(h.relu_())

            call(keep, inside, x).square().sum().backward()
            found += gradients(x)
            x.grad = None

            def outside(x):
                h = x @ w
                return h, torch.sin(h) * torch.cos(h)

            h, out = call(keep, outside, x)
            if write:
                with torch.no_grad():
                    h[2].zero_()
            out.sum().backward()
            found += gradients(x)
        return found

    def body(ctx):
        return scenario(impl.selective_checkpoint, ctx.device)

    (got,) = run(body, 1, process_group=False)
    want = scenario(plain, torch.device("cpu"), write=False)  # autograd would refuse it
    compare(got, want, "a kept output that was written into", cause="stale-output")


@exercise("2.27", "virtual cuda", asserts="inside")
def test_calls_within_a_call(impl, run, seed):
    """A call in another one, with random numbers in both."""
    pairs = [(a, b) for a in ("nothing", "everything", "products") for b in ("nothing", "products")]

    def scenario(ctx, call):
        found = []
        for outer, inner in pairs:
            layer = Layer(seed, ctx.device)
            x = drawn(seed + 20, 4, WIDTH, grad=True, device=ctx.device)
            torch.manual_seed(seed)

            def within(t, layer=layer):
                return layer(torch.dropout(torch.tanh(t), 0.5, True))

            def around(x, inner=inner, within=within):
                h = call(policy(inner), within, torch.sin(x))
                return h * call(policy(inner), within, h + torch.rand_like(h))

            call(policy(outer), around, x * 2).sum().backward()
            found.append(gradients(x, layer.up.weight))
        return found

    def body(ctx):
        return scenario(ctx, impl.selective_checkpoint)

    def reference(ctx):
        return scenario(ctx, plain)

    results = run(body, 1, process_group=False)
    (want,) = run(reference, 1, process_group=False)
    for (outer, inner), ours, right in zip(pairs, results[0], want, strict=True):
        compare(ours, right, f"outside {outer} is kept, inside {inner}: gradients")


def different(impl: Any, seed: int, kind: str) -> None:
    """A call whose second forward differs, and its backward."""
    layer = nn.Linear(WIDTH, WIDTH, dtype=F64)
    x = drawn(seed, 4, WIDTH, grad=True)
    moved, runs = x * 1, []

    def fn(x):
        runs.append(kind)
        again = len(runs) > 1
        if kind == "operator":
            x = torch.cos(x) if again else torch.sin(x)
        if kind == "shape":
            x = torch.sin(x[: 1 if again else 4]).expand(4, WIDTH)
        if kind == "dtype":
            x = torch.sin(x.to(torch.float16 if again else torch.float32)).to(F64)
        x = layer(x)
        if kind == "graph" and again:
            x = x.detach()
        for _ in range(1 if kind == "number" and again else 3):
            x = torch.sin(x)
        return x

    out = impl.selective_checkpoint(these("aten.addmm.default"), fn, moved)
    with torch.no_grad():
        if kind == "argument":
            moved.add_(1.0)
        if kind == "weight":
            layer.weight.mul_(2.0)
        if kind == "bias":
            layer.bias.add_(1.0)
    out.sum().backward()


@exercise("2.27", "virtual", asserts="differs never-wrong")
def test_a_second_forward_that_differs_is_refused(impl, run, seed):
    """Another operator, shape, dtype or number, a changed argument or parameter: RuntimeError."""
    kinds = {
        "operator": "cos in the place of sin",
        "shape": "one row in the place of four",
        "dtype": "float16 in the place of float32",
        "number": "one sin in the place of three",
        "graph": "a detached product",
        "argument": "the argument was changed",
        "weight": "the weight was changed",
        "bias": "the bias was changed",
    }

    def body(ctx):
        found = {}
        for kind in kinds:
            try:
                different(impl, seed, kind)
            except RuntimeError:
                found[kind] = "refused"
            except Exception as error:
                found[kind] = type(error).__name__
            else:
                found[kind] = "accepted"
        return found

    (found,) = run(body, 1, process_group=False)
    for kind, words in kinds.items():
        what = f"{words} in the second forward"
        cause = "changed" if kind in ("argument", "weight", "bias") else "other-forward"
        expect_equal(found[kind], "refused", what=what, cause=cause)
