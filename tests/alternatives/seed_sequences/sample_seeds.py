# for: 4.16
"""Written differently: numbers come from numpy's seed sequences, one for each library."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from given.safe_format import Tree


class SampleSeeds(Dataset[Any]):
    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed, self.epoch = (dataset, seed, 0)

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        mixed = np.random.SeedSequence([self.seed, self.epoch, int(index)])
        for_torch, for_numpy, for_random = mixed.spawn(3)
        before = random_state()
        try:
            torch.default_generator.manual_seed(int(for_torch.generate_state(1)[0]))
            np.random.seed(for_numpy.generate_state(8))
            random.seed(for_random.generate_state(8).tobytes())
            sample = self.dataset[index]
        finally:
            set_random_state(before)
        return sample


def random_state(device: torch.device | None = None) -> Tree:
    numpys = np.random.get_state(legacy=False)
    version, words, kept = random.getstate()
    state: Tree = {
        "torch": torch.default_generator.get_state().clone(),
        "numpy": torch.tensor(numpys["state"]["key"].tolist(), dtype=torch.int64),
        "numpy_rest": (
            str(numpys["bit_generator"]),
            int(numpys["state"]["pos"]),
            int(numpys["has_gauss"]),
            float(numpys["gauss"]),
        ),
        "random": torch.tensor(words, dtype=torch.int64),
        "random_rest": (version, kept),
    }
    if device is not None and device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device).clone()
    return state


def set_random_state(state: Tree, device: torch.device | None = None) -> None:
    version, kept = state["random_rest"]
    random.setstate((version, tuple(state["random"].tolist()), kept))
    name, position, has_gauss, gauss = state["numpy_rest"]
    key = np.array(state["numpy"].tolist(), dtype=np.uint32)
    np.random.set_state((name, key, position, has_gauss, gauss))
    torch.default_generator.set_state(state["torch"].detach().cpu().clone())
    if device is not None and device.type == "cuda" and ("device" in state):
        torch.cuda.set_rng_state(state["device"].cpu(), device)
