"""PyTorch's scenarios of tensor parallelism, beside ``parallelize_module``."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # torch.distributed.tensor imports it: once here, not per rank
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from distlab.ranks import RankContext
from solutions.phase2_advanced.sequence_parallel import SequenceColumnLinear, SequenceRowLinear
from solutions.phase2_advanced.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from solutions.phase2_advanced.vocabulary_parallel import (
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from tests.pytorch_scenarios.beside import Pair, Ran, Scenarios, refused, seeded, twins

SCENARIOS = Scenarios()
REPLICATED = Replicate()


@pytest.fixture(scope="module")
def ran() -> Ran:
    return SCENARIOS.run(2)


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


def linear() -> nn.Linear:
    return seeded(lambda: nn.Linear(6, 8))  # type: ignore[return-value]


def shared(*shape: int, seed: int = 1) -> Tensor:
    """An input that is equal on all ranks, and asks for a gradient."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def local(tensor: Tensor | None) -> Tensor | None:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def results(module: nn.Module, x: Tensor, out: Tensor) -> list[Tensor | None]:
    """The result, the input's gradient, and those of the rank's own parameters."""
    out.square().sum().backward()
    return [local(out), x.grad, *[local(p.grad) for p in module.parameters()]]


@SCENARIOS.ported
def test_a_layer_cut_by_columns(ctx: RankContext) -> Pair:
    """The rank's features of the result; the input's gradient is the sum."""
    ours = ColumnParallelLinear(linear())
    theirs = parallelize_module(linear(), mesh(), ColwiseParallel())
    return tuple(results(m, x, m(x)) for m, x in ((ours, shared(3, 6)), (theirs, shared(3, 6))))


@SCENARIOS.ported
def test_columns_that_are_gathered(ctx: RankContext) -> Pair:
    """The whole result on every rank."""
    ours = ColumnParallelLinear(linear(), gather_output=True)
    style = ColwiseParallel(output_layouts=REPLICATED)
    theirs = parallelize_module(linear(), mesh(), style)
    return tuple(results(m, x, m(x)) for m, x in ((ours, shared(3, 6)), (theirs, shared(3, 6))))


@SCENARIOS.ported
def test_a_layer_cut_by_rows(ctx: RankContext) -> Pair:
    """Each rank has its features of the input; the result is whole."""
    ours = RowParallelLinear(linear())
    theirs = parallelize_module(linear(), mesh(), RowwiseParallel())
    found = []
    for module in (ours, theirs):
        x = shared(3, 6).detach()[:, 3 * ctx.rank : 3 * ctx.rank + 3].clone().requires_grad_()
        found.append(results(module, x, module(x)))
    return found[0], found[1]


@SCENARIOS.ported
def test_rows_of_a_whole_input(ctx: RankContext) -> Pair:
    """The layer takes its own part of the input."""
    ours = RowParallelLinear(linear(), split_input=True)
    style = RowwiseParallel(input_layouts=REPLICATED)
    theirs = parallelize_module(linear(), mesh(), style)
    return tuple(results(m, x, m(x)) for m, x in ((ours, shared(3, 6)), (theirs, shared(3, 6))))


@SCENARIOS.newer
def test_frozen_weights_stay_frozen(ctx: RankContext) -> Pair:
    """Weight frozen and bias not, in both kinds of layers."""
    found: list[list[bool]] = [[], []]
    for ours, style in (
        (ColumnParallelLinear, ColwiseParallel()),
        (RowParallelLinear, RowwiseParallel()),
    ):
        one, other = linear(), linear()
        for layer in (one, other):
            layer.weight.requires_grad_(False)
        cut = ours(one), parallelize_module(other, mesh(), style)
        for flags, layer in zip(found, cut, strict=True):
            flags += [layer.weight.requires_grad, layer.bias.requires_grad]
    return found[0], found[1]


def two_layers() -> nn.Module:
    """Six features, eight inside."""
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))


