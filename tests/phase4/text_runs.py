"""Runs of the trainer on a little text."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

from solutions.phase4_production.config_sources import make_config
from solutions.phase4_production.trainer_config import Config

LENGTH = 16
STEPS = 5  # of one epoch of 36 sequences: four batches of 8 and one of 4
SIZES = {"train": (200, 1, 390), "val": (150,)}  # bytes of the files


def few_texts(folder: Path) -> Path:
    """Three files of 594 bytes with their ends, of which one has a single byte; and one of 151."""
    text = topics["assert"].encode() * 2
    for split, sizes in SIZES.items():
        (folder / split).mkdir(parents=True)
        for number, size in enumerate(sizes):
            (folder / split / f"{number}.txt").write_bytes(text[number : number + size])
    return folder


def config_of(data: Path, out: Path, *arguments: str) -> Config:
    """One epoch of small batches of a small GPT, every step recorded."""
    fields = {
        **{"data": data, "checkpoints": out / "checkpoints", "logs": out / "logs"},
        **{"model": "gpt", "length": LENGTH, "layers": 2, "width": 16, "heads": 4},
        **{"epochs": 1, "global-batch": 8, "optimizer": "adamw", "base-lr": 0.01, "base-batch": 8},
        **{"warmup-epochs": 0, "label-smoothing": 0, "max-norm": 1, "device": "cpu"},
        **{"workers": 0, "save-every": 0, "log-every": 1},
    }
    return make_config(None, [*(f"--{n}={v}" for n, v in fields.items()), *arguments])
