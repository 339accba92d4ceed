"""Which samples a rank reads: of a resumed epoch, of the same one again, and of the next one."""

from __future__ import annotations

from typing import Any


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The samples of each pass, in their order."""
    options = {"rank": ctx.rank, "world_size": ctx.world_size, "seed": ctx.seed}
    before = code.ShardedSampler(29, **options)
    before.set_epoch(0)
    sampler = code.ShardedSampler(29, **options)
    sampler.load_state_dict(before.state_dict(4))
    found: dict[str, Any] = {}
    for epoch, what in ((0, "trained"), (0, "measured"), (1, "next epoch")):
        sampler.set_epoch(epoch)
        samples = list(sampler)
        found[what] = samples
        found[f"number of samples, {what}"] = len(samples)
    return found
