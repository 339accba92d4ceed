"""Checks of exercise 2.7: a checkpointed call is the plain call, seen from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from distlab.grading import exercise, expect_close, expect_equal, fail

WIDTH = 6
F64 = torch.float64
CPU = torch.device("cpu")


class Stopped(BaseException):
    """Ends a forward, as KeyboardInterrupt does."""


class Pair(NamedTuple):
    left: Any
    right: Any


def plain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The results that a checkpointed call must equal."""
    return fn(*args, **kwargs)


def torchs(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """PyTorch's own."""
    return torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=False, **kwargs)


def drawn(seed: int, *shape: int, grad: bool = False, device: Any = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(*shape, generator=generator, dtype=F64).to(device)
    return value.requires_grad_(grad)


def layer(seed: int, device: Any = "cpu") -> nn.Linear:
    found = nn.Linear(WIDTH, WIDTH, dtype=F64)
    with torch.no_grad():
        found.weight.copy_(drawn(seed, WIDTH, WIDTH))
        found.bias.copy_(drawn(seed + 1, WIDTH))
    return found.to(device)


def gradients(**tensors: Tensor) -> dict[str, Tensor | None]:
    return {n: None if t.grad is None else t.grad.clone().cpu() for n, t in tensors.items()}


def compare(got: dict, want: dict, what: str, cause: str = "") -> None:
    """Gradients by name; None must be None. ``cause``: told whenever a value is wrong."""
    for name, value in want.items():
        if value is None:
            expect_equal(got[name], None, what=f"{what}: gradient of {name}", cause="needless")
        elif got[name] is None:
            fail(f"{what}: {name} has no gradient", cause="no-gradient")
        elif cause and not torch.allclose(got[name], value, rtol=1e-9, atol=1e-9):
            fail(
                f"{what}: the gradient of {name} is {got[name].flatten()[:3].tolist()} …, without "
                f"checkpointing {value.flatten()[:3].tolist()} …",
                cause=cause,
            )
        else:
            expect_close(got[name], value, what=f"{what}: gradient of {name}", rtol=1e-9, atol=1e-9)


# -- 2.7 ------------------------------------------------------------------------------------------
@exercise(
    "2.7",
    "virtual cuda",
    asserts="nested outputs gradients none-needless parameters dtype layout",
)
def test_nested_arguments_and_outputs(impl, run, seed):
    """Tuples, lists, dicts, other values, keywords: outputs and gradients of the plain call."""

    def scenario(checkpoint, device):
        first = layer(seed, device)
        first.bias.requires_grad_(False)
        x, b, bias = (drawn(seed + k, 3, WIDTH, grad=True, device=device) for k in (2, 3, 4))
        a, mask = drawn(seed + 5, 3, WIDTH, device=device), drawn(seed + 6, 3, 1).to(device) > 0
        seen: list[list[bool]] = []
        kinds: list[str] = []

        def fn(x, pair, options, *, bias, mode):
            kinds[:] = [type(pair).__name__, type(pair.right).__name__, type(options).__name__]
            seen.append([t.requires_grad for t in (x, pair.left, *pair.right[:1], bias)])
            h = torch.tanh(first(x) + pair.left * pair.right[0]) * options["scale"] + bias
            h = torch.where(options["mask"], h, x) if mode == "mask" else h
            h = h + options["rest"][0] * options["rest"][1]
            h = h + options["table"][options["rows"]] + options["turned"].T.double()
            return h, {"aux": (h * h).sum(), "n": pair.right[1], "index": h.argmax(-1)}, [x, None]

        shared = torch.sin(b)  # its own backward runs once, after that of the segment
        table = drawn(seed + 8, 5, WIDTH, grad=True, device=device)
        whole = drawn(seed + 9, WIDTH, 5, device=device).bfloat16().requires_grad_()
        turned = whole[:, 1:4]
        options = {"mask": mask, "scale": 2.0, "table": table, "turned": turned}
        options["rows"] = torch.tensor([4, 0, 4], device=device)
        options["rest"] = (x, shared)  # tensors that are there already
        inputs = (x, Pair(a, [shared, 3]), options)
        out, more, last = checkpoint(fn, *inputs, bias=bias, mode="mask")
        through, nothing = last
        loss = out.sum() + 0.1 * more["aux"] + 0.5 * through[0].sum()
        (loss + shared.sum()).backward()
        kinds += [type(more).__name__, type(last).__name__]
        kinds += [more["n"], nothing, str(more["index"].dtype)]
        values = [t.detach().cpu() for t in (out, more["aux"], through, more["index"])]
        found = gradients(x=x, a=a, b=b, bias=bias, weight=first.weight, layer_bias=first.bias)
        found |= gradients(table=table, whole=whole)
        needs = [out.requires_grad, more["aux"].requires_grad, more["index"].requires_grad]
        return values, kinds, needs, found, seen[-1]

    def body(ctx):
        return scenario(impl.checkpoint, ctx.device)

    values, kinds, needs, found, seen = run(body, 1, process_group=False)[0]
    want = scenario(plain, CPU)
    expect_equal(kinds, want[1], what="the values that are no tensors", cause="structure")
    for got, value in zip(values, want[0], strict=True):
        expect_close(got, value, what="an output", rtol=1e-9, atol=1e-9)
    expect_equal(needs, want[2], what="outputs need gradients", cause="no-gradient")
    compare(found, want[3], "nested arguments")
    expect_equal(
        seen, want[4], what="in backward fn sees arguments that need gradients", cause="needless"
    )


@exercise("2.7", "virtual cuda", asserts="detached themselves gradients each-backward life alone")
def test_detached_and_unused_outputs(impl, run, seed):
    """Some outputs are detached, some are not used, and backward comes twice."""

    def scenario(checkpoint, device):
        first = layer(seed, device)
        x, w = (drawn(seed + k, 3, WIDTH, grad=True, device=device) for k in (2, 3))

        def fn(x):
            h = torch.sin(first(x))
            return h, h.detach(), h * 2, x.detach() * 3

        used, still, _, constant = checkpoint(fn, x)
        loss = (used * w).sum() + (still * w).sum() + (constant * w).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found = gradients(x=x, w=w, weight=first.weight)
        _, still, _, constant = checkpoint(fn, x)
        ((still + constant) * w).sum().backward()
        only = gradients(x=x, w=w, weight=first.weight)
        held = drawn(seed + 4, 3, WIDTH, device=device)
        itself = checkpoint(lambda x: (first.bias, held, x, x * held), x)
        kept = [held.requires_grad, first.bias.is_leaf, x.is_leaf]
        if kept == [False, True, True]:  # else a tensor's backward could come back to itself
            sum((k + 2) * (value * w).sum() for k, value in enumerate(itself)).backward()
        return found, only, gradients(x=x, w=w, bias=first.bias), kept

    def body(ctx):
        return scenario(impl.checkpoint, ctx.device)

    (got,) = run(body, 1, process_group=False)
    want = scenario(plain, CPU)
    expect_equal(
        got[3],
        want[3],
        what="fn returns a buffer, a parameter and an argument themselves: the buffer needs a "
        "gradient, the others are leaves",
        cause="taken-over",
    )
    compare(got[0], want[0], "detached and unused outputs, after two backwards")
    compare(got[1], want[1], "only detached outputs are used")
    compare(got[2], want[2], "fn returns a parameter, a buffer and an argument themselves")


@exercise("2.7", "virtual cuda", asserts="random own-state resources randomness")
def test_random_numbers_are_those_of_the_first_forward(impl, run, seed):
    """Same dropout in both forwards; the program's own random numbers are not disturbed."""

    def scenario(checkpoint, device):
        def state():
            cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
            return torch.cat([torch.get_rng_state(), *cuda])

        first = layer(seed, device)
        x = drawn(seed + 2, 8, WIDTH, grad=True, device=device)
        torch.manual_seed(seed)
        out = checkpoint(lambda x: torch.dropout(torch.tanh(first(x)), 0.5, True), x)
        after_forward = state()
        torch.randn(7, device=device)  # the program goes on and draws
        out = torch.dropout(out, 0.5, True)
        before = state()
        out.square().sum().backward()
        after, calls = state(), []

        def fails(x):
            calls.append(1)
            if len(calls) > 1:
                raise Stopped("in the second forward")
            return torch.dropout(first(x), 0.5, True)

        out = checkpoint(fails, x)
        states = [state(), torch.is_autocast_cache_enabled()]
        try:
            out.sum().backward()
        except Stopped:
            states += [state(), torch.is_autocast_cache_enabled()]
        states.append(torch.is_autocast_cache_enabled())
        with contextlib.suppress(Stopped):
            checkpoint(fails, x)  # now in the first one
        states.append(torch.is_autocast_cache_enabled())
        return gradients(x=x, weight=first.weight), after_forward, before, after, states

    def body(ctx):
        return scenario(impl.checkpoint, ctx.device)

    def reference(ctx):  # in a rank: random numbers depend on the device
        return scenario(torchs, ctx.device)

    results = run(body, 1, process_group=False)
    (want,) = run(reference, 1, process_group=False)
    (got,) = results
    if not torch.equal(got[1], want[1]):
        fail(
            "after the forward the random state differs from the one that the plain call leaves",
            cause="random-forward",
        )
    compare(got[0], want[0], "dropout in a segment", cause="other-random")
    if not torch.equal(got[2], got[3]):
        fail(
            "backward changed the program's random state: the next random numbers depend on it",
            cause="random-outside",
        )
    if len(got[4]) < 6:
        fail("an error of fn in backward did not come out as it is", cause="error-swallowed")
    state, cache, later, cache_later, *around = got[4]
    if around[0] != around[1]:
        text = "an error of fn in forward leaves autocast's cache otherwise than before it"
        fail(f"{text}: put it back in any case", cause="autocast-outside")
    if not torch.equal(state, later) or cache != cache_later:
        fail(
            "an error of fn in backward leaves another random state or autocast than before it: "
            "put them back in any case",
            cause="random-outside",
        )


@exercise("2.7", "virtual cuda", asserts="autocast own-state dtype life")
def test_autocast_is_that_of_the_first_forward(impl, run, seed, cases):
    """Forward with, backward without autocast, and the reverse: both forwards compute alike."""
    for inside in cases(True, False):

        def body(ctx, inside=inside):
            kind, seen = ctx.device.type, []
            low = torch.bfloat16 if kind == "cuda" else torch.float16  # not the default
            first = layer(seed).float().to(ctx.device)
            x = drawn(seed + 2, 4, WIDTH, grad=False, device=ctx.device).float().requires_grad_()

            def fn(x):
                out = first(x)
                seen.append(str(out.dtype))
                return torch.sin(out)

            def state():
                return [torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()]

            with torch.autocast(kind, dtype=low, enabled=inside):
                states = [state()]
                out = impl.checkpoint(fn, x)
                states.append(state())
            with torch.autocast(kind, dtype=torch.bfloat16, enabled=not inside):
                out.float().sum().backward()
            return seen, states, str(low)

        seen, (before, after), low = run(body, 1, process_group=False)[0]
        dtype = low if inside else "torch.float32"
        where = "with" if inside else "without"
        expect_equal(
            seen,
            [dtype, dtype],
            what=f"forward {where} autocast: dtype of the product in both forwards",
            cause="autocast",
        )
        same = before == after
        expect_equal(
            same, True, what="autocast and its cache are as before", cause="autocast-outside"
        )


@exercise("2.7", "virtual cuda", asserts="gradients dtype")
def test_weight_used_inside_and_outside_under_autocast(impl, run, seed):
    """A weight that the segment's first forward casts keeps its gradient at its next use."""

    def scenario(checkpoint, device):
        first = layer(seed).float().to(device)
        x = drawn(seed + 2, 4, WIDTH, device=device).float().requires_grad_()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out = first(torch.tanh(checkpoint(first, x)))
        out.float().square().sum().backward()
        return gradients(weight=first.weight, x=x)

    def body(ctx):
        return scenario(impl.checkpoint, ctx.device)

    (got,) = run(body, 1, process_group=False)
    want = scenario(plain, CPU)
    for name, value in want.items():
        off = float((got[name] - value).norm() / value.norm())
        if off > 0.05:
            fail(
                f"gradient of {name}, used in a segment and after it: off by {off:.0%}. Autocast's "
                "cache holds the cast weight of a forward that recorded nothing",
                cause="autocast-cache",
            )


@exercise("2.7", "virtual cuda", asserts="gradients parameters")
def test_parameters_need_no_argument_that_needs_a_gradient(impl, run, seed):
    """Only parameters need gradients; one parameter is used twice in a
    segment, and in two segments."""

    def scenario(checkpoint, device):
        first, second = layer(seed, device), layer(seed + 7, device)
        x = drawn(seed + 2, 3, WIDTH, device=device)
        twice = nn.Sequential(first, nn.Tanh(), first)
        out = checkpoint(twice, x)
        needs = out.requires_grad
        out = checkpoint(lambda t: torch.sin(second(first(t))), out)
        if out.requires_grad:
            out.square().sum().backward()
        return needs, gradients(first=first.weight, second=second.weight, bias=first.bias, x=x)

    def body(ctx):
        return scenario(impl.checkpoint, ctx.device)

    ((needs, got),) = run(body, 1, process_group=False)
    _, want = scenario(plain, CPU)
    if not needs:
        fail(
            "no argument needs a gradient, but parameters do: the output needs a gradient, or "
            "backward never reaches the segment",
            cause="no-gradient",
        )
    compare(got, want, "parameters used twice")


@exercise("2.7", "virtual cuda", asserts="gradients random life")
def test_segments_within_a_segment(impl, run, seed):
    """A checkpointed call inside another one, with dropout in both."""

    def scenario(checkpoint, device):
        first, second = layer(seed, device), layer(seed + 7, device)
        x = drawn(seed + 2, 3, WIDTH, grad=True, device=device)
        torch.manual_seed(seed)

        def inner(t):
            return torch.dropout(torch.tanh(second(t)), 0.5, True)

        def outer(t):
            h = checkpoint(inner, torch.dropout(first(t), 0.5, True))
            return h * checkpoint(inner, h + 1)

        out = checkpoint(outer, x * 2)
        out.sum().backward()
        return gradients(x=x, first=first.weight, second=second.weight)

    def body(ctx):
        return scenario(impl.checkpoint, ctx.device)

    def reference(ctx):  # in a rank: random numbers depend on the device
        return scenario(plain, ctx.device)

    results = run(body, 1, process_group=False)
    (want,) = run(reference, 1, process_group=False)
    (got,) = results
    compare(got, want, "a segment within a segment")


@exercise("2.7", "virtual", asserts="each-backward no-grad cost")
def test_runs_once_now_and_once_in_backward(impl, run, seed):
    """One forward in forward, one in backward; without gradients the plain call
    and no second forward."""

    def body(ctx):
        first, calls = layer(seed), []
        x = drawn(seed + 2, 3, WIDTH, grad=True)

        def fn(x):
            calls.append(torch.is_grad_enabled())
            return torch.tanh(first(x))

        out = impl.checkpoint(fn, x)
        counts = [len(calls)]
        out.sum().backward()
        counts.append(len(calls))
        with torch.no_grad():
            still = impl.checkpoint(fn, x)
        counts.append(len(calls))
        return counts, still.requires_grad

    counts, recorded = run(body, 1, process_group=False)[0]
    if counts[0] != 1:
        fail(f"fn ran {counts[0]} times in forward, once is enough", cause="forward-twice")
    if counts[1] != 2:
        fail(
            f"after backward fn has run {counts[1]} times, expected 2: once in each direction",
            cause="not-recomputed" if counts[1] == 1 else "recomputed-twice",
        )
    expect_equal(
        [counts[2], recorded],
        [3, False],
        what="calls, and whether the output needs a gradient, after another call in no_grad",
        cause="recorded",
    )


@exercise("2.7", "virtual", asserts="never-wrong refusals")
def test_never_silently_wrong(impl, run, seed):
    """A changed argument, gradients by autograd.grad: a RuntimeError, or the right numbers."""

    def body(ctx):
        first, found = layer(seed), {}
        x = drawn(seed + 2, 3, WIDTH, grad=True)
        moved = x * 1
        out = impl.checkpoint(lambda t: torch.sin(first(t)), moved)
        with torch.no_grad():
            moved.add_(1.0)
        try:
            out.sum().backward()
            found["changed"] = x.grad
        except RuntimeError:
            found["changed"] = None
        first.zero_grad()
        out = impl.checkpoint(lambda t: torch.sin(first(t)), x)
        try:
            (found["asked"],) = torch.autograd.grad(out.sum(), x)
            found["unasked"] = first.weight.grad
        except RuntimeError:
            found["asked"] = found["unasked"] = None
        return found

    (found,) = run(body, 1, process_group=False)
    x = drawn(seed + 2, 3, WIDTH, grad=True)
    torch.sin(layer(seed)(x)).sum().backward()
    want = x.grad
    if found["unasked"] is not None:
        fail(
            "torch.autograd.grad was asked for the gradient of an input, and the weights' .grad "
            "changed. Refuse it with a RuntimeError if you can't help that",
            cause="unasked",
        )
    for name, cause in (("changed", "stale-input"), ("asked", "wrong-gradient")):
        got = found[name]
        if got is not None and not torch.allclose(got, want, rtol=1e-9, atol=1e-9):
            how = "after the argument was changed in place" if name == "changed" else "when asked"
            fail(
                f"{how} the gradient is silently wrong: expected it right, or a RuntimeError",
                cause=cause,
            )
