"""The programs of the scale curves, and the formulas of their bytes and times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch._dynamo  # torch.optim imports it: once here, not in every rank
import torch.nn.functional as F
from torch import nn

from distlab.hardware.clusters import Cluster, load_cluster
from solutions.phase3_multi_node.allreduce_choice import critical_path
from solutions.phase3_multi_node.ddp import DDP
from solutions.phase3_multi_node.fsdp_prefetch import PrefetchFSDP
from solutions.phase3_multi_node.halving_doubling import halving_doubling_all_reduce
from solutions.phase3_multi_node.ring_allreduce import ring_all_reduce
from solutions.phase3_multi_node.tree_allreduce import tree_all_reduce
from solutions.phase3_multi_node.zero import ZeroOptimizer

assert torch._dynamo
BATCH, LAYERS, ITEM = 8, 4, 4
REAL, VIRTUAL = (2, 3, 4, 5, 6, 7, 8), (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
NUMBERS = 2**20  # of a model that is cut into more and more tensors
PATTERNS: dict[str, Callable[..., object]] = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
}


@dataclass(frozen=True)
class Setting:
    """One point: ranks, and what each of them works on."""

    ranks: int = 2
    nbytes: int = 0  # of an all-reduce
    tensors: int = LAYERS  # of a model of square layers
    width: int = 256  # of its layers

    @property
    def numbers(self) -> int:
        """Parameters of the model."""
        return self.tensors * self.width**2


def all_reduce(pattern: str, setting: Setting) -> Callable[[], object]:
    """One all-reduce."""
    tensor = torch.ones(setting.nbytes // ITEM)
    return partial(PATTERNS[pattern], tensor)


def step(strategy: str, setting: Setting) -> Callable[[], object]:
    """One training step of a model of square layers."""
    torch.manual_seed(0)
    layers = [nn.Linear(setting.width, setting.width, bias=False) for _ in range(setting.tensors)]
    model: nn.Module = nn.Sequential(*layers)
    model = PrefetchFSDP(model, layers) if strategy == "FSDP" else DDP(model)
    made: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=1e-3)
    if strategy == "ZeRO-1":
        made = partial(ZeroOptimizer, optimizer_class=torch.optim.SGD, lr=1e-3)
    optimizer, inputs = made(model.parameters()), torch.randn(BATCH, setting.width)

    def once() -> None:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), inputs).backward()
        optimizer.step()

    return once


def bytes_of_pattern(pattern: str, setting: Setting) -> float:
    """Bytes that the rank sends which sends most, by the formula."""
    _, volume = critical_path(pattern, setting.ranks, setting.nbytes)
    if pattern == "tree":  # of the path a rank sends one half: the root sends down only
        return volume / 2
    if pattern == "halving_doubling" and setting.ranks.bit_count() > 1:
        return volume - setting.nbytes  # one of the two transfers more is the partner's
    return volume


def bytes_of_step(strategy: str, setting: Setting) -> float:
    """The same for a step: how often the model's numbers travel in a collective of (W-1)/W.

    DDP sums gradients, ZeRO-1 gathers parameters as well. FSDP gathers units twice, but the last
    one, which backward needs first, stays.
    """
    often = {"DDP": 2, "ZeRO-1": 3, "FSDP": 3 - 1 / setting.tensors}[strategy]
    return often * (setting.ranks - 1) / setting.ranks * ITEM * setting.numbers


def terms_of_pattern(pattern: str, setting: Setting) -> tuple[float, ...]:
    """What α and β of the cost formula are multiplied with."""
    return critical_path(pattern, setting.ranks, setting.nbytes)


def terms_of_step(setting: Setting) -> tuple[float, ...]:
    """Seconds that a step always takes, those per tensor, and those per number of the model, which
    is computed with. Of collectives: seconds per rank of a ring, per round of a tree, and per
    number that a rank sends."""
    others, rounds = setting.ranks - 1, (setting.ranks - 1).bit_length()
    sent = others / setting.ranks * setting.numbers
    return 1.0, setting.tensors, setting.numbers, others, rounds, sent


@dataclass(frozen=True)
class Curve:
    """One program over one variable, ``over``: a field of ``Setting``.

    ``sent`` and ``terms`` are the formulas: bytes of the rank that sends most, and what the
    fitted constants of time are multiplied with.
    """

    what: str
    over: str
    points: tuple[Setting, ...]
    make: Callable[[Setting], Callable[[], object]]
    sent: Callable[[Setting], float]
    terms: Callable[[Setting], tuple[float, ...]]
    warm: bool = False  # the first call makes what later ones use
    cluster: str = ""  # virtual ranks

    @property
    def name(self) -> str:
        """As it stands in the file and in the table."""
        return f"{self.what} over {self.over}" + (", virtual" if self.cluster else "")


def _patterns(over: str, points: Sequence[Setting], cluster: str = "") -> Iterator[Curve]:
    for pattern in PATTERNS:
        formulas = partial(bytes_of_pattern, pattern), partial(terms_of_pattern, pattern)
        what = f"all-reduce, {pattern.replace('_', ' and ')}"
        yield Curve(
            what, over, tuple(points), partial(all_reduce, pattern), *formulas, False, cluster
        )


def _steps(over: str, points: Sequence[Setting], cluster: str = "") -> Iterator[Curve]:
    for strategy in ("DDP", "ZeRO-1", "FSDP"):
        formulas = partial(bytes_of_step, strategy), terms_of_step
        what = f"step, {strategy}"
        yield Curve(what, over, tuple(points), partial(step, strategy), *formulas, True, cluster)


def curves() -> list[Curve]:
    """All of them."""
    sizes = [4 * 4**k for k in range(13)]
    models = [Setting(width=w) for w in (64, 128, 256, 512, 1024)]
    cut = [Setting(tensors=4**k, width=math.isqrt(NUMBERS // 4**k)) for k in range(6)]
    return [
        *_patterns("ranks", [Setting(w, 2**20) for w in REAL]),
        *_patterns("nbytes", [Setting(2, n) for n in sizes]),
        *_steps("ranks", [Setting(w) for w in REAL]),
        *_steps("numbers", models),
        *_steps("tensors", cut),
        *_patterns("ranks", [Setting(w, 2**16) for w in VIRTUAL], "roce-a100"),
        *_steps("ranks", [Setting(w, width=32) for w in VIRTUAL], "roce-a100"),
    ]


def flat(name: str) -> Cluster:
    """The cluster with one GPU and one card per node: every message takes a link of its own."""
    cluster = load_cluster(name)
    return replace(cluster, gpus_per_node=1, nics_per_node=1, overhead=0.0, oversubscription=1.0)
