"""The table of ``distlab calibrate``: what was measured, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from ..hardware.clusters import Cluster
from ..hardware.kernels import Kernels


def summary(cluster: Cluster, kernels: Kernels) -> Table:
    """A row for each measured kind of number."""
    table = Table(box=None, title=cluster.gpu.name, title_justify="left", header_style="dim")
    table.add_column("measured")
    table.add_column("value", justify="right")
    for what, value in (*_compute(cluster, kernels), *_links(cluster)):
        table.add_row(what, value)
    return table


def _compute(cluster: Cluster, kernels: Kernels) -> Iterator[tuple[str, str]]:
    for dtype, rate in cluster.gpu.flops.items():
        yield f"fastest matrix product, {dtype}", f"{rate / 1e9:,.1f} GFLOP/s"
    yield "long sum in place", f"{cluster.gpu.bandwidth / 1e9:,.1f} GB/s"
    if kernels.cached:
        size, faster = max(kernels.cached.items(), key=lambda each: each[1])
        speed = f"{faster * cluster.gpu.bandwidth / 1e9:,.1f} GB/s"
        yield f"the same in caches, {size / 1e3:,.0f} kB", speed
    yield "convolutions", f"{len(kernels.convolution)} kernels"
    for way, forms in kernels.attention.items():
        share = max(form.share for form in forms.values())
        yield f"long attention, {way}, of the fastest product", f"{share:.0%}"
    yield "the host's time for an operator", _micro(kernels.host)
    for phase, seconds in kernels.phases.items():
        yield f"the same in {phase}", _micro(seconds)
    if cluster.alone:
        yield "a collective of one rank, beside its issue", _micro(cluster.alone)


def _links(cluster: Cluster) -> Iterator[tuple[str, str]]:
    if cluster.gpus_per_node == 1:
        return
    ranks = cluster.gpus_per_node
    yield f"a rank's compute with {ranks} at once, times", f"{cluster.company:.2f}"
    yield "α of a message", _micro(cluster.inside.alpha)
    yield "bandwidth of a long message", f"{cluster.inside.bandwidth / 1e9:,.2f} GB/s"
    yield "to issue a message", _micro(cluster.overhead)
    yield "to issue a collective", _micro(cluster.collective_overhead)
    for curve in cluster.curves:
        if curve.op == "send":
            continue
        least, most = min(curve.bandwidth), max(curve.bandwidth)
        yield f"{curve.op}, {curve.ranks} ranks, {least:,} B", _micro(curve.seconds(least))
        speed = f"{curve.bandwidth[most] / 1e9:,.2f} GB/s"
        yield f"{curve.op}, {curve.ranks} ranks, {most:,} B, bus bandwidth", speed


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} µs"
