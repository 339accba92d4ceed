"""The player of buckets and overlap: the solution's DDP on virtual ranks that have GPUs."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it, and can't inside a dispatch mode
import torch.nn.functional as F
from torch import nn

from distlab.hardware.clusters import Cluster, load_cluster
from distlab.picture import Span, covered, spans_of
from distlab.player.scene import Choice, Scene, document
from distlab.player.timeline import Bar, Moment, Row, Timeline, scene_of_timeline
from distlab.player.words import amount, duration
from distlab.ranks.context import RankContext
from distlab.virtual.run import run_virtual

from .collectives import module_of

WIDE, LAYERS, SAMPLES = 1024, 6, 1536
RANKS = (2, 4, 8)
BUCKETS = {"9 MB": 9_000_000, "4.2 MB": 4_200_000, "all in one": 10**9}
LINKS = {"NVLink in a node": True, "network cards": False}
LEGEND = [
    ("forward", "forward"),
    ("backward", "backward"),
    ("optimizer", "optimizer"),
    ("collective", "all-reduce of a bucket, with its number"),
]


def body(ctx: RankContext, bucket_bytes: int) -> list[float]:
    """Two steps, of which the second is shown: then buckets know the order of gradients."""
    with torch.device("meta"):
        layers = [nn.Linear(WIDE, WIDE) for _ in range(LAYERS)]
    model = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())])
    ddp = module_of(3, "overlap").BucketedDDP(
        model, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs = torch.empty(SAMPLES, WIDE, device="meta")
    targets = torch.empty(SAMPLES, dtype=torch.int64, device="meta")
    begin = 0.0
    for _ in ctx.steps(2):
        begin = time.monotonic()
        optimizer.zero_grad()
        F.cross_entropy(ddp(inputs), targets).backward()
        optimizer.step()
    return [begin, time.monotonic()]


def cluster_of(inside: bool, ranks: int) -> Cluster:
    """Eight V100 in a node, or one in each."""
    cluster = load_cluster("ethernet-v100")
    return cluster if inside else dataclasses.replace(cluster, gpus_per_node=1)


def recorded(ranks: int, bucket_bytes: int, inside: bool) -> Scene:
    """The scene of one run: its first rank, and the last, which does the same."""
    cluster = cluster_of(inside, ranks)
    results = run_virtual(body, ranks, bucket_bytes, cluster=cluster, compute="roofline")
    (begin, end), spans = results[0], spans_of(results.logs)
    rows = []
    for rank in (0, ranks - 1):
        mine = [s for s in spans if s.rank == rank and s.start >= begin - 1e-12]
        compute = [_bar(s) for s in mine if s.name in ("forward", "backward", "optimizer")]
        moving: list[Bar] = []
        for k, span in enumerate(s for s in mine if s.name == "all_reduce"):
            free = moving[-1].end if moving else 0.0  # one after the other on the link
            moving.append(Bar(max(span.start, free), span.end, "collective", str(k)))
        rows.append(Row(f"rank {rank}", [compute, moving]))
    first = [s for s in spans if s.rank == 0 and s.start >= begin - 1e-12]
    texts = [("time", "time"), ("exposed", "only waiting")]
    made = Timeline(rows, _moments(first, begin, end), begin, end, texts=texts, legend=LEGEND)
    scene = scene_of_timeline(made)
    log = results.logs[0]
    busy = sum(b - a for _, a, b in log.spans if a >= begin - 1e-12)
    scene.ended = {"time": duration(end - begin), "exposed": duration(end - begin - busy)}
    return scene


def _bar(span: Span) -> Bar:
    return Bar(span.start, span.end, span.name, span.name)


def _moments(spans: list[Span], begin: float, end: float) -> list[Moment]:
    """A step for each bucket that leaves or arrives, and for each phase that begins."""
    buckets = [s for s in spans if s.name == "all_reduce"]
    compute = [s for s in spans if s.lane == "compute"]
    backward = [s for s in compute if s.name == "backward"]
    last = max(s.end for s in backward)
    found = [(begin, "Start of a training step: forward comes first.")]
    found.append((backward[0].start, "Forward is done: backward begins with the last layer."))
    for k, s in enumerate(buckets):
        beside = "backward goes on" if s.start < last - 1e-9 else "backward is done"
        busy = "leaves after those before it" if k and buckets[k - 1].end > s.start else "leaves"
        size = amount(s.nbytes)
        found.append((s.start, f"Bucket {k} is complete and {busy} ({size} to send); {beside}."))
        found.append((s.end, f"Bucket {k} has arrived: it holds the mean of the ranks."))
    found.append((last, "Backward is done. What has not arrived is waited for."))
    ends = [s for s in compute if s.name == "optimizer"]
    found.append((ends[0].start, "All buckets are there: the optimizer steps."))
    found.append((end, "The step is done. Only waiting: the time in which nothing was computed."))
    moments = []
    for moment, say in sorted(found, key=lambda each: each[0]):
        until = [s for s in compute if s.start < moment]
        until = [dataclasses.replace(s, end=min(s.end, moment)) for s in until]
        exposed = max(0.0, moment - begin - covered(until))
        texts = {"time": duration(moment - begin), "exposed": duration(exposed)}
        moments.append(Moment(moment, say, texts))
    return moments


def player() -> dict[str, Any]:
    """With ranks, size of buckets and links to choose."""
    scenes: dict[tuple[str, ...], Scene] = {
        (str(ranks), bucket, links): recorded(ranks, size, LINKS[links])
        for ranks in RANKS
        for bucket, size in BUCKETS.items()
        for links in LINKS
    }
    choices = [
        Choice("ranks", tuple(map(str, RANKS))),
        Choice("bucket", tuple(BUCKETS)),
        Choice("links", tuple(LINKS)),
    ]
    return document(
        "Buckets and overlap",
        "Gradients leave in buckets while backward still computes. Choose one bucket for all "
        "to see what overlap saves. The other ranks do the same as these two.",
        choices,
        scenes,
        ("4", "4.2 MB", "network cards"),
    )
