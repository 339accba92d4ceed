"""A job reads batches of 12 of 48 samples; after 2 batches it goes on with one rank less.

The epoch of the restart is read twice: once to train, once to measure.
"""

from __future__ import annotations

from typing import Any


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """How many samples this rank has in each batch, and which ones all ranks have together."""

    def samplers(ranks: int) -> list[Any]:
        options = {"global_batch_size": 12, "world_size": ranks, "seed": ctx.seed}
        return [code.ElasticSampler(48, rank=rank, **options) for rank in range(ranks)]

    def read(all_ranks: list[Any], when: str) -> dict[str, Any]:
        batches = [list(sampler) for sampler in all_ranks]
        found: dict[str, Any] = {f"{when}, this rank's sizes": [*map(len, batches[ctx.rank])]}
        for k, parts in enumerate(zip(*batches, strict=True)):
            found[f"{when}, batch {k} of all ranks"] = sorted(i for part in parts for i in part)
        return found

    before = samplers(ctx.world_size)
    found = read(before, "before")
    if ctx.rank == ctx.world_size - 1:
        return found
    after = samplers(ctx.world_size - 1)
    for old, new in zip(before, after, strict=False):
        new.load_state_dict(old.state_dict(2 * 12))
    found |= read(after, "after the restart")
    found |= read(after, "measured")
    sizes = found["after the restart, this rank's sizes"]
    weights = [float(code.loss_weight(size, 12, ctx.world_size - 1)) for size in sizes]
    return found | {"weights of the loss after the restart": weights}
