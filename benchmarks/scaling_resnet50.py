"""The sentences of ``docs/scaling.md`` about ResNet-50."""

from __future__ import annotations

from collections.abc import Iterator

from .scaling_words import (
    A100,
    DDP,
    FREE,
    FSDP,
    H100,
    HIERARCHICAL,
    HYBRID,
    LOCAL,
    OWN,
    PLAIN,
    SERVER,
    SERVERS,
    ZERO1,
    ZERO2,
    Facts,
    Paragraph,
    Said,
    share,
)


def resnet50(f: Facts) -> Iterator[Paragraph]:
    folded = (PLAIN, DDP, ZERO1, ZERO2, FSDP, HYBRID, LOCAL)
    lost = max(1 - f.per_gpu(name, 16) / f.per_gpu(name, 1) for name in folded)
    steps = [f.step(name, 1) for name in folded]
    yield (
        Said("Everything fits, and 102 MB of gradients are little.", f.gigabytes(DDP, 16) < 4),
        Said(
            f"With 16 GPUs no row from *{PLAIN}* to *{LOCAL}* loses more than {share(lost)} of its "
            "throughput per GPU.",
        ),
        Said(
            f"On one GPU the slowest of these rows takes {share(max(steps) / min(steps) - 1, 1)} "
            f"longer than the fastest one: SGD takes {f.updating(DDP, 1):.1f} ms of "
            f"{f.step(DDP, 1):.1f} ms, so a shorter update saves little."
        ),
        Said(
            "The convolutions take most of the step.",
            f.cell(DDP, 1)["parts"]["convolution"] * 1e3 > 0.6 * f.step(DDP, 1),
        ),
    )
    falls = f.step(FSDP, 256) / f.step(FSDP, 16) - 1
    yield (
        Said(f"With 256 GPUs FSDP takes {share(falls)} longer than with 16.", falls > 0.3),
        Said(
            "A gather or reduce-scatter goes round all GPUs step by step, and each of 17 small "
            "units pays that latency three times."
        ),
        Said(
            f"Hybrid FSDP goes round 8 GPUs, and takes {share(_more(f, HYBRID))} longer.",
            _more(f, HYBRID) < 0.1 * falls,
        ),
        Said(
            f"ZeRO-1 takes {share(_more(f, ZERO1))} longer, ZeRO-2 {share(_more(f, ZERO2))}, DDP "
            f"in buckets {share(_more(f, DDP))}, local SGD {share(_more(f, LOCAL))}, and *{PLAIN}* "
            f"{share(_more(f, PLAIN))}."
        ),
    )
    yield from _resnet50_others(f)


def _more(f: Facts, name: str) -> float:
    """By which share a step with 256 GPUs is longer than with 16."""
    return f.step(name, 256) / f.step(name, 16) - 1


def _resnet50_others(f: Facts) -> Iterator[Paragraph]:
    second = {c: f.step(PLAIN, 16, c) / f.step(PLAIN, 8, c) - 1 for c in (H100, A100)}
    yield (
        Said("On `p4d-a100` two GPUs share one card, and a card is four times slower."),
        Said(
            f"There the second node makes a step that waits for its all-reduce "
            f"{share(second[A100])} longer, and on `dgx-h100` {share(second[H100])} longer.",
            second[A100] > second[H100],
        ),
        Said(
            "Most of it can be hidden: with 16 GPUs DDP in buckets waits for "
            f"{share(f.waits(DDP, 16, A100))} of a step on `p4d-a100`.",
            f.waits(DDP, 16, A100) < 0.5 * f.waits(PLAIN, 16, A100),
        ),
    )
    slow = max(OWN, key=lambda name: f.step(name, 16, A100))
    yield (
        Said("Between nodes the all-reduces that are written from messages differ."),
        Said(
            "The hierarchical one sends 1/8 of the bytes over each network card, and wins with 16 "
            "GPUs on both clusters.",
            all(f.fastest(OWN, 16, cluster) == HIERARCHICAL for cluster in (H100, A100)),
        ),
        Said(
            f"*{slow}* is slowest on `p4d-a100`: its step takes "
            f"{share(f.ahead(HIERARCHICAL, slow, 16, A100))} longer, and on `dgx-h100` "
            f"{share(f.ahead(HIERARCHICAL, slow, 16))} longer."
        ),
    )
    yield from _servers(f)


def _servers(f: Facts) -> Iterator[Paragraph]:
    one, many = ([f.waits(name, 16, c) for c in (H100, A100)] for name in (SERVER, SERVERS))
    free = {
        g: [f.per_gpu(FREE, g, c) / f.per_gpu(SERVERS, g, c) - 1 for c in (H100, A100)]
        for g in (8, 16)
    }
    more = [f.cell(SERVER, 16, c)["rate"] / f.cell(SERVER, 8, c)["rate"] for c in (H100, A100)]
    yield (
        Said(
            f"With one parameter server 15 workers give {more[0]:.1f} times as many images as 7 on "
            f"`dgx-h100`, and {more[1]:.1f} times as many on `p4d-a100`, because all values pass "
            "its one port.",
            max(more) < 1.6,
        ),
        Said(
            f"On `dgx-h100` four servers move that limit: workers wait for {share(many[0])} of a "
            f"step instead of {share(one[0])}.",
            many[0] < 0.6 * one[0],
        ),
        Said(
            "On `p4d-a100` they hardly do, because the four share two cards: "
            f"{share(many[1])} instead of {share(one[1])}.",
            0.8 * one[1] < many[1] < one[1],
        ),
        Said("Without rounds no worker waits for the slowest one."),
        Said(
            f"With 8 GPUs that gives {share(free[8][0])} more images on `dgx-h100` and "
            f"{share(free[8][1])} more on `p4d-a100`.",
            min(free[8]) > 0,
        ),
        Said(
            f"With 16 GPUs it gives {share(-free[16][0])} fewer and {share(free[16][1])} more.",
            free[16][0] < 0 < free[16][1],
        ),
    )
