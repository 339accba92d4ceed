"""The bytes that a step on a mesh sends, by the axes along which they travel.

A message travels along the axes on which the ranks of its group differ. So each strategy has a row
in the table, and a sum over several axes has one of its own. Of all ranks together, for n ranks on
the axis, X bytes of activations of the whole batch at one place, L blocks and M mixtures:

    tensor      2(n-1)·X·(4L + 2M + 2)     and three numbers per token for the loss
    context     6(n-1)·X·L                 keys and values, again in backward, and their gradients
    expert      4(n-1)/n·K·X·M             each of K choices there and back, twice; per tensor rank
    pipeline    2·X per boundary           activations and their gradients; per tensor rank
    shard       (2m+1)(n-1)·P              P bytes of parameters, m micro-batches; at most
    gradients   2(n-1)·P                   along all axes that a sum takes

The first four grow with the batch, the last two with the model. Beside them travel a few whole
numbers per expert, the loss and the norm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from .mesh import Grid, arranged
from .mesh_specs import BATCH, MeshLayout, specs_of
from .mixture_gpt import MixtureBlock

Traffic = Counter[tuple[str, ...]]  # bytes of all ranks together, by axes
COUNT = 8  # bytes of a whole number, of the loss and of the norm


def axes_of(grid: Grid, ranks: Iterable[int]) -> tuple[str, ...]:
    """The axes on which ``ranks`` differ, in the grid's order."""
    found = [grid.coordinates(rank) for rank in ranks]
    return tuple(axis for axis in grid.sizes if len({each[axis] for each in found}) > 1)


def reduced(grid: Grid, axes: Sequence[str], nbytes: float) -> Traffic:
    """All-reduces along ``axes``, to which all ranks together bring ``nbytes``."""
    n = math.prod(grid.sizes[axis] for axis in axes)
    return Counter({axes_of(grid, grid.line(0, axes)): 2 * (n - 1) / n * nbytes})


def expected(gpt: nn.Module, layout: MeshLayout, batch: int, length: int) -> Traffic:
    """The bytes of a step on ``batch`` sequences of ``length``, by the formulas above.

    Along the shard axis these are the most that can be: what is still gathered is not sent again.
    """
    grid, tokens = layout.grid(), batch * length
    found = activations(gpt, layout, tokens) + mixtures(gpt, layout, tokens)
    found += parameters(gpt, layout)
    found += reduced(grid, [*grid.sizes], grid.world_size * COUNT)  # the norm
    found += reduced(grid, BATCH, grid.world_size * COUNT)  # the loss
    return found


def activations(gpt: nn.Module, layout: MeshLayout, tokens: int) -> Traffic:
    """What blocks, embedding and head send along tensor, context and pipeline axis."""
    size, blocks, mixtures = gpt.tokens.weight.itemsize, len(gpt.blocks), len(mixed(gpt))
    whole = tokens * gpt.tokens.embedding_dim * size
    borders = 4 * blocks + 2 * mixtures + (2.5 if layout.sequence_parallel else 2)
    copies = 1 if layout.sequence_parallel else layout.tensor  # of an activation at a boundary
    boundaries = layout.pipeline * layout.chunks - 1 if layout.pipeline > 1 else 0
    told = layout.ranks // layout.pipeline * COUNT if boundaries else 0  # the last stage has a loss
    return Counter(
        {
            ("tensor",): 2 * (layout.tensor - 1) * (whole * borders + 3 * tokens * size),
            ("context",): 6 * (layout.context - 1) * whole * blocks,
            ("pipeline",): 2 * boundaries * whole * copies + told,
        }
    )


def mixed(gpt: nn.Module) -> list[MixtureBlock]:
    """The blocks with experts."""
    return [block for block in gpt.blocks if isinstance(block, MixtureBlock)]


def mixtures(gpt: nn.Module, layout: MeshLayout, tokens: int) -> Traffic:
    """What the mixtures send: rows along the expert axis, and the load over the batch."""
    found, away = Traffic(), (layout.experts - 1) / layout.experts
    calls = layout.ranks // layout.pipeline * layout.micro_batches  # of a mixture, on all ranks
    for block in mixed(gpt):
        router = block.experts.router
        rows = 4 * tokens * router.top_k * layout.tensor
        counts = calls * router.out_features * COUNT
        row = router.in_features * router.weight.itemsize
        found += Counter({("expert",): away * (rows * row + counts)})
        found += reduced(layout.grid(), BATCH, counts)
    return found


def parameters(gpt: nn.Module, layout: MeshLayout) -> Traffic:
    """What the parameters send: along the shard axis, and in the sums of their gradients."""
    grid, found, size = layout.grid(), Traffic(), gpt.tokens.weight.itemsize
    gathers = (2 * layout.micro_batches + 1) * (layout.shard - 1)
    for name, spec in specs_of(gpt, layout).items():
        axes, _ = spec.rule(grid)
        for rank in range(0 if name.endswith("bias_E") else grid.world_size):
            here = grid.coordinates(rank)
            if any(here[axis] not in kept for axis, kept in spec.on.items()):
                continue
            block = size * math.prod(end - begin for begin, end in spec.bounds(grid, rank))
            ranks = grid.line(rank, axes, spec.on)
            found["shard",] += gathers * block
            found[axes_of(grid, ranks)] += 2 * (len(ranks) - 1) / len(ranks) * block
    return +found  # without rows of zero bytes


def best_grid(gpt: nn.Module, layout: MeshLayout, batch: int, length: int, node_size: int) -> Grid:
    """The axes in the order for which the fewest bytes leave a node of ``node_size`` ranks.

    A ring along several axes goes on along the outermost one only once for all ranks on the
    others. So its bytes count on each axis, divided by the sizes of the others.
    """
    grid, traffic = layout.grid(), Counter[str]()
    for axes, nbytes in expected(gpt, layout, batch, length).items():
        ranks = math.prod(grid.sizes[axis] for axis in axes)
        traffic.update({a: nbytes / layout.ranks * grid.sizes[a] / ranks for a in axes})
    return arranged(grid, traffic, node_size)
