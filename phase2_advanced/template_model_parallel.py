# Exercises 2.8: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase2.py 2.8
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Naive model parallelism: the layers of one model on several ranks, one rank at work at a time.

The layers are divided into as many contiguous stages as there are ranks. A step passes activations
from stage to stage and their gradients back:

    rank 0   F₀ ──a₀─▶                                   ◀─ B₀      a_s: activation of stage s
    rank 1            F₁ ──a₁─▶              ◀─∂a₀─ B₁             ∂a_s: gradient of the loss by a_s
    rank 2                     F₂ B₂ ─∂a₁─▶ …

Per step and boundary: one message with a_s and one with ∂a_s, of the same size. Each rank holds the
weights, gradients and optimizer state of its own stage only, and works 1/S of the time at best. So
S ranks make room for an S times larger model, but not for a faster step. (Micro-batches make it
faster: pipeline parallelism.) Where to divide the layers is exercise 2.20's question.

A weight that two stages share (tied embedding and output layer) has a copy on each. Its gradient is
the sum of the copies' gradients, all-reduced between these stages. Invariant: copies that start
equal stay equal, to the last bit.
Sources: Huang et al. 2019 (GPipe, arXiv 1811.06965), sections 2.1 and 2.2. Narayanan et al. 2021
(arXiv 2104.04473), section 2.2. Press & Wolf 2017 (arXiv 1608.05859) for tied embeddings.

Shapes: B batch, T time, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from given.agreement import Group

Loss = Callable[[Tensor, Tensor], Tensor]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of activations
MOST_DIMS = 8
TieGroups = Mapping[tuple[int, ...], dist.ProcessGroup]


class Embed(nn.Module):
    """First layer of a GPT: tokens (B, T) int64 to the sum of their embeddings (B, T, D)."""

    def __init__(self, tokens: nn.Embedding, places: nn.Embedding) -> None:
        super().__init__()
        self.tokens, self.places = tokens, places

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Each token's embedding plus that of its position."""
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return self.tokens(tokens_BT) + self.places(places_T)


