"""The words that a plan can choose from."""

from __future__ import annotations

from dataclasses import dataclass

from ..virtual.fusion import RULES


@dataclass(frozen=True)
class Kind:
    """Facts about a strategy. ``alike``: ranks with equal shards do the same steps. ``of_torch``:
    torch has it as well, for ``--impl torch``."""

    alike: bool = False
    of_torch: bool = False


STRATEGIES = {
    "ddp": Kind(alike=True, of_torch=True),
    "bucketed": Kind(alike=True, of_torch=True),
    "ring": Kind(),
    "tree": Kind(),
    "halving-doubling": Kind(),
    "hierarchical": Kind(),
    "zero1": Kind(alike=True, of_torch=True),
    "zero2": Kind(alike=True),
    "fsdp": Kind(alike=True),
    "hybrid": Kind(alike=True),
    "local-sgd": Kind(alike=True),
    "parameter-server": Kind(),
}
ACCUMULATE = ("bucketed", "zero2", "fsdp", "hybrid")
ALIKE = tuple(name for name, kind in STRATEGIES.items() if kind.alike)
IMPLS = ("solutions", "mine", "torch")
COLLECTIVES = ("backend", "ring", "tree", "hierarchical")
# 16 bits with float32 weights: by torch.autocast, or in the optimizer (FSDP's shards, or copies);
# products in tfloat32
PRECISIONS = ("autocast", "mixed", "tf32")
RECOMPUTED = ("none", "selective", "full")
ATTENTION = ("fused", "written")
FUSED = ("optimizer", *RULES)  # its update of all parameters; chains of operators


def pipeline_words(stages: int, schedule: str, chunks: int) -> list[str]:
    """A pipeline in a few words: nothing, or "pp4", its schedule, and "x2" for chunks of a rank."""
    more = [f"x{chunks}"] * (chunks > 1)
    return [f"pp{stages}", schedule, *more] if stages > 1 else []
