"""Checks of exercise 4.17: FLOPs are counted as torch counts them, and nothing changes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch._dynamo  # counting on the meta device imports it: once here, not per rank
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from distlab.grading import exercise, expect_equal, fail, trace
from tests.phase4.checkpoints import difference


class Attention(nn.Module):
    """Embedding, products of three and four dimensions, torch's attention; two layers tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        mixed = torch.softmax(q @ k.transpose(1, 2), -1) @ v
        heads = [t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (q, k, v)]
        mixed = mixed + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return self.out(mixed)


def frozen_front() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    return model


NETS = {
    "linear layers": lambda: (nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), (4, 5)),
    "a linear layer on three dimensions": lambda: (nn.Linear(5, 7, bias=False), (2, 3, 5)),
    "a frozen first layer": lambda: (frozen_front(), (3, 5)),
    "nothing to train": lambda: (nn.Linear(5, 7).requires_grad_(False), (3, 5)),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(3, 5, 3, stride=2, padding=1), nn.Conv2d(5, 4, 2, dilation=2)),
        (2, 3, 11, 9),
    ),
    "transposed convolutions": lambda: (
        nn.Sequential(nn.Conv1d(3, 5, 3), nn.ConvTranspose1d(5, 4, 4, stride=3)),
        (2, 3, 8),
    ),
}


def models() -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """Each of ``NETS``, and attention, with inputs."""
    for make in NETS.values():
        model, shape = make()
        yield model, torch.rand(shape)
    yield Attention(), torch.randint(11, (3, 6))


class Several(nn.Module):
    """Takes a dict and a word, returns tensors in a list, in a dict, beside None and a number.

    One parameter is unused; forward uses a buffer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3).double()
        self.third = nn.Linear(6, 3, bias=False)
        self.unused = nn.Parameter(torch.zeros(100, 100))
        self.register_buffer("scale", torch.ones(6, 6), persistent=False)

    def forward(self, batch, name):
        assert name == "train"
        assert batch["shift"] == 0.5
        hidden = self.first(batch["x"][0]) @ self.scale
        third = self.third(hidden.detach())
        return {
            "a": [([third], None), hidden, 3],
            "b": self.second(hidden.double()),
            "c": hidden.argmax(),
        }


class Strides(nn.Module):
    """Notes how its tensors lie in memory: with gaps, expanded, transposed, channels last."""

    def __init__(self, seen: list) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.zeros(6, 4).T)
        self.register_buffer("gaps", torch.zeros(4, 12)[:, ::2])
        self.note = seen.append  # in a copy of the model as well

    def forward(self, images, row, single):
        tensors = (images, row, self.turned, self.gaps, single)
        self.note([(tuple(t.shape), t.stride(), str(t.dtype)) for t in tensors])
        return (row @ self.turned).sum() + self.gaps.sum() + images.sum() * single


def laid_out(seen: list) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model that notes strides in ``seen``, and its inputs."""
    images = torch.zeros(2, 3, 4, 4, dtype=torch.float64).to(memory_format=torch.channels_last)
    return Strides(seen), (images[:, :, ::2], torch.zeros(4).expand(5, 4)[:, :4], torch.ones(()))


@exercise("4.17", "virtual", asserts="shapes layout dtype")
def test_tensors_lie_as_they_did(impl, run):
    """A model sees the shapes, strides and dtypes of its inputs, parameters and buffers."""

    def body(ctx):
        seen, right = [], []
        for notes, call in ((seen, impl.count_flops), (right, lambda m, *xs: m(*xs))):
            model, inputs = laid_out(notes)
            call(model, *inputs)
        return seen[0], right[0]

    names = ("an input with gaps", "an expanded input", "a transposed parameter", "a buffer", "0-d")
    for name, got, want in zip(names, *run(body, 1)[0], strict=True):
        expect_equal(got, want, what=f"shape, strides and dtype of {name}", cause="strides")


def expect_flops(got: int, want: int, what: str, known: dict[str, tuple[str, int]]) -> None:
    """Fail unless equal; ``known``: the values that known mistakes give, by their causes."""
    for cause, (said, wrong) in known.items():
        if got == wrong != want:
            fail(f"FLOPs of {what}: expected {want}, got {got}: {said}", cause=cause)
    expect_equal(got, want, what=f"FLOPs of {what}", cause="flops")


