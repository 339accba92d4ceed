"""Naive model parallelism: the layers of one model on several ranks, one rank at work at a time.

The layers are cut into as many contiguous stages as there are ranks. A step passes activations from
stage to stage and their gradients back:

    rank 0   F₀ ──a₀─▶                                   ◀─ B₀      a_s: activation of stage s
    rank 1            F₁ ──a₁─▶              ◀─∂a₀─ B₁             ∂a_s: gradient of the loss by a_s
    rank 2                     F₂ B₂ ─∂a₁─▶ …

Per step and boundary: one message with a_s and one with ∂a_s, of the same size. Each rank holds the
weights, gradients and optimizer state of its own stage only, and works 1/S of the time at best: S
ranks make room for an S times larger model, not for a faster step (micro-batches do: pipeline
parallelism). As one rank works at a time, only the sum of the stages' times counts for a naive
step; the *largest* stage decides memory, and time as soon as the stages overlap. So the cut
minimises the largest cost.

A weight that two stages share (tied embedding and output layer) has a copy on each; the gradient of
the tied weight is the sum of the copies' gradients, all-reduced between these stages. Invariant:
copies that start equal stay equal, to the last bit.
Sources: Huang et al. 2019 (GPipe, arXiv 1811.06965), sections 2.1 and 2.2; Narayanan et al. 2021
(arXiv 2104.04473), section 2.2; Press & Wolf 2017 (arXiv 1608.05859) for tied embeddings.

Shapes: B batch, T time, D width, V vocabulary.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from given.agreement import Group

Loss = Callable[[Tensor, Tensor], Tensor]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of activations
MOST_DIMS = 8


class Embed(nn.Module):
    """First layer of a GPT: tokens (B, T) int64 to the sum of their embeddings (B, T, D)."""

    def __init__(self, tokens: nn.Embedding, places: nn.Embedding) -> None:
        super().__init__()
        self.tokens, self.places = tokens, places

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Each token's embedding plus that of its place."""
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


def parameter_costs(layers: Sequence[nn.Module]) -> list[int]:
    """Bytes of each layer's parameters; one that several layers share counts in the first."""
    # --- exercise 2.8: start
    # Step 1: remember which parameters were counted already
    seen: set[nn.Parameter] = set()
    costs = []
    for layer in layers:
        new = set(layer.parameters()) - seen
        costs.append(sum(p.numel() * p.element_size() for p in new))
        seen |= new
    return costs
    # --- exercise 2.8: end


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it (CUDA runs behind the program)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured_costs(
    layers: Sequence[nn.Module], example: Tensor, *, repeats: int = 5, group: Group = None
) -> list[float]:
    """Seconds of each layer's forward and backward, as rank 0 of ``group`` measured them.

    ``example`` is an input of the first layer; every further layer gets what the one before it
    gives. Of ``repeats`` runs, after one that warms up and does not count, the median. Every rank
    returns the same numbers: two measurements differ, and ranks that cut at different places would
    send each other what nobody expects. Weights, gradients, buffers and random state stay as they
    are. One broadcast of 8 bytes per layer.
    """
    # --- exercise 2.8: start
    # Step 2: one rank measures, on copies of the layers, with random numbers of its own
    # Step 3: that rank's medians for all
    seconds = torch.zeros(len(layers), dtype=torch.float64, device=example.device)
    if dist.get_rank(group) == 0:
        x = example
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            for number, layer in enumerate(map(copy.deepcopy, layers)):
                runs = [timed(layer, x) for _ in range(repeats + 1)]
                seconds[number] = statistics.median(elapsed for elapsed, _ in runs[1:])
                x = runs[-1][1]
    dist.broadcast(seconds, group_src=0, group=group)
    return seconds.tolist()
    # --- exercise 2.8: end


def timed(layer: nn.Module, x: Tensor) -> tuple[float, Tensor]:
    """(seconds of forward and backward of ``layer`` on ``x``, its output without graph).

    The backward includes the gradient of ``x``, if there can be one. Leaves gradients in ``layer``.
    """
    # --- exercise 2.8: start
    # Step 4: the device must be idle when the clock starts, and done when it stops
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_(x.is_floating_point())
    synchronize(x.device)
    begun = time.perf_counter()
    y = layer(x)
    if y.requires_grad:
        y.backward(torch.ones_like(y))
    synchronize(x.device)
    return time.perf_counter() - begun, y.detach()
    # --- exercise 2.8: end