class Head(nn.Module):
    """Last layer of a GPT: (B, T, D) to logits (B · T, V)."""

    def __init__(self, norm: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Norm and output layer."""
        return self.head(self.norm(x_BTD)).flatten(0, 1)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of ``model``: called one after the other they equal it; weights are shared.

    For an ``nn.Sequential``, and for a GPT with the modules ``tokens``, ``places``, ``blocks``,
    ``norm`` and ``head``.
    """
    if isinstance(model, nn.Sequential):
        return list(model)
    return [Embed(model.tokens, model.places), *model.blocks, Head(model.norm, model.head)]


def tied_stages(
    layers: Sequence[nn.Module], bounds: Sequence[int]
) -> dict[nn.Parameter, list[int]]:
    """The stages that have a copy of each tied parameter, in rising order.

    A trainable parameter is tied if the layers of several stages have it; ``bounds`` as in
    ``Stage``. Parameters stand in the order of the layers, so all ranks find the same order.
    """
    # Step 1: collect each stage's parameters; keep those of several stages, once (dict.fromkeys)
    raise NotImplementedError("exercise 2.8")


def tie_groups(
    layers: Sequence[nn.Module],
    bounds: Sequence[int],
    pipelines: Sequence[Sequence[int]] | None = None,
) -> TieGroups:
    """A group for each set of stages that share a tied parameter, by its rising global ranks.

    ``pipelines``: the global ranks of each pipeline, whose stages are its ranks in rising order;
    None: the world is one pipeline. Every rank of the world calls it, also a rank in no pipeline,
    with equal ``bounds``, equal ``pipelines`` and layers that share alike. All of them make all
    groups, in the same order: NCCL makes a group by dividing the communicator of the world, and
    waits there for every rank. No tensor is sent.
    """
    # Step 2: new_group wants global ranks. Make one group per set of ranks, also if several
    #         parameters have the set. No rank may leave out a group of which it is no member
    raise NotImplementedError("exercise 2.8")


class Stage(nn.Module):
    """One rank's layers of a model that is split over the ranks of ``group``.

    ``layers``: all layers of the model, on every rank. Rank r of the group keeps those from
    ``bounds[r]`` to ``bounds[r+1]`` as its submodules and forgets the others; their memory is free
    as soon as the caller forgets them, too. A trainable parameter that also belongs to other stages
    is tied: its copies get the values of the first such stage. A frozen one is not tied, and gets
    no gradient. All ranks of the group make their stage together. A rank may have several stages,
    of several models. ``groups``: the result of ``tie_groups`` for these layers and bounds;
    several models may share it. With None, ``group`` has all ranks of the world, and they call
    ``tie_groups`` here. Raises ValueError on every rank, before anything is sent, unless ``bounds``
    begins with 0, rises, ends with the number of layers, and makes one stage per rank of the group.
    Raises it, too, if a parameter is tied and its group is not there.

    ``ties``: (parameter, group of the stages that hold a copy) for each tied parameter of this
    stage. ``shapes``: dtype and shape of the activation that comes in, by the inputs' shape.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        bounds: Sequence[int],
        group: Group = None,
        groups: TieGroups | None = None,
    ) -> None:
        super().__init__()
        self.group, self.rank, self.count = group, dist.get_rank(group), dist.get_world_size(group)
        self.ties: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        self.shapes: dict[torch.Size, tuple[torch.dtype, Sequence[int]]] = {}
        # Step 3: check the bounds; keep only this stage's layers, as self.layers
        # Step 4: make the groups of tied stages here only if all ranks of the world come here
        # Step 5: the copies start equal
        raise NotImplementedError("exercise 2.8")

    def forward(self, x: Tensor) -> Tensor:
        """This stage's layers, one after the other."""
        return self.layers(x)


def send_activation(stage: Stage, y: Tensor, announce: bool) -> None:
    """Send ``y`` to the next stage; ``announce``: dtype and shape first, in a message of 80 bytes.

    One message with the bytes of ``y``.
    """
    # Step 6: the other end receives into a tensor that it has to allocate first
    # Step 7: send values only: autograd's graph ends at the boundary
    raise NotImplementedError("exercise 2.8")


def receive_activation(stage: Stage, inputs: Tensor) -> Tensor:
    """The input of ``stage``: the inputs, or the previous stage's activation on their device.

    An activation is a leaf that requires a gradient. The counterpart of ``send_activation``: the
    shape is announced if the shape of the inputs is a new one. All ranks have the same inputs'
    shape, so they agree on that.
    """
    # Step 8: learn dtype and shape once for each shape of the inputs (stage.shapes)
    # Step 9: without requires_grad backward would end here, and earlier stages would not train
    raise NotImplementedError("exercise 2.8")


def forward_backward(
    stage: Stage, inputs: Tensor, targets: Tensor, loss_fn: Loss = F.cross_entropy
) -> float:
    """Forward and backward of the whole model on one batch, every stage in its turn.

    Adds to the ``p.grad`` of the stage's parameters; those of tied ones hold this stage's part
    (see ``reduce_ties``). ``inputs`` have the same shape on all ranks, on the device of the stage.
    The first stage alone reads their values, the last one alone reads ``targets``;
    ``loss_fn(outputs, targets)`` is a scalar. An activation has one of ``DTYPES``, at most
    ``MOST_DIMS`` dimensions, and any memory layout; dtype and layout may change from layer to
    layer. Frozen layers may be anywhere. The first layer of a stage must not work in place. Returns
    the loss (sent in float64), a float, the same on every rank. An error on one stage comes out
    there only; the others wait for its messages until the group's timeout ends them.

    Point-to-point messages between neighbours only, and one collective of 8 bytes for the loss. Per
    boundary: the activation there, its gradient back, and 80 bytes more for inputs of a new shape.
    No activation is kept afterwards.
    """
    # Step 10: forward: get x, compute y, send it on; the last stage computes the loss
    # Step 11: backward: start from the gradient of y, send x.grad to the stage before
    # Step 12: the last stage sends the loss to all
    raise NotImplementedError("exercise 2.8")


def reduce_ties(stage: Stage) -> None:
    """Give all copies of a tied parameter the gradient of the tied one: the sum over the copies.

    Once per optimizer step, after its last backward. A copy without gradient counts as zero. One
    all-reduce of the parameter's bytes between the stages that hold a copy; other stages send
    nothing.
    """
    # Step 13: a copy without gradient adds nothing, but its stage must come to the all-reduce
    raise NotImplementedError("exercise 2.8")


def train_step(
    stage: Stage,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    loss_fn: Loss = F.cross_entropy,
) -> float:
    """One optimizer step of the whole model; equals that of one process on the same batch.

    ``optimizer`` is over the stage's own parameters; gradients from before are forgotten.
    Arguments, return value and cost as for ``forward_backward`` and ``reduce_ties``.
    """
    # Step 14: sum over the copies before the step: equal copies and gradients take equal steps
    raise NotImplementedError("exercise 2.8")
