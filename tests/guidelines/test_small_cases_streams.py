"""The answer to phase 3's small case of Streaming DiLoCo, and the numbers of its training."""

from __future__ import annotations

import json

import torch
from torch import nn

from benchmarks import streaming_loss
from distlab.ranks import RankContext
from distlab.reference.workloads import build_model
from distlab.virtual import run_virtual
from scripts.diagrams.phase3_streams import told
from solutions.phase3_multi_node.streaming_diloco import (
    StreamingDiLoCo,
    pack_e3m0,
    unpack_e3m0,
)
from tests.guidelines.folded import says, sections


def test_3_34() -> None:
    def body(ctx: RankContext) -> list[float]:
        model = nn.ParameterList([nn.Parameter(torch.tensor([10.0]))])
        settings = {"every": 2, "delay": 1, "mix": 0.5, "lr": 1.0, "momentum": 0.0}
        rounds = StreamingDiLoCo(model, [list(model)], bits=4, **settings)
        for value in ((9.0, 9.0), (8.0, 7.0), (7.5, 6.0)):
            model[0].data.fill_(value[ctx.rank])
            rounds.step()
        return [rounds.common[0][0].item(), model[0].item()]

    first, second = (float(unpack_e3m0(pack_e3m0(torch.tensor([x])), 1)) for x in (2.0, 3.0))
    (theta, left), (_, right) = run_virtual(body, 2, learner_files=(__file__,))
    says(3, "3.34", f"{2:g} stays {first:g}, and 3 becomes {second:g}")
    says(3, "3.34", f"Δ = {10 - theta:g}, so θ = {theta:g}")
    says(3, "3.34", f"= {left:g} and", f"= {right:g}.")


def test_numbers_of_the_picture() -> None:
    """Measured numbers in the text are those of the file, and the file is of these settings."""
    found = json.loads(streaming_loss.FILE.read_text(encoding="utf-8"))
    settings = (found["steps"], found["every"], found["delay"], found["fragments"])
    now = streaming_loss
    assert settings == (now.STEPS, now.EVERY, now.DELAY, now.FRAGMENTS)
    text = " ".join(sections(3)["3.34"].split())
    ddp, seldom, full, short = (told(found, kind) for kind in streaming_loss.KINDS)
    assert f"sends {seldom.sent} kB per step instead of {ddp.sent} kB" in text
    assert seldom.rate == ddp.rate
    assert f"is DDP's: {ddp.rate} Mbit/s" in text
    assert f"needs {full.rate} Mbit/s with 32 bits, and {short.rate} Mbit/s with 4 bits" in text
    assert f"{short.loss} instead of {seldom.loss}. DDP has {ddp.loss}" in text
    took, *others = (found["step"] * 1000 + float(each.waited) for each in (seldom, ddp, short))
    steps, streamed = (int(found["steps"] * took / other) for other in others)
    assert f"120 steps of DiLoCo, DDP takes {steps} steps, and streaming takes {streamed}" in text


def test_a_short_training_sends_what_the_formula_says() -> None:
    """Three steps: the first fragment has had its turn."""
    found = streaming_loss.measure(steps=3, seeds=1)["kinds"]
    numbers = sum(p.numel() for p in build_model("tiny_gpt").parameters())
    ranks = streaming_loss.RANKS
    assert min(found["DDP"]["sent"]) >= 2 * (ranks - 1) / ranks * 4 * numbers
    assert found["DiLoCo"]["sent"] == [0, 0, 0]
    full, short = (found[f"streaming, {bits} bits"] for bits in (32, 4))
    assert full["sent"][:2] == short["sent"][:2] == [0, 0]
    each = full["sent"][2] * ranks // (2 * (ranks - 1)) // 4
    assert short["sent"][2] == (ranks - 1) * 17 * -(-each // 32)
    assert short["waited"] == 0 < found["DDP"]["waited"]