@exercise("4.17", "virtual", asserts="shapes structures inputs-not-counted plain dtype parameters")
def test_inputs_and_outputs_of_many_kinds(impl, run):
    """Dicts, lists and words come in and go out; inputs may have gradients, which don't count."""

    def body(ctx):
        x = torch.rand(5, 4, requires_grad=True)
        counted = impl.count_flops(Several(), {"x": [x], "shift": 0.5}, "train")
        frozen = impl.count_flops(nn.Linear(5, 7).requires_grad_(False), torch.rand(3, 5))
        grad_in = torch.rand(3, 5, requires_grad=True)
        first = impl.count_flops(nn.Linear(5, 7), grad_in)
        fixed = impl.count_flops(nn.Linear(5, 7).requires_grad_(False), grad_in)
        turned = nn.Linear(5, 7).to(torch.bfloat16)
        strided = impl.count_flops(turned, torch.rand(5, 3, dtype=torch.bfloat16).T)
        nothing = impl.count_flops(nn.Linear(5, 7), torch.rand(0, 5))
        with torch.no_grad():
            off = impl.count_flops(nn.Linear(5, 7), torch.rand(3, 5))
        return counted, frozen, first, fixed, strided, nothing, off, x.grad is None

    *counted, untouched = run(body, 1)[0]
    product = 2 * 3 * 5 * 7
    first, scaled, second = (2 * 5 * k * n for k, n in ((4, 6), (6, 6), (6, 3)))
    several = 2 * first + 2 * scaled + (3 + 2) * second  # the third one's input has no gradient
    inputs = ("a gradient of the inputs is counted, because these have requires_grad",)
    known = {
        "input-counted": (*inputs, several + first),
        "first-output-only": (
            "backward begins at the first output only",
            several - first - scaled - 2 * second,
        ),
        "forward-only": ("backward is missing", first + scaled + 2 * second),
    }
    forward = {"forward-only": ("backward is missing", product)}
    want = {
        "a model with a dict of inputs and of outputs": several,
        "a frozen layer": product,
        "a layer whose input has requires_grad": 2 * product,
        "a frozen layer whose input has requires_grad": product,
        "a layer in bfloat16 with transposed input": 2 * product,
        "no rows at all": 0,
        "a layer, counted inside torch.no_grad()": 2 * product,
    }
    for (what, flops), got in zip(want.items(), counted, strict=True):
        mistakes = known if flops == several else forward
        if "requires_grad" in what:
            mistakes = forward | {"input-counted": (*inputs, flops + product)}
        expect_flops(got, flops, what, mistakes)
    expect_equal(untouched, True, what="inputs have no gradient", cause="side-effect")


