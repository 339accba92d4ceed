"""Naive model parallelism: the layers of one model on several ranks, one rank at work at a time.

The layers are divided into as many contiguous stages as there are ranks. A step passes activations
from stage to stage and their gradients back:

    rank 0   F₀ ──a₀─▶                                   ◀─ B₀      a_s: activation of stage s
    rank 1            F₁ ──a₁─▶              ◀─∂a₀─ B₁             ∂a_s: gradient of the loss by a_s
    rank 2                     F₂ B₂ ─∂a₁─▶ …

Per step and boundary: one message with a_s and one with ∂a_s, of the same size. Each rank holds the
weights, gradients and optimizer state of its own stage only, and works 1/S of the time at best: S
ranks make room for an S times larger model, not for a faster step (micro-batches do: pipeline
parallelism). Where to divide the layers is exercise 2.20's question.

A weight that two stages share (tied embedding and output layer) has a copy on each; the gradient of
the tied weight is the sum of the copies' gradients, all-reduced between these stages. Invariant:
copies that start equal stay equal, to the last bit.
Sources: Huang et al. 2019 (GPipe, arXiv 1811.06965), sections 2.1 and 2.2; Narayanan et al. 2021
(arXiv 2104.04473), section 2.2; Press & Wolf 2017 (arXiv 1608.05859) for tied embeddings.

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
    """The layers of ``model``, which one after the other do what it does; weights are shared.

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

    Tied is a trainable parameter that the layers of several stages have; ``bounds`` as in
    ``Stage``. Parameters stand in the order of the layers, so all ranks find the same order.
    """
    # --- exercise 2.8: start
    # Step 1: the parameters of each stage; those that are in several, each once (dict.fromkeys)
    held = [
        {p for layer in layers[begin:end] for p in layer.parameters()}
        for begin, end in pairwise(bounds)
    ]
    every = dict.fromkeys(p for layer in layers for p in layer.parameters() if p.requires_grad)
    sharing = {p: [stage for stage, own in enumerate(held) if p in own] for p in every}
    return {p: stages for p, stages in sharing.items() if len(stages) > 1}
    # --- exercise 2.8: end


def tie_groups(
    layers: Sequence[nn.Module],
    bounds: Sequence[int],
    pipelines: Sequence[Sequence[int]] | None = None,
) -> TieGroups:
    """A group for each set of stages that share a tied parameter, by its rising global ranks.

    ``pipelines``: the global ranks of each pipeline, whose stages are its ranks in rising order;
    None: the world is one pipeline. Every rank of the world calls it, one that is in no pipeline,
    too, with equal ``bounds``, equal ``pipelines`` and layers that share alike. All of them make
    all groups, in the same order: NCCL makes a group by dividing the communicator of the world,
    which waits for every rank. No tensor is sent.
    """
    # --- exercise 2.8: start
    # Step 2: new_group wants global ranks. Each set once, also if several parameters have it; no
    #         rank may leave one out because it is no member
    shared = tied_stages(layers, bounds).values()
    pipelines = pipelines or [range(dist.get_world_size())]
    sets = [tuple(sorted(ranks)[s] for s in stages) for ranks in pipelines for stages in shared]
    return {ranks: dist.new_group(ranks) for ranks in dict.fromkeys(sets)}
    # --- exercise 2.8: end


class Stage(nn.Module):
    """One rank's layers of a model that is split over the ranks of ``group``.

    ``layers``: all layers of the model, on every rank; rank r of the group keeps those from
    ``bounds[r]`` to ``bounds[r+1]`` as its submodules and forgets the others: when the caller does
    so too, their memory is free. A trainable parameter that also belongs to other stages is tied:
    its copies get the values of the first such stage. A frozen one is not, and gets no gradient.
    All ranks of the group make their stage together. A rank may have several, of several models.
    ``groups``: what ``tie_groups`` gave for these layers and bounds, several models may share it;
    None where ``group`` has all ranks of the world, which then call it here. Raises ValueError on
    every rank, before anything is sent, unless ``bounds`` begins with 0, rises, ends with the
    number of layers, and divides them into as many stages as the group has ranks; and if a
    parameter is tied and its group is not there.

    ``ties``: (parameter, group of the stages that hold a copy) for each tied parameter of this
    stage. ``shapes``: dtype and shape of what this stage gets, by the shape of the inputs.
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
        # --- exercise 2.8: start
        # Step 3: check the bounds; keep the own layers only, as self.layers
        # Step 4: the groups of tied stages, if no other rank of the world has to make them, too
        # Step 5: the copies start equal
        stages = [layers[begin:end] for begin, end in pairwise(bounds)]
        whole = [*bounds[:1], *bounds[-1:]] == [0, len(layers)]
        rising = all(begin < end for begin, end in pairwise(bounds))
        if not (whole and rising and len(stages) == self.count):
            raise ValueError(
                f"bounds {list(bounds)} don't cut {len(layers)} layers into {self.count} stages"
            )
        if groups is None:
            groups = tie_groups(layers, bounds) if self.count == dist.get_world_size() else {}
        ranks = dist.get_process_group_ranks(group)
        tied = {p: tuple(ranks[s] for s in of) for p, of in tied_stages(layers, bounds).items()}
        if missing := {*tied.values()} - groups.keys():
            raise ValueError(f"ranks {missing} share parameters: pass the groups of tie_groups")
        self.layers = nn.Sequential(*stages[self.rank])
        for p, sharing in tied.items():
            if ranks[self.rank] in sharing:
                dist.broadcast(p.detach(), group_src=0, group=groups[sharing])
                self.ties.append((p, groups[sharing]))
        # --- exercise 2.8: end

    def forward(self, x: Tensor) -> Tensor:
        """This stage's layers, one after the other."""
        return self.layers(x)


