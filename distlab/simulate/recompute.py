"""Activations that are computed again in backward: which blocks keep what.

*full* keeps the inputs of each block. *selective* also keeps the results of attention and of every
second matrix product, as torchtitan does (torchtitan/distributed/activation_checkpoint.py, v0.2).
The schedule of memory is exercise 2.7's; this module only chooses.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


def saved_operators() -> Callable[..., CheckpointPolicy]:
    """Keep attention and every second matrix product."""
    seen: Counter[bool] = Counter()

    def policy(ctx: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = operator.overloadpacket.__name__
        is_product = name in ("mm", "addmm")
        seen[ctx.is_recompute] += is_product
        keep = "attention" in name or (is_product and seen[ctx.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def compute_again(
    blocks: Sequence[nn.Module], how: str, inside: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Let the blocks compute their activations again in backward, ``how`` full or selective.

    ``inside`` makes the context of the forward, for the second time: autograd's thread of
    execution does not know the modes that the first forward ran in.
    """

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if how == "full":
            return contextlib.nullcontext(), inside()
        keeping, again = create_selective_checkpoint_contexts(saved_operators())
        return keeping, _both(inside(), again)

    for block in blocks:
        block.forward = partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=contexts,
        )


@contextlib.contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