@exercise("4.17", "virtual", asserts="operators backward-mask transposed grouped-filter")
def test_operators_by_their_arguments(impl, run):
    """mm, addmm, bmm, baddbmm and convolutions in 1 to 3 dimensions; other operators are free."""
    aten = torch.ops.aten
    a, b, c = torch.zeros(5, 3), torch.zeros(3, 7), torch.zeros(5, 7)
    wide = [torch.zeros(4, 5, 3), torch.zeros(4, 3, 7), torch.zeros(4, 5, 7)]
    single = torch.zeros(1, 7)
    x, w, out = torch.zeros(2, 6, 9, 8), torch.zeros(4, 3, 3, 2), torch.zeros(2, 4, 7, 7)
    conv = 2 * out.numel() * 3 * 3 * 2
    tx, tw, tout = torch.zeros(2, 4, 7), torch.zeros(4, 5, 3), torch.zeros(2, 5, 9)
    back = 2 * tx.numel() * 5 * 3
    sizes = [1, 1], [0, 0], [1, 1]
    plain, turned = (*sizes, False, [0, 0], 2), ([1], [0], [1], True, [0], 1)

    def convolved(mask, transposed=False):
        if transposed:
            return aten.convolution_backward, (tout, tx, tw, [5], *turned, mask), (tx, tw, None)
        return aten.convolution_backward, (out, x, w, [4], *plain, mask), (x, w, None)

    single_filter, one = torch.zeros(1, 6, 3, 2), 2 * (2 * 7 * 7) * (6 * 3 * 2)
    alone = (*sizes, False, [0, 0], 1)
    single_back = (out[:, :1], x, single_filter, [1], *alone, [True, True, False])
    cases = [
        ("mm", (aten.mm, (a, b), c), 2 * 5 * 7 * 3),
        ("addmm with one row added", (aten.addmm, (single, a, b), c), 2 * 5 * 7 * 3),
        ("bmm", (aten.bmm, (wide[0], wide[1]), wide[2]), 2 * 4 * 5 * 7 * 3),
        ("baddbmm", (aten.baddbmm, (wide[2][:1], *wide[:2]), wide[2]), 2 * 4 * 5 * 7 * 3),
        ("a convolution in two groups", (aten.convolution, (x, w, None, *plain), out), conv),
        (
            "a transposed convolution",
            (aten.convolution, (tx, tw, None, *turned), tout),
            back,
        ),
        ("one filter", (aten.convolution, (x, single_filter, None, *alone), out[:, :1]), one),
        ("backward of one filter", (aten.convolution_backward, single_back, (x, w, None)), 2 * one),
        ("its backward for x, w and bias", convolved([True] * 3), 2 * conv),
        ("its backward for w alone", convolved([False, True, False]), conv),
        ("its backward for x alone", convolved([True, False, True]), conv),
        ("its backward for the bias alone", convolved([False, False, True]), 0),
        ("backward of a transposed one for x", convolved([True, False, False], True), back),
        ("backward of a transposed one for all", convolved([True] * 3, True), 2 * back),
        ("an addition", (aten.add, (a, a), a), 0),
        ("a sum", (aten.sum, (a,), torch.zeros(())), 0),
    ]

    def body(ctx):
        return [impl.operator_flops(*call) for _, call, _ in cases]

    for (what, _, want), got in zip(cases, run(body, 1)[0], strict=True):
        expect_equal(got, want, what=f"FLOPs of {what}", cause="flops")


@exercise("4.17", "virtual", asserts="recomputed exception life alone")
def test_recomputation_and_exceptions(impl, run):
    """Activation checkpointing counts again; a model that raises leaves no trace either."""

    class Checkpointed(nn.Module):
        def __init__(self, fails: bool = False) -> None:
            super().__init__()
            self.layer, self.fails = nn.Linear(6, 6), fails

        def forward(self, x):
            with set_checkpoint_early_stop(False):
                y = checkpoint(self.layer, x, use_reentrant=False)
            if self.fails:
                torch.rand(3)
                raise KeyError("a model with a mistake")
            return y

    def body(ctx):
        model, failing = Checkpointed(), Checkpointed(fails=True)
        before = [p.data_ptr() for p in (*model.parameters(), *failing.parameters())]
        first = impl.count_flops(model, torch.rand(4, 6))
        x = torch.rand(4, 6)
        random = torch.get_rng_state()
        with torch.no_grad():
            try:
                raised = impl.count_flops(failing, x)
            except KeyError:
                raised = "KeyError"
            modes = torch.is_grad_enabled(), torch.equal(random, torch.get_rng_state())
        again = impl.count_flops(model, torch.rand(4, 6))
        after = [p.data_ptr() for p in (*model.parameters(), *failing.parameters())]
        devices = {p.device.type for p in failing.parameters()}
        return first, raised, again, before == after, devices, modes

    first, raised, again, same, devices, modes = run(body, 1)[0]
    want = 2 * 4 * 6 * 6 * 3
    expect_equal(first, want, what="FLOPs of a layer that is computed twice", cause="flops")
    expect_equal(raised, "KeyError", what="a model that raises", cause="exception-swallowed")
    expect_equal(again, want, what="FLOPs, counted once more after an exception", cause="flops")
    expect_equal((same, devices), (True, {"cpu"}), what="the parameters", cause="side-effect")
    what = "after an exception inside torch.no_grad(): gradients on, random numbers as before"
    expect_equal(modes, (False, True), what=what, cause="side-effect")


