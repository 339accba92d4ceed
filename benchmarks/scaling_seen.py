"""The sentences of ``docs/scaling.md`` about each model, and about exercise 3.21's choices."""

from __future__ import annotations

from collections.abc import Iterator

from .scaling_choice import SIMULATED, Cells
from .scaling_words import A100, H100, Facts, Paragraph, Said, share, told

OWN = ("DDP, own ring", "DDP, own tree", "DDP, own halving-doubling", "DDP, own hierarchical")
RING, TREE, HALVING, HIERARCHICAL = OWN
PLAIN, DDP, ZERO1, ZERO2 = "all-reduce, nothing hidden", "DDP in buckets", "ZeRO-1", "ZeRO-2"
FSDP, HYBRID, LOCAL = "FSDP with prefetch", "hybrid FSDP", "local SGD, 8 steps"
SERVER, SERVERS, FREE = (
    "parameter server, 1",
    "parameter servers, 1 in 4",
    "asynchronous, servers 1 in 4",
)
CANDIDATES = tuple(SIMULATED.values())
PARAMETERS = 6_658_596_864  # of GPT-7B


def _gpt_1b(f: Facts) -> Iterator[Paragraph]:
    waits = f.step(PLAIN, 16) / f.step(DDP, 16) - 1
    part = f.updating(DDP, 16) / f.step(DDP, 16)
    rest = (f.step(DDP, 16) - f.updating(DDP, 16)) / (f.step(FSDP, 16) - f.updating(FSDP, 16)) - 1
    fused = f.ahead("FSDP, fused AdamW", "DDP, fused AdamW", 16)
    yield (
        Said("There are 2.6 GB of gradients."),
        Said(
            "DDP in buckets hides nearly all of their communication, up to 256 GPUs.",
            max(f.waits(DDP, g) for g in (2, 8, 16, 64, 256)) < 0.015,
        ),
        Said(f"If a step on 16 GPUs waits for it instead, it takes {share(waits)} longer."),
        Said(
            "FSDP is fastest from 2 GPUs on, *and* needs least memory.",
            all(
                f.fastest(CANDIDATES, g) == FSDP == f.smallest(CANDIDATES, g)
                for g in (2, 8, 16, 64, 256)
            ),
        ),
        Said(
            f"With 16 GPUs it is {share(f.ahead(FSDP, DDP, 16))} ahead of DDP, because the ranks share "
            "the work of AdamW.",
            rest < 0.3 * f.ahead(FSDP, DDP, 16),
        ),
        Said(f"That work is {share(part)} of DDP's step."),
        Said(f"Without the optimizer's time FSDP is {share(rest, 1)} ahead."),
        Said(f"With a fused AdamW in both it is {share(fused)} ahead."),
    )
    yield from _gpt_1b_others(f)


def _gpt_1b_others(f: Facts) -> Iterator[Paragraph]:
    large, small = f.step("ZeRO-1, 250 MiB", 64), f.step(ZERO1, 64)
    yield (
        Said(
            "Inside a node ZeRO-1 and ZeRO-2 are ahead of DDP by the same shorter update.",
            all(f.step(zero, g) < f.step(DDP, g) for zero in (ZERO1, ZERO2) for g in (2, 8)),
        ),
        Said(
            "But they gather the new parameters when no compute is left that could hide it.",
            f.waits(ZERO1, 8) > 4 * f.waits(FSDP, 8),
        ),
        Said(
            "With 64 GPUs they are behind DDP.",
            min(f.step(ZERO1, 64), f.step(ZERO2, 64)) > f.step(DDP, 64)
            and f.step(ZERO1, 16) < f.step(DDP, 16),
        ),
        Said(
            "Their buckets have 25 MiB, and each bucket pays the latency of a ring of all GPUs.",
            large < f.step(DDP, 64) < small,
        ),
        Said(
            f"With buckets of 250 MiB a ZeRO-1 step on 64 GPUs takes {large:.0f} instead of "
            f"{small:.0f} ms, and DDP's step takes {f.step('DDP, 250 MiB', 64):.0f} ms."
        ),
        Said(
            f"With 256 GPUs hybrid FSDP is {share(f.ahead(FSDP, HYBRID, 256))} behind FSDP.",
            f.ahead(FSDP, HYBRID, 256) > 0.01,
        ),
        Said(
            "Local SGD saves nothing that DDP does not hide already: with 16 GPUs it is "
            f"{share(f.ahead(LOCAL, DDP, 16))} ahead.",
            0 < f.ahead(LOCAL, DDP, 16) < 0.03,
        ),
    )
    yield (
        Said(
            "Of the all-reduces that are written from messages, only the hierarchical one stays "
            "close to the backend's between nodes.",
            f.step(HIERARCHICAL, 16) < 1.1 * f.step(PLAIN, 16)
            and all(f.step(own, 16) > 1.1 * f.step(PLAIN, 16) for own in OWN[:3]),
        ),
        Said("A ring in the order of the ranks leaves a node through one of its eight cards."),
        Said(
            "A parameter server's memory includes the memory that it uses on the host, and one "
            f"server for 15 workers needs {f.gigabytes(SERVER, 16):.0f} GB.",
        ),
        Said(
            f"The workers wait for {share(f.waits(SERVER, 16))} of a step there, and for "
            f"{share(f.waits(SERVERS, 16))} with four servers.",
        ),
        Said(
            f"Without rounds they wait for {share(f.waits(FREE, 16))}.",
            f.waits(FREE, 16) < f.waits(SERVERS, 16),
        ),
    )


