"""``make demo`` is the first thing that a newcomer runs: its comparison holds on any processor."""

from __future__ import annotations

from pathlib import Path

import torch

from distlab.commands import demo
from distlab.host.terminal import console


def test_the_demo_equals_one_process_and_sees_what_does_not(tmp_path: Path) -> None:
    file = tmp_path / "trained.pt"
    demo.train(file)
    assert demo.compare(file, console())
    saved = torch.load(file, weights_only=True)
    saved["losses"][-1] += 2e-4
    torch.save(saved, file)
    assert not demo.compare(file, console())
