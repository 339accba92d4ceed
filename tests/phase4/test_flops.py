"""Checks of exercise 4.17: FLOPs are counted as torch counts them, and nothing changes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch._dynamo  # counting on the meta device imports it: once here, not per rank
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from distlab.grading import exercise, expect_equal, trace
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


@exercise("4.17", "virtual")
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


@exercise("4.17", "virtual")
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


@exercise("4.17", "virtual")
def test_counting_leaves_no_trace(impl, run, seed):
    """Gradients, running statistics, random numbers and the training mode stay as they were."""

    def body(ctx):
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
        model(torch.rand(3, 4)).sum().backward()
        state = lambda: [
            *(t.clone() for t in model.state_dict().values()),
            *(p.grad.clone() for p in model.parameters()),
            torch.get_rng_state(),
        ]
        before = state()
        impl.count_flops(model, torch.rand(3, 4, generator=ctx.generator()))
        return before, state()

    message = "the state of the model or of the random numbers after counting is that before"
    before, after = run(body, 1)[0]
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