def _gpt_7b(f: Facts) -> Iterator[Paragraph]:
    yield (
        Said(
            "With one sequence per GPU there is little compute that could hide messages, and "
            "memory decides."
        ),
        Said(
            f"DDP takes {f.gigabytes(DDP, 16):.0f} of 80 GB, but only because everything is "
            "bfloat16 here, AdamW's moments too: 8 bytes per parameter."
        ),
        Said("Exercise 3.17 says why one does not train like that."),
        Said("Float32 weights and moments beside 16-bit copies take 16 bytes per parameter."),
        Said(f"That is {16 * PARAMETERS / 1e9:.0f} GB, and DDP does not fit."),
        Said(
            "Phase 1's trainer joins the gradients and takes all of the 80 GB.",
            79 < f.gigabytes(PLAIN, 16) <= 80,
        ),
        Said(
            f"FSDP takes {f.gigabytes(FSDP, 16):.0f} GB on 16 GPUs and "
            f"{f.gigabytes(FSDP, 64):.0f} GB on 64 GPUs."
        ),
    )
    ahead = [f.step(DDP, g) / f.step(FSDP, g) for g in (2, 8, 16, 64)]
    fused = f.step("DDP, fused AdamW", 16) / f.step("FSDP, fused AdamW", 16)
    yield (
        Said(
            f"From 2 to 64 GPUs FSDP is {min(ahead):.1f} to {max(ahead):.1f} times as fast as DDP."
        ),
        Said(
            "Most of that is the optimizer.",
            f.updating(DDP, 16) > 0.5 * (f.step(DDP, 16) - f.step(FSDP, 16)),
        ),
        Said(
            f"On 16 GPUs AdamW takes {f.updating(DDP, 16):.0f} ms of DDP's step of "
            f"{f.step(DDP, 16):.0f} ms, and {f.updating(FSDP, 16):.0f} ms of FSDP's step."
        ),
        Said(
            f"A fused AdamW takes {f.updating('DDP, fused AdamW', 16):.0f} and "
            f"{f.updating('FSDP, fused AdamW', 16):.0f} ms."
        ),
        Said(
            f"Then FSDP is {fused:.1f} times as fast instead of "
            f"{f.step(DDP, 16) / f.step(FSDP, 16):.1f} times."
        ),
    )
    yield from _gpt_7b_others(f)


def _gpt_7b_others(f: Facts) -> Iterator[Paragraph]:
    behind = f.ahead(FSDP, HYBRID, 16)
    yield (
        Said(
            f"Hybrid FSDP is behind full FSDP, by {share(behind)} on 16 GPUs.",
            all(f.step(HYBRID, g) > f.step(FSDP, g) for g in (16, 64, 256)),
        ),
        Said(
            "The eight cards of a node carry a ring through all GPUs as fast as NVLink carries a "
            "ring inside the node."
        ),
        Said("So hybrid FSDP saves no time there."),
        Said(
            "It also loses some, because transfers inside a node and between nodes wait for each "
            "other at a GPU's port."
        ),
        Said("In this model a port does one transfer at a time, while a real GPU may overlap them."),
    )


def _resnet50(f: Facts) -> Iterator[Paragraph]:
    yield (Said("Everything fits, and 102 MB of gradients are little."),)


TEXTS = {"resnet50": _resnet50, "gpt-1b": _gpt_1b, "gpt-7b": _gpt_7b}


def seen(model: str, cells: Cells) -> str:
    """What a model's tables show."""
    return told(TEXTS[model](Facts(cells)))


def after(every: dict[str, Cells]) -> str:
    """What the choices of exercise 3.21 show."""
    return ""
