"""The answer to the small case of batch norms over ranks, and the numbers of its cost."""

from __future__ import annotations

import torch
from torch import nn
from torchvision.models import resnet50

from distlab.ranks import RankContext
from distlab.virtual import run_virtual
from solutions.phase2_advanced.sync_batch_norm import SyncBatchNorm, group_moments
from tests.guidelines.folded import says, sections

VALUES = ([1.0, 3.0], [], [8.0])


def test_2_28() -> None:
    def body(ctx: RankContext) -> list[float]:
        x = torch.tensor(VALUES[ctx.rank]).view(-1, 1)
        layer = SyncBatchNorm(1)
        layer(x)
        found = *group_moments(x), layer.running_mean, layer.running_var
        return [float(each) for each in found]

    results = run_virtual(body, 3, learner_files=(__file__,))
    mean, var, n, running_mean, running_var = results[0]
    assert all(result == results[0] for result in results)
    flat = [x for own in VALUES for x in own]
    squares = sum(x * x for x in flat)
    says(2, "2.28", f"n = {n:g}, Σx = {sum(flat):g} and Σx² = {squares:g}")
    says(2, "2.28", f"mean is {mean:g}", f"{squares:g}/{n:g} - 16 = {var:.2f}")
    says(2, "2.28", f"running mean becomes {running_mean:g}", f"0.1·13 = {running_var:.1f}")
    means = [sum(own) / len(own) for own in VALUES if own]
    says(2, "2.28", f"(2 + 8)/2 = {sum(means) / 2:g}")


def test_numbers_of_resnet_50() -> None:
    with torch.device("meta"):
        model = resnet50()
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    channels = sum(norm.num_features for norm in norms)
    sent = sum(8 * (2 * norm.num_features + 1) + 8 * norm.num_features for norm in norms)
    gradients = 4 * sum(p.numel() for p in model.parameters())
    text = " ".join(sections(2)["2.28"].split())
    for words in (
        f"ResNet-50 has {len(norms)} batch norms with {channels:,} channels",
        f"{2 * len(norms)} small all-reduces in each step, {sent / 1e3:.0f} kB together",
        f"DDP sends {gradients / 1e6:.0f} MB",
    ):
        assert words in text, words
