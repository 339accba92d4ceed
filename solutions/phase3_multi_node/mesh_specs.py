"""How a GPT lies on a mesh: the sizes of the axes, and the spec of each parameter.

Sums, norm and checkpoint follow from the specs (3.33). So this table is all that a strategy tells
the others: which axes cut a parameter, which stages hold it, and which ranks have a term of its
gradient.

    parameter            cut by                         terms of its gradient
    tokens               tensor: words                  first and last stage, as it is tied
    qkv, up              tensor: rows
    out, down            tensor: columns
    experts.up, .down    expert, tensor: F
    router               -                              tensor ranks: each sees its part of F
    norms, biases        -                              tensor ranks, with sequence parallelism

The shard axis cuts rows of all these blocks once more. Its gradients come complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from solutions.phase2_advanced.model_parallel import layers_of
from solutions.phase2_advanced.parallel_gpt import Layout, matrix_elements
from solutions.phase2_advanced.stage_bounds import partition

from .mesh import Grid, Spec
from .mixture_gpt import MixtureBlock

SAMPLES = ("data", "shard", "expert")  # the axes that divide the sequences of a batch
BATCH = (*SAMPLES, "context")

CUTS: Mapping[str, Mapping[str, int]] = {
    "tokens.weight": {"tensor": 0},
    "qkv.weight": {"tensor": 0},
    "qkv.bias": {"tensor": 0},
    "up.weight": {"tensor": 0},
    "up.bias": {"tensor": 0},
    "out.weight": {"tensor": 1},
    "down.weight": {"tensor": 1},
    "experts.up": {"expert": 0, "tensor": 2},
    "experts.down": {"expert": 0, "tensor": 1},
}
OWN_POSITIONS = ("norm", "out.bias", "down.bias")  # with sequence parallelism: terms of a gradient


@dataclass(frozen=True, kw_only=True)
class MeshLayout(Layout):
    """How many ranks each axis has; the other fields are those of phase 2's ``Layout``."""

    shard: int = 1
    context: int = 1
    experts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.shard, self.context, self.experts) < 1:
            sizes = self.shard, self.context, self.experts
            raise ValueError(f"shard, context and experts must be at least 1: {sizes}")
        if self.shard > 1 and self.schedule == "zero-bubble":
            raise ValueError("zero-bubble needs parameters in W, when a shard has freed them")
        if self.shard > 1 and self.chunks > 1 and self.pipeline == 1:
            raise ValueError("shard ties the embedding within one chunk: chunks need a pipeline")

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return super().ranks * self.shard * self.context * self.experts

    def grid(self) -> Grid:
        """The ranks in a grid: tensor ranks, which send most, are neighbours."""
        sizes = {
            "pipeline": self.pipeline,
            "data": self.data,
            "shard": self.shard,
            "expert": self.experts,
            "context": self.context,
            "tensor": self.tensor,
        }
        return Grid(sizes, BATCH)


def bounds_of(gpt: nn.Module, layout: Layout) -> list[int]:
    """The bounds of the stages in the layers of ``gpt``."""
    return partition(matrix_elements(layers_of(gpt)), layout.pipeline * layout.chunks)


def prefix_of(index: int, layers: int) -> str:
    """What the whole model's names have before those of its layer ``index`` of ``layers``."""
    return f"blocks.{index - 1}." if 0 < index < layers - 1 else ""


def named(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters of a layer by name, and routers' biases; the tied matrix is ``tokens.weight``."""
    for name, value in layer.state_dict(keep_vars=True).items():
        if not name.endswith("counted_E"):
            yield name.replace("head.weight", "tokens.weight"), value


def specs_of(gpt: nn.Module, layout: MeshLayout) -> dict[str, Spec]:
    """How the ranks hold each parameter of the whole ``gpt``, by its name there.

    The rows of ``qkv`` are by head. Routers' biases are in it as well, for checkpoints.
    """
    specs, layers = {}, layers_of(gpt)
    for stage, (begin, end) in enumerate(pairwise(bounds_of(gpt, layout))):
        for index in range(begin, end):
            for name, value in named(layers[index]):
                full_name = prefix_of(index, len(layers)) + name
                specs[full_name] = spec_of(name, value, stage % layout.pipeline, layout)
    return specs


def spec_of(name: str, value: Tensor, stage: int, layout: MeshLayout) -> Spec:
    """The spec of a parameter by its ``name`` in the layer; ``stage``: the pipeline's rank with it.

    Nothing but the tied matrix is on two ranks of a pipeline.
    """
    cut, held, partial = dict(CUTS.get(name, {})), {stage}, []
    if isinstance(value, nn.Parameter):
        cut["shard"] = 0  # the last one: rows of the block that the other axes leave
    if name == "tokens.weight":
        held, partial = {0, layout.pipeline - 1}, ["pipeline"]
    if "router" in name or (layout.sequence_parallel and name.startswith(OWN_POSITIONS)):
        partial = ["tensor"]
    return Spec(
        shape=[*value.shape],
        cut=cut,
        on={"pipeline": sorted(held)},
        partial=partial,
        done=["shard"],  # its reduce-scatter gives the mean
    )


def refuse(gpt: nn.Module, layout: MeshLayout) -> None:
    """Raise ValueError for what the parts would not refuse, or not on all ranks."""
    mixed = any(isinstance(layer, MixtureBlock) for layer in layers_of(gpt))
    words = gpt.tokens.num_embeddings
    if layout.experts > 1 and not mixed:
        raise ValueError(f"{layout.experts} ranks for experts, but the model has no experts")
    if mixed and layout.schedule == "zero-bubble":
        raise ValueError("zero-bubble takes layers that return one tensor; a router returns more")
    if words % layout.tensor:
        raise ValueError(f"{words} words don't divide by {layout.tensor} tensor ranks")