@exercise("4.17", "virtual", asserts="no-values cost resources")
def test_counting_computes_no_values(impl, run):
    """A model with layers of 4 TB of activations: shapes have no storage."""

    def body(ctx):
        model = nn.Sequential(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 1))
        return impl.count_flops(model, torch.empty(1, 1000).expand(10**9, 1000))

    flops = run(body, 1)[0]
    want = 10**9 * (2 * 2 * 10**6 + 3 * 2 * 1000)
    expect_equal(flops, want, what="FLOPs of a milliard rows", cause="flops")


@exercise("4.17", "virtual", asserts="torch-counts attention layout parameters")
def test_flops_are_those_of_torchs_counter(impl, run, seed):
    """Products, convolutions and attention, forward and backward, as torch's counter counts."""

    def body(ctx):
        return [impl.count_flops(model, inputs) for model, inputs in models()]

    def reference(ctx):
        # in ranks, too: autograd starts threads where there are GPUs, which forks would miss
        found = []
        for model, inputs in models():
            with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
                out = model(inputs)
                if out.requires_grad:
                    out.sum().backward()
            found.append(counter.get_total_flops())
        return found

    expected, counted = run(reference, 1)[0], run(body, 1)[0]
    for name, got, want in zip((*NETS, "attention"), counted, expected, strict=True):
        expect_equal(got, want, what=f"FLOPs of {name}", cause="flops")


@exercise("4.17", "virtual", asserts="grouped-filter backward-mask")
def test_flops_of_grouped_convolutions(impl, run):
    """A filter of a grouped convolution sees the channels of its group only."""

    def body(ctx):
        convolution = nn.Conv2d(4, 8, 3, groups=2, bias=False)
        first = impl.count_flops(convolution, torch.rand(2, 4, 6, 6))
        return first, impl.count_flops(
            nn.Sequential(nn.Conv2d(4, 4, 1), convolution), torch.rand(2, 4, 6, 6)
        )

    first, both = run(body, 1)[0]
    one = 2 * (2 * 8 * 4 * 4) * (2 * 3 * 3)  # elements of the result, terms of each
    expect_equal(first, 2 * one, what="forward and the weights' gradient", cause="flops")
    expect_equal(
        both - 2 * 2 * (2 * 4 * 6 * 6) * 4, 3 * one, what="with the input's gradient", cause="flops"
    )


class Dropped(nn.Module):
    """Draws a number on the CPU, as layers do that are left out at random."""

    def forward(self, x):
        return x * float(torch.rand((), device="cpu") < 2)


@exercise("4.17", "virtual", asserts="no-trace resources")
def test_counting_leaves_no_trace(impl, run, seed):
    """Gradients, running statistics, random numbers and the training mode stay as they were."""

    def body(ctx):
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
        model.append(Dropped())
        model[2].eval()
        model(torch.rand(3, 4)).sum().backward()
        state = lambda: [
            *(t.clone() for t in model.state_dict().values()),
            *(p.grad.clone() for p in model.parameters()),
            torch.get_rng_state(),
        ]
        before = state()
        inputs = torch.rand(3, 4, generator=ctx.generator())
        alive, training = inputs.clone(), [m.training for m in model.modules()]
        impl.count_flops(model, inputs)
        same = torch.equal(inputs, alive) and training == [m.training for m in model.modules()]
        return before, state(), same and not inputs.requires_grad

    message = "the state of the model or of the random numbers after counting is that before"
    before, after, inputs = run(body, 1)[0]
    expect_equal(inputs, True, what="inputs and modes stay as they are", cause="side-effect")
    same = not difference(after, before)
    expect_equal(same, True, what=message, cause="side-effect")


@trace("4.17")
def scenario(impl):
    """FLOPs of a model are counted, then it is run: counting computes no values."""

    def body(ctx):
        model, rows = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8)), 4096
        ctx.start_picture()
        for _ in range(2):
            with ctx.span("count"):
                impl.count_flops(model, torch.empty(rows, 512))
            with ctx.span("compute"):
                model(torch.ones(rows, 512)).sum().backward()

    return body