def send_activation(stage: Stage, y: Tensor, announce: bool) -> None:
    """Send ``y`` to the next stage; ``announce``: its dtype and shape ahead, in a message of 80 B.

    One message with the bytes of ``y``.
    """
    # --- exercise 2.8: start
    # Step 6: the other end receives into a tensor that it has to allocate first
    # Step 7: values only: autograd's graph ends at the boundary
    if announce:
        header = [DTYPES.index(y.dtype), y.dim(), *y.shape, *[0] * (MOST_DIMS - y.dim())]
        message = torch.tensor(header, device=y.device)
        dist.send(message, group=stage.group, group_dst=stage.rank + 1)
    dist.send(y.detach().contiguous(), group=stage.group, group_dst=stage.rank + 1)
    # --- exercise 2.8: end


def receive_activation(stage: Stage, inputs: Tensor) -> Tensor:
    """What ``stage`` works on: the inputs, or the previous stage's activation on their device.

    The latter is a leaf that requires a gradient. The counterpart of ``send_activation``; whether
    the shape is announced depends on whether the shape of the inputs is a new one, which is the
    same on all ranks.
    """
    # --- exercise 2.8: start
    # Step 8: learn dtype and shape once for each shape of the inputs (stage.shapes)
    # Step 9: without requires_grad the backward would end here, and earlier stages learn nothing
    if stage.rank == 0:
        stage.shapes[inputs.shape] = inputs.dtype, inputs.shape
        return inputs
    source = stage.rank - 1
    if inputs.shape not in stage.shapes:
        message = torch.empty(2 + MOST_DIMS, dtype=torch.int64, device=inputs.device)
        dist.recv(message, group=stage.group, group_src=source)
        dtype, dims, *shape = message.tolist()
        stage.shapes[inputs.shape] = DTYPES[dtype], shape[:dims]
    dtype, shape = stage.shapes[inputs.shape]
    x = torch.empty(shape, dtype=dtype, device=inputs.device)
    dist.recv(x, group=stage.group, group_src=source)
    return x.requires_grad_()
    # --- exercise 2.8: end


def forward_backward(
    stage: Stage, inputs: Tensor, targets: Tensor, loss_fn: Loss = F.cross_entropy
) -> float:
    """Forward and backward of the whole model on one batch, every stage in its turn.

    Adds to the ``p.grad`` of the stage's parameters; those of tied ones hold this stage's part
    (see ``reduce_ties``). ``inputs`` have the same shape on all ranks, on the device of the stage;
    the first stage alone reads their values, the last one alone reads ``targets``, with
    ``loss_fn(outputs, targets)`` a scalar. An activation has one of ``DTYPES``, at most
    ``MOST_DIMS`` dimensions, and any memory layout; both may change from layer to layer. Frozen
    layers may be anywhere. The first layer of a stage must not work in place. Returns the loss
    (sent in float64), a float, the same on every rank. An error on one stage comes out there only;
    the others wait for its messages until the group's timeout ends them.

    Point-to-point messages between neighbours only, and one collective of 8 bytes for the loss. Per
    boundary: the activation there, its gradient back, and 80 bytes more for inputs of a shape not
    seen before. No activation is kept afterwards.
    """
    # --- exercise 2.8: start
    # Step 10: forward: get x, compute y, pass it on; the last stage computes the loss
    # Step 11: backward: the gradient of y starts it, x.grad is what the stage before waits for
    # Step 12: the last stage tells all the loss
    announce = inputs.shape not in stage.shapes
    x = receive_activation(stage, inputs)
    y = stage(x)
    loss = torch.zeros((), dtype=torch.float64, device=inputs.device)
    if stage.rank == stage.count - 1:
        y = loss_fn(y, targets)
        loss += y.detach()
        gradient = torch.ones_like(y)
    else:
        send_activation(stage, y, announce)
        gradient = torch.empty_like(y, memory_format=torch.contiguous_format)
        dist.recv(gradient, group=stage.group, group_src=stage.rank + 1)
    if y.requires_grad:  # not where the first stage is frozen
        y.backward(gradient)
    if stage.rank > 0:
        dist.send(x.grad.contiguous(), group=stage.group, group_dst=stage.rank - 1)
    dist.broadcast(loss, group_src=stage.count - 1, group=stage.group)
    return loss.item()
    # --- exercise 2.8: end


def reduce_ties(stage: Stage) -> None:
    """Give all copies of a tied parameter the gradient of the tied one: the sum over the copies.

    Once per optimizer step, after its last backward. A copy without gradient counts as zero. One
    all-reduce of the parameter's bytes between the stages that hold a copy; the others send
    nothing.
    """
    # --- exercise 2.8: start
    # Step 13: a copy without gradient adds nothing, but its stage must come to the all-reduce
    for p, tie in stage.ties:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad, group=tie)
    # --- exercise 2.8: end


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
    # --- exercise 2.8: start
    # Step 14: the sum over the copies before the step: equal copies, equal gradients, equal steps
    optimizer.zero_grad(set_to_none=True)
    loss = forward_backward(stage, inputs, targets, loss_fn)
    reduce_ties(stage)
    optimizer.step()
    return loss
    # --- exercise 2.8: end
