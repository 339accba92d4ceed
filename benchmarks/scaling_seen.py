"""What ``docs/scaling.md`` says about each model, and about exercise 3.21's choices."""

from __future__ import annotations

from collections.abc import Iterator

from .scaling_choice import Cells
from .scaling_gpts import gpt_1b, gpt_7b
from .scaling_resnet50 import resnet50
from .scaling_words import (
    A100,
    CANDIDATES,
    DDP,
    FSDP,
    HYBRID,
    ZERO2,
    Facts,
    Paragraph,
    Said,
    share,
    told,
)

TEXTS = {"resnet50": resnet50, "gpt-1b": gpt_1b, "gpt-7b": gpt_7b}


def seen(model: str, cells: Cells) -> str:
    """What a model's tables show."""
    return told(TEXTS[model](Facts(cells)))


def after(every: dict[str, Cells]) -> str:
    """What the choices of exercise 3.21 show."""
    by = {model: Facts(cells) for model, cells in every.items()}
    begin = (
        Said(
            "If few strategies fit, 3.21 chooses the fastest one.",
            all(_only(by[m], b, g) == FSDP for m, b, g in SHORT),
        ),
        Said("If several fit, its choice is right about bytes, and bytes are not time:"),
    )
    slower = by["resnet50"].ahead(FSDP, HYBRID, 16, A100)
    end = (
        Said("So ask 3.21's table which strategies fit and how many bytes they send."),
        Said("Ask a simulation which one is fastest."),
        Said(
            "With little memory the two agree, and with the slow links of `p4d-a100` nearly: there "
            f"3.21 chooses hybrid FSDP on 16 GPUs, which takes {share(slower)} longer than FSDP.",
            0 < slower < 0.02,
        ),
        Said("Offload is not simulated."),
    )
    return "\n\n".join([told([begin]), told(_reasons(by), listed=True), told([end])])


SHORT = (("gpt-1b", 18e9, 16), ("gpt-1b", 18e9, 256), ("gpt-7b", 20e9, 8), ("gpt-7b", 20e9, 64))


def _only(f: Facts, budget: float, gpus: int) -> str:
    """The fastest candidate that fits a small memory."""
    return f.fastest([n for n in CANDIDATES if f.gigabytes(n, gpus) <= budget / 1e9], gpus)


def _reasons(by: dict[str, Facts]) -> Iterator[Paragraph]:
    small, large, images = by["gpt-1b"], by["gpt-7b"], by["resnet50"]
    yield (
        Said("*Hiding.* The estimate assumes that nothing is hidden."),
        Said(
            "FSDP sends half as many bytes again as DDP, but before they are needed.",
            max(f.waits(FSDP, 16) for f in (small, large)) < 0.05,
        ),
        Said("ZeRO-1 and ZeRO-2 gather the new parameters when no compute is left beside it."),
    )
    saved = large.updating(DDP, 16) - large.updating(FSDP, 16)
    fused = large.updating("DDP, fused AdamW", 16) - large.updating("FSDP, fused AdamW", 16)
    yield (
        Said("*The optimizer.* The estimate leaves it out, and sharding divides its time by W."),
        Said(
            f"For GPT-7B on 16 GPUs that saves {saved:.0f} ms, and {fused:.0f} ms with a "
            "fused AdamW."
        ),
    )
    yield (
        Said("*Latency.* The estimate leaves it out as well."),
        Said(
            "With 256 GPUs ZeRO-2 waits for communication during "
            f"{share(small.waits(ZERO2, 256))} of GPT-1B's step and "
            f"{share(large.waits(ZERO2, 256))} of GPT-7B's.",
            small.waits(ZERO2, 256) > 4 * small.waits(ZERO2, 16),
        ),
        Said(
            "For FSDP with ResNet-50 it is so long there that hybrid FSDP is faster.",
            images.step(HYBRID, 256) < images.step(FSDP, 256),
        ),
    )
