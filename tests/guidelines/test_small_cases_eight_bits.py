"""The answers to phase 2's small case of 8-bit numbers, and the numbers of its picture."""

from __future__ import annotations

import json

import torch

from benchmarks import low_precision_loss as bench
from scripts.diagrams.registry import ROOT
from solutions.phase2_advanced.low_precision import E4M3, quantise_blocks, restore
from tests.guidelines.folded import says, sections

ROW = torch.tensor([3, 0.02, 1000, 0.1])


def test_2_29() -> None:
    for block, scale in ((4, 0.25), (2, 128)):
        short = quantise_blocks(ROW, block, E4M3)
        found = restore(short).tolist()
        assert 1 / short.inverse_scale[0] == scale
        says(2, "2.29", f"the scale {'is ' if block == 4 else ''}{scale:g}")
        says(2, "2.29", f"0.02 becomes {found[1]:.8g}")
        if block == 4:
            data = short.data[2].item()
            says(2, "2.29", f"250 becomes {data:g}, and 1000 becomes {found[2]:g}")
            says(2, "2.29", f"{0.02 * scale * 2**9:.2f} steps of 2^-9 and becomes 3 of them")
            assert short.data[1].item() * 2**9 == 3
        else:
            says(2, "2.29", f"{0.02 * scale:.2f} becomes {short.data[1].item():g}")


def test_numbers_of_the_picture() -> None:
    """Measured numbers in the text are those of the file, and all seeds are within 1 %."""
    found = json.loads(bench.FILE.read_text(encoding="utf-8"))
    text = " ".join(sections(2)["2.29"].split())
    ends = {kind: [curve[-1] for curve in curves] for kind, curves in found["kinds"].items()}
    assert f"is {sum(ends['bfloat16']) / 3:.3f} with bfloat16" in text
    for kind, words in (("delayed", "delayed scaling"), ("blocks", "block scaling")):
        more = 100 * (sum(ends[kind]) / sum(ends["bfloat16"]) - 1)
        assert f"{more:.1f} % larger with {words}" in text
        pairs = zip(ends[kind], ends["bfloat16"], strict=True)
        assert all(abs(got / want - 1) < 0.01 for got, want in pairs)
    assert f"ends at {sum(ends['unscaled']) / 3:.1f}" in text
    assert (ROOT / "docs" / "diagrams" / "2.29-2.svg").is_file()


def test_a_short_training_has_the_same_kind_of_numbers() -> None:
    """Five steps: two losses for each seed of each kind, from the same weights."""
    found = bench.measure(steps=5)
    for each in zip(*found["kinds"].values(), strict=True):
        assert all(len(curve) == 2 for curve in each)
        assert max(curve[0] for curve in each) < 1.05 * min(curve[0] for curve in each)