def partition(costs: Sequence[float], stages: int) -> list[int]:
    """Cut the layers into contiguous stages so that the most expensive stage costs least.

    ``costs``: one number per layer, not negative. Returns stages + 1 bounds from 0 to len(costs),
    strictly increasing: stage s has the layers bounds[s] … bounds[s+1]-1, at least one. The same
    bounds for the same costs. Of all cuts, none has a smaller largest sum. O(stages · layers²).
    Raises ValueError if there are fewer layers than stages, for less than one stage, and for a cost
    that is negative or not finite.
    """
    # --- exercise 2.8: start
    # Step 5: with one stage the first n layers cost their sum; with one stage more, try every place
    #         where the last stage may begin: the larger of what comes before it and its own sum
    # Step 6: remember the best place for each n, and follow these places back from the end
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"{stages} stages need at least one layer each, there are {layers} layers")
    if not all(0 <= cost < math.inf for cost in costs):
        raise ValueError(f"costs must be finite and not negative, got {list(costs)}")
    total = [0, *accumulate(costs)]
    best = [(cost, 0) for cost in total]  # of the first n layers: largest sum, last stage's begin
    table = [best]
    for stage in range(1, stages):
        best = [
            min(
                ((max(best[b][0], total[n] - total[b]), b) for b in range(stage, n)),
                default=(math.inf, 0),
            )
            for n in range(layers + 1)
        ]
        table.append(best)
    bounds = [layers]
    for best in reversed(table):
        bounds.append(best[bounds[-1]][1])
    return bounds[::-1]
    # --- exercise 2.8: end


class Stage(nn.Module):
    """One rank's layers of a model that is split over the ranks of ``group``.

    ``layers``: all layers of the model, on every rank; rank r of the group keeps those from
    ``bounds[r]`` to ``bounds[r+1]`` as its submodules and forgets the others: when the caller does
    so too, their memory is free. A trainable parameter that also belongs to other stages is tied:
    its copies get the values of the first such stage. All ranks of the group make their stage
    together. Raises ValueError on every rank, before anything is sent, unless ``bounds`` cuts all
    the layers into as many stages as the group has ranks, none empty.

    ``ties``: (parameter, group of the stages that hold a copy) for each tied parameter of this
    stage. ``shapes``: dtype and shape of what this stage gets, by the shape of the inputs.
    """

    def __init__(
        self, layers: Sequence[nn.Module], bounds: Sequence[int], group: Group = None
    ) -> None:
        super().__init__()
        self.group, self.rank, self.count = group, dist.get_rank(group), dist.get_world_size(group)
        self.ties: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        self.shapes: dict[torch.Size, tuple[torch.dtype, Sequence[int]]] = {}
        # --- exercise 2.8: start
        # Step 7: check the bounds; keep the own layers only, as self.layers
        # Step 8: a parameter is tied if the layers of several stages have it; these stages make a
        #         group for each (new_group wants global ranks), in the same order on all ranks
        # Step 9: the copies start equal
        stages = [layers[begin:end] for begin, end in pairwise(bounds)]
        whole = bounds[0] == 0 and bounds[-1] == len(layers)
        if not whole or len(stages) != self.count or not all(stages):
            raise ValueError(
                f"bounds {list(bounds)} don't cut {len(layers)} layers into {self.count} stages"
            )
        self.layers = nn.Sequential(*stages[self.rank])
        held = [{p for layer in stage for p in layer.parameters()} for stage in stages]
        ranks = dist.get_process_group_ranks(group)
        for p in dict.fromkeys(p for layer in layers for p in layer.parameters()):
            sharing = [ranks[stage] for stage in range(self.count) if p in held[stage]]
            if p.requires_grad and len(sharing) > 1 and p in held[self.rank]:
                tie = dist.new_group(sharing, use_local_synchronization=True)
                dist.broadcast(p.detach(), group_src=0, group=tie)
                self.ties.append((p, tie))
        # --- exercise 2.8: end

    def forward(self, x: Tensor) -> Tensor:
        """This stage's layers, one after the other."""
        return self.layers(x)


def send_activation(stage: Stage, y: Tensor, announce: bool) -> None:
    """Send ``y`` to the next stage; ``announce``: its dtype and shape ahead, in a message of 80 B.

    One message with the bytes of ``y``.
    """
    # --- exercise 2.8: start
    # Step 10: the other end receives into a tensor that it has to allocate first
    # Step 11: values only: autograd's graph ends at the boundary
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
    # Step 12: learn dtype and shape once for each shape of the inputs (stage.shapes)
    # Step 13: without requires_grad the backward would end here, and earlier stages learn nothing
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
    the first stage reads their values, the last one reads ``targets``, with
    ``loss_fn(outputs, targets)`` a scalar. Returns the loss, the same on every rank.

    Point-to-point messages only, and one broadcast of 8 bytes for the loss. Per boundary: the
    activation there, its gradient back, and 80 bytes more for inputs of a shape not seen before.
    """
    # --- exercise 2.8: start
    # Step 14: forward: get x, compute y, pass it on; the last stage computes the loss
    # Step 15: backward: the gradient of y starts it, x.grad is what the stage before waits for
    # Step 16: the last stage tells all the loss
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

    Once per optimizer step, after its last backward. One all-reduce of the parameter's bytes
    between the stages that hold a copy; the others send nothing.
    """
    # --- exercise 2.8: start
    # Step 17: a copy without gradient adds nothing, but its stage must come to the all-reduce
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

    ``optimizer`` is over the stage's own parameters. Arguments, return value and cost as for
    ``forward_backward`` and ``reduce_ties``.
    """
    # --- exercise 2.8: start
    # Step 18: the sum over the copies before the step: equal copies, equal gradients, equal steps
    optimizer.zero_grad(set_to_none=True)
    loss = forward_backward(stage, inputs, targets, loss_fn)
    reduce_ties(stage)
    optimizer.step()
    return loss
    # --- exercise 2.8: end
