"""The sentences of ``docs/scaling.md`` about GPT-1B and GPT-7B."""

from __future__ import annotations

from collections.abc import Iterator

from .scaling_words import (
    CANDIDATES,
    DDP,
    FREE,
    FSDP,
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

PARAMETERS = 6_658_596_864  # of GPT-7B


def gpt_1b(f: Facts) -> Iterator[Paragraph]:
    waits = f.ahead(DDP, PLAIN, 16)
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
            f"With 16 GPUs it is {share(f.ahead(FSDP, DDP, 16))} ahead of DDP, because the ranks "
            "share the work of AdamW.",
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
    yield from _gpt_1b_messages(f)


def _longer(f: Facts) -> list[str]:
    """By which shares the own all-reduces make a step on 16 GPUs longer than the backend's does."""
    return [share(f.ahead(PLAIN, own, 16)) for own in OWN]


def _gpt_1b_messages(f: Facts) -> Iterator[Paragraph]:
    ring, tree, halving, best = _longer(f)
    yield (
        Said(
            "Of the all-reduces that are written from messages, only the hierarchical one stays "
            "close to the backend's between nodes.",
            f.step(HIERARCHICAL, 16) < 1.1 * f.step(PLAIN, 16)
            and all(f.step(own, 16) > 1.1 * f.step(PLAIN, 16) for own in OWN[:3]),
        ),
        Said(f"On 16 GPUs its step takes {best} longer than with the backend's all-reduce."),
        Said(f"Halving-doubling takes {halving} longer, a ring {ring}, and a tree {tree}."),
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


def gpt_7b(f: Facts) -> Iterator[Paragraph]:
    yield (
        Said(
            "Also with one sequence per GPU DDP in buckets hides its communication, and memory "
            "decides.",
            max(f.waits(DDP, g) for g in (2, 8, 16, 64, 256)) < 0.02,
        ),
        Said(
            f"DDP takes {f.gigabytes(DDP, 16):.1f} of 80 GB, but only because everything is "
            "bfloat16 here, AdamW's moments too: 8 bytes per parameter."
        ),
        Said("Exercise 3.17 says why one does not train like that."),
        Said("Float32 weights and moments beside 16-bit copies take 16 bytes per parameter."),
        Said(
            f"That is {16 * PARAMETERS / 1e9:.0f} GB, and DDP does not fit.", 16 * PARAMETERS > 80e9
        ),
        Said(
            "Phase 1's trainer joins the gradients and takes all of the 80 GB.",
            79 < f.gigabytes(PLAIN, 16) <= 80,
        ),
        Said(
            f"FSDP takes {f.gigabytes(FSDP, 16):.0f} GB on 16 GPUs and "
            f"{f.gigabytes(FSDP, 64):.0f} GB on 64 GPUs."
        ),
    )
    yield from _gpt_7b_optimizer(f)
    yield from _gpt_7b_others(f)


def _gpt_7b_optimizer(f: Facts) -> Iterator[Paragraph]:
    ahead = [f.step(DDP, g) / f.step(FSDP, g) for g in (2, 8, 16, 64, 256)]
    fused = f.step("DDP, fused AdamW", 16) / f.step("FSDP, fused AdamW", 16)
    yield (
        Said(
            f"From 2 to 256 GPUs FSDP is {min(ahead):.1f} to {max(ahead):.1f} times as fast as DDP."
        ),
        Said(
            "Most of that is the optimizer.",
            f.updating(DDP, 16) - f.updating(FSDP, 16) > 0.5 * (f.step(DDP, 16) - f.step(FSDP, 16)),
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
        Said(
            f"Local SGD is {share(f.ahead(LOCAL, DDP, 16))} ahead of DDP.",
            0 < f.ahead(LOCAL, DDP, 16) < 0.1,
        ),
    )


def _gpt_7b_others(f: Facts) -> Iterator[Paragraph]:
    yield (
        Said(
            f"Hybrid FSDP is behind full FSDP: its step takes {share(f.ahead(FSDP, HYBRID, 16))} "
            f"longer on 16 GPUs, and {share(f.ahead(FSDP, HYBRID, 256))} longer on 256 GPUs.",
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
        Said("In this model a port does one transfer at a time, and a real GPU may overlap them."),
        Said(
            "With 256 GPUs the latency of a ring through all GPUs makes FSDP's step "
            f"{share(f.step(FSDP, 256) / f.step(FSDP, 64) - 1)} longer than with 64.",
            f.waits(FSDP, 256) > 2 * f.waits(FSDP, 64),
        ),
        Said(
            f"It costs ZeRO-1 and ZeRO-2 far more: there they wait for "
            f"{share(f.waits(ZERO1, 256))} and {share(f.waits(ZERO2, 256))} of a step.",
            min(f.waits(ZERO1, 256), f.waits(ZERO2, 256)) > 4 * f.waits(FSDP, 256),
        ),
    )
    ring, tree, halving, best = _longer(f)
    yield (
        Said(
            "With an all-reduce that is written from messages, the step on 16 GPUs takes longer "
            f"than with the backend's: by {best} if it is hierarchical, by {halving} with "
            f"halving-doubling, by {ring} with a ring, and by {tree} with a tree.",
            f.fastest(OWN, 16) == HIERARCHICAL,
        ),
        Said(
            "One parameter server does not fit into a GPU from 8 GPUs on.",
            f.cell(SERVER, 2)["fits"] and not f.cell(SERVER, 8)["fits"],
        ),
        Said(
            f"With four servers for 12 workers the workers wait for {share(f.waits(SERVERS, 16))} "
            f"of a step, and without rounds for {share(f.waits(FREE, 16))}."
        ),
    )