@SCENARIOS.ported
def test_training_of_two_layers(ctx: RankContext) -> Pair:
    """Columns, then rows: five steps of AdamW, then a forward without autograd."""

    one, other = twins(two_layers)
    ours = nn.Sequential(ColumnParallelLinear(one[0]), nn.ReLU(), RowParallelLinear(one[2]))
    theirs = parallelize_module(other, mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    found = []
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        seen = []
        for step in range(5):
            optimizer.zero_grad()
            loss = model(shared(3, 6, seed=step)).square().mean()
            loss.backward()
            optimizer.step()
            seen.append(loss)
        with torch.no_grad():
            found.append([*seen, model(shared(3, 6)), *[local(p) for p in model.parameters()]])
    return found[0], found[1]


@SCENARIOS.ported
def test_a_sequence_cut_between_layers(ctx: RankContext) -> Pair:
    """Positions are cut outside of the two layers, features inside."""

    one, other = twins(two_layers)
    ours = nn.Sequential(SequenceColumnLinear(one[0]), nn.ReLU(), SequenceRowLinear(one[2]))
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(1)),
        "2": RowwiseParallel(output_layouts=Shard(1)),
    }
    theirs = parallelize_module(other, mesh(), plan)
    found = []
    for model in (ours, theirs):
        x = shared(2, 4, 6).detach()[:, 2 * ctx.rank : 2 * ctx.rank + 2].clone().requires_grad_()
        got = results(model, x, model(x))
        found.append(got[:-1])  # the last bias is summed at the end of the step in ours
    return found[0], found[1]


@SCENARIOS.ported
def test_an_embedding_cut_by_words(ctx: RankContext) -> Pair:
    """Each rank has half of the words; the vectors are whole."""
    words = torch.arange(8).reshape(4, 2)
    one, other = twins(lambda: nn.Embedding(16, 6))
    ours = VocabParallelEmbedding(one)  # type: ignore[arg-type]
    theirs = parallelize_module(other, mesh(), RowwiseParallel(input_layouts=REPLICATED))
    found = []
    for module in (ours, theirs):
        out = module(words)
        out.square().sum().backward()
        grad = module.weight.grad
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        mine = whole if len(whole) == 8 else whole[8 * ctx.rank : 8 * ctx.rank + 8]
        found.append([local(out), mine])
    return found[0], found[1]


@SCENARIOS.ported
def test_cross_entropy_of_cut_logits(ctx: RankContext) -> Pair:
    """The loss of each token and the gradient of the rank's own logits."""
    logits, targets = shared(5, 8).detach(), torch.tensor([0, 7, 3, 4, 1])
    mine = logits[:, 4 * ctx.rank : 4 * ctx.rank + 4].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, targets, 8).mean()
    loss.backward()
    part = logits[:, 4 * ctx.rank : 4 * ctx.rank + 4].clone().requires_grad_()
    whole = DTensor.from_local(part, mesh(), [Shard(1)])
    with loss_parallel():
        other = F.cross_entropy(whole, targets)
        other.backward()
    other = other.full_tensor() if isinstance(other, DTensor) else other
    return [loss, mine.grad], [other, part.grad]


@SCENARIOS.ported
def test_tied_words_as_input_and_output(ctx: RankContext) -> Pair:
    """One weight is the embedding and the head: its gradient is the sum of both uses'."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(8, 6)
            self.head = nn.Linear(6, 8, bias=False)
            self.head.weight = self.words.weight

    words, targets = torch.tensor([1, 5, 7]), torch.tensor([0, 2, 6])
    one, other = twins(Tied)
    ours = VocabParallelEmbedding(one.words)
    vocab_parallel_cross_entropy(ours.logits(ours(words)), targets, 8).sum().backward()
    F.cross_entropy(other.head(other.words(words)), targets, reduction="sum").backward()
    want = other.words.weight.grad
    assert want is not None
    return ours.weight.grad, want[4 * ctx.rank : 4 * ctx.rank + 4]


@SCENARIOS.ported
def test_an_input_of_the_wrong_width(ctx: RankContext) -> Pair:
    """Both refuse it."""
    ours = ColumnParallelLinear(linear())
    theirs = parallelize_module(linear(), mesh(), ColwiseParallel())
    return tuple(refused(lambda m=m: m(torch.randn(3, 5))) for m in (ours, theirs))
