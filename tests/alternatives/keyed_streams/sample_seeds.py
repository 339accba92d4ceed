# for: 4.16
"""Written differently: sample numbers come from a hash, and torch's stream is forked."""

from __future__ import annotations

import contextlib
import hashlib
import random

import numpy as np
import torch
from torch.utils.data import Dataset


class SampleSeeds(Dataset):
    def __init__(self, dataset, seed: int) -> None:
        self.dataset, self.key, self.epoch = dataset, seed, 0

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int):
        text = repr((self.key, self.epoch, index)).encode()
        digest = hashlib.blake2b(text, digest_size=24).digest()
        with self.streams(digest):
            return self.dataset[index]

    @contextlib.contextmanager
    def streams(self, digest: bytes):
        kept_random, kept_numpy = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(int.from_bytes(digest[:7], "big"))
            np.random.seed(np.frombuffer(digest, dtype=np.uint32))
            random.seed(digest)
            try:
                yield
            finally:
                random.setstate(kept_random)
                np.random.set_state(kept_numpy)


def random_state(device=None):
    kind, words, place, has_normal, normal = np.random.get_state()
    return {
        "cpu": torch.random.get_rng_state(),
        "gpu": torch.cuda.get_rng_state(device) if device and device.type == "cuda" else None,
        "words": words.tolist(),
        "rest": [kind, place, has_normal, normal],
        "python": list(random.getstate()),
    }


def set_random_state(state, device=None):
    version, numbers, normal = state["python"]
    random.setstate((version, tuple(numbers), normal))
    kind, place, has_normal, cached = state["rest"]
    np.random.set_state((kind, np.array(state["words"], np.uint32), place, has_normal, cached))
    torch.random.set_rng_state(state["cpu"])
    if state["gpu"] is not None:
        torch.cuda.set_rng_state(state["gpu"], device)
