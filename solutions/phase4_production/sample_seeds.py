"""Random numbers that survive a restart: streams that go on, and numbers that follow from a key.

*Streams.* torch, numpy and random each have a generator. Its state says which number comes next.
The state is saved, and the resumed run puts it back.

*Keys.* Random numbers of loader workers are the hard case. A worker reads ahead, and after a resume
batch k comes to another worker. So the state of a worker's generators is of no use. ``SampleSeeds``
draws a sample's numbers from (seed, epoch, index) instead. Any worker that loads the sample gets
the same augmentation, with any number of workers, ranks and restarts.

Cost: three generators are seeded per sample, about 0.1 ms; no communication. Invariant: after
``set_random_state`` every stream gives the numbers that it gave after ``random_state``.

Sources: PyTorch's notes on reproducibility; Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3" (SC11): random numbers as a function of a key.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from given.safe_format import Tree


class SampleSeeds(Dataset[Any]):
    """``dataset``, each sample with random numbers of its own, drawn from (seed, epoch, index).

    torch (its CPU generator), numpy and random are seeded before ``dataset[index]``. After it they
    are as before, also if it raises. So loading leaves no trace in the training process's streams.
    The numbers follow from the three integers alone: every process draws the same, in any order.
    Two seeds, epochs or indices (0 … 2^32-1) have numbers independent of each other, and so have
    two libraries. A library gives two keys the same numbers with a chance of 1 in 2^32 at most.
    Call ``set_epoch`` before each epoch: workers learn of it as they start.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, 0

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose numbers are drawn."""
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        # --- exercise 4.16: start
        # Step 1: keep the streams, seed all three from a hash of the three numbers, put them back
        before = random_state()
        key = f"{self.seed} {self.epoch} {index}".encode()
        words = np.frombuffer(hashlib.blake2b(key, digest_size=32).digest(), dtype=np.uint32)
        torch.default_generator.manual_seed(int(words[0]))  # it knows 2^32 streams
        np.random.seed(words[1:])
        random.seed(words.tobytes())
        try:
            return self.dataset[index]
        finally:
            set_random_state(before)
        # --- exercise 4.16: end


def random_state(device: torch.device | None = None) -> Tree:
    """The states of the streams of torch, numpy and random, and of ``device`` if it is CUDA.

    A tree for ``write_trees``, of copies: it stays when numbers are drawn. Draws no number.
    """
    # --- exercise 4.16: start
    # Step 2: numpy's array of 32-bit words goes as a tensor; everything else is numbers
    name, words, *numbers = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": (name, torch.from_numpy(words.astype(np.int64)), *numbers),
        "random": random.getstate(),
    }
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state
    # --- exercise 4.16: end


def set_random_state(state: Tree, device: torch.device | None = None) -> None:
    """Put the streams back to ``state``, which ``random_state`` gave and which stays as it is.

    Its tensors may lie on any device. numpy and random also go on with the normal value that they
    keep back.
    """
    # --- exercise 4.16: start
    # Step 3: generators' states are bytes on the CPU, wherever the checkpoint was loaded to
    torch.set_rng_state(state["torch"].cpu())
    name, words, *numbers = state["numpy"]
    np.random.set_state((name, words.cpu().numpy().astype(np.uint32), *numbers))
    random.setstate(state["random"])
    if "cuda" in state and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    # --- exercise 4.16: end
