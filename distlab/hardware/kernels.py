"""Seconds of one kernel on a kind of GPU: short formulas with measured constants.

F is the number of FLOPs, n the bytes that a kernel reads and writes. R(dtype) and B are the rates
of the cluster's file: the largest products reach R, and long copies reach B. A share is relative to
them.

================  ==============================================================================
matrix product    F / (share · R) + traffic · n / B: a part of the traffic is not hidden
attention         F / (share · R) · (1 + half / L), F without the masked half, L the keys' length
convolution       F / (share · R), the share of the most similar convolutions that were measured
other operators   n / (share · B), the share by the operator's name
optimizer         n / (share · B), n the bytes of parameters, gradients and state, by implementation
================  ==============================================================================

No kernel takes less than ``kernel`` seconds, and the host needs ``host`` seconds to launch one. A
CPU is its own host: the times add up.
``clusters/kernels/*.yaml`` has the constants. Each constant has a source and a kind there:
measured, assumed or fitted. The form is a roofline with terms that add up (Williams, Waterman &
Patterson 2009); the constants are regressions.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .clusters import FOLDER, KINDS, LOADER, Gpu
from .curves import interpolated

MOST_FITTED = 6  # constants that may be fitted to published runs, per kind of GPU
NEAREST = 3  # measured convolutions that give the share of another one


@dataclass(frozen=True, kw_only=True)
class Product:
    """Matrix products of one dtype: the share of R, and the part of the traffic that adds time."""

    share: float
    traffic: float


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Fused attention for heads of one width: at length ``half`` it reaches half of its share.

    ``half_causal``: the same with a causal mask, whose diagonal blocks are computed in full.
    """

    share: float
    half: float
    half_causal: float

    def seconds(self, flops: float, rate: float, length: int, causal: bool) -> float:
        """``flops``: of the scores that are not masked."""
        half = self.half_causal if causal else self.half
        return flops / (self.share * rate) * (1 + half / length)


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """One measured convolution: its sizes, dtype and layout, and the share of R that it reached."""

    way: str
    dtype: str
    channels_last: bool
    into: int
    out: int
    side: int
    kernel: int
    stride: int
    groups: int
    share: float

    def unlike(self, other: Convolution) -> float:
        """How different two convolutions are: 1 for a factor of two in one size."""
        sizes = ("into", "out", "side", "kernel", "stride", "groups")
        return sum(abs(math.log2(getattr(self, s) / getattr(other, s))) for s in sizes)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The constants of one kind of GPU; ``sources`` and ``kinds`` say where each comes from.

    ``load``: how many times longer products, attention and other operators take in a cluster that
    trains for days (power limits, older kernels) than alone. ``growth``: the share by which a step
    grows with each doubling of the nodes whose ranks wait for each other in every layer
    (stragglers, congestion). ``phases``: the host's seconds for an operator in forward, in backward
    and in the optimizer, where they are not ``host``. ``cached``: how many times faster than a long
    one a kernel is that is bound by memory, by its bytes.
    """

    name: str
    product: dict[str, Product]
    attention: dict[str, dict[int, Attention]]
    convolution: tuple[Convolution, ...]
    memory: dict[str, float]
    optimizer: dict[str, float]
    kernel: float
    host: float
    load: dict[str, float]
    growth: float
    phases: dict[str, float] = field(default_factory=dict)
    cached: dict[int, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def matrix_product(self, gpu: Gpu, flops: float, nbytes: float, dtype: str) -> float:
        """Seconds of a product with ``nbytes`` read and written."""
        form = self.product.get(dtype) or self.product["float32"]
        alone = flops / (form.share * rate(gpu, dtype)) + form.traffic * nbytes / gpu.bandwidth
        return alone * self.load["product"]

    def fused_attention(
        self, gpu: Gpu, way: str, flops: float, width: int, length: int, causal: bool, dtype: str
    ) -> float:
        """Seconds of attention, ``way`` forward or backward; ``flops`` without the masked half."""
        forms = self.attention[way]
        nearest = min(forms, key=lambda known: abs(math.log2(known / width)))
        alone = forms[nearest].seconds(flops, rate(gpu, dtype), length, causal)
        return alone * self.load["attention"]

    def convolved(self, gpu: Gpu, flops: float, asked: Convolution) -> float:
        """Seconds of a convolution; ``asked.share`` is not read."""
        same = [
            known
            for known in self.convolution
            if (known.way, known.dtype, known.channels_last)
            == (asked.way, asked.dtype, asked.channels_last)
        ]
        if not same:
            return flops / rate(gpu, asked.dtype) * self.load["product"]
        near = sorted(same, key=asked.unlike)[:NEAREST]
        weights = [1 / (asked.unlike(known) + 1e-3) ** 2 for known in near]
        logs = (w * math.log(known.share) for w, known in zip(weights, near, strict=True))
        share = math.exp(sum(logs) / sum(weights))
        return flops / (share * rate(gpu, asked.dtype)) * self.load["product"]

    def moved(self, gpu: Gpu, name: str, nbytes: float) -> float:
        """Seconds of an operator that is bound by memory."""
        share = self.memory.get(name, self.memory["other"])
        if self.cached and nbytes:
            points = [(math.log2(size), faster) for size, faster in sorted(self.cached.items())]
            share *= interpolated(points, math.log2(nbytes))
        return nbytes / (share * gpu.bandwidth) * self.load["memory"]

    def growing(self, nodes: int) -> float:
        """How many times longer a kernel takes on so many nodes than on one."""
        return 1 + self.growth * math.log2(nodes)

    def updated(self, gpu: Gpu, how: str, nbytes: float) -> float:
        """Seconds of an optimizer's step: foreach (torch's default on GPUs), fused, or for."""
        return max(nbytes / (self.optimizer[how] * gpu.bandwidth), self.kernel)


def rate(gpu: Gpu, dtype: str) -> float:
    """R: float32's for a dtype that the cluster's file does not have."""
    return gpu.flops.get(dtype, gpu.flops["float32"])


@functools.cache
def load_kernels(name: str) -> Kernels:
    """Read ``clusters/kernels/<name>.yaml`` or a file of one's own.

    Raises ValueError with the field that is missing or wrong, or that has no source or kind.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"kernels/{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in (FOLDER / "kernels").glob("*.yaml")))
        raise ValueError(f"no kernels {name!r}. There are: {known}")
    try:
        return _kernels({"name": path.stem, **yaml.load(path.read_text("utf-8"), LOADER)})
    except (yaml.YAMLError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not a description of kernels: {error}") from None


def _kernels(data: dict[str, Any]) -> Kernels:
    """Build them; every group of constants must say its source and its kind."""
    if "like" in data:  # another GPU's constants, some of them replaced
        like = load_kernels(data.pop("like"))
        data = {k: getattr(like, k) for k in like.__dataclass_fields__} | data
    else:
        table, columns = data["convolution"], data.pop("convolution_columns")
        data["convolution"] = tuple(
            Convolution(**dict(zip(columns, row, strict=True))) for row in table
        )
        data["product"] = {k: Product(**v) for k, v in data["product"].items()}
        data["attention"] = {
            way: {int(w): Attention(**form) for w, form in forms.items()}
            for way, forms in data["attention"].items()
        }
    kernels = Kernels(**data)
    for name in kernels.__dataclass_fields__:
        if name in ("name", "sources", "kinds"):
            continue
        if name in ("phases", "cached") and not getattr(kernels, name):
            continue
        if kernels.sources.get(name) is None or kernels.kinds.get(name) not in KINDS:
            raise ValueError(f"sources or kinds says nothing about {name}")
    if (fitted := len(fitted_numbers(kernels))) > MOST_FITTED:
        raise ValueError(f"{fitted} constants are fitted, at most {MOST_FITTED} may be")
    return kernels


def fitted_numbers(kernels: Kernels) -> list[float]:
    """The constants that published runs were needed for."""
    found: list[float] = []
    for name in (name for name, kind in kernels.kinds.items() if kind == "fitted"):
        value = getattr(kernels, name)
        found += value.values() if isinstance(value, dict) else [value]
    return found
