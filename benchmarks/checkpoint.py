"""Checkpoints of phase 4 against ``torch.distributed.checkpoint`` (DCP): 2 ranks, 256 MiB.

Half of the state is shared (rank 0 writes it), half is the ranks' own. Both store the same tensors
on the same disk and flush them; the solution hashes them, too, DCP does not. *Stall* is how long
the call holds training up, *total* until the checkpoint is complete. Taken in turn in the same
ranks, in a folder of its own each time, which is deleted in between.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.ranks import RankContext, run_ranks
from solutions.phase4_production.async_checkpoint import AsyncCheckpointer
from solutions.phase4_production.fault_tolerance import CheckpointStore

from .common import turns
from .pairs import Case, Paired, Start

MIB = 1 << 20
SHARED, OWN, TENSORS = 128 * MIB, 64 * MIB, 16  # bytes; each in so many tensors
KINDS = ("save", "async_save")
Times = tuple[float, float]  # stall, total


def state_of(rank: int, nbytes: int) -> dict[str, Tensor]:
    """Tensors with this many bytes."""
    draw = torch.Generator().manual_seed(rank)
    return {f"w{i}": torch.randn(nbytes // 4 // TENSORS, generator=draw) for i in range(TENSORS)}


class Solution:
    """Exercises 4.1, 4.15 and 4.3."""

    def __init__(self, rank: int, shared: dict[str, Tensor], own: dict[str, Tensor]) -> None:
        self.shared, self.own = shared, own
        self.checkpointer = AsyncCheckpointer(CheckpointStore("."))

    def save(self, folder: Path) -> Times:
        """Synchronously."""
        begun = time.perf_counter()
        CheckpointStore(folder).save(1, self.shared, self.own)
        return (time.perf_counter() - begun,) * 2

    def async_save(self, folder: Path) -> Times:
        """With a writer."""
        self.checkpointer.store = CheckpointStore(folder, group=self.checkpointer.group)
        begun = time.perf_counter()
        stall = self.checkpointer.save(1, self.shared, self.own)
        self.checkpointer.wait()
        return stall, time.perf_counter() - begun

    def close(self) -> None:
        """End the writer."""
        self.checkpointer.close()


class DCP:
    """PyTorch's own, as it is by default (staging that keeps its memory needs a GPU's driver)."""

    def __init__(self, rank: int, shared: dict[str, Tensor], own: dict[str, Tensor]) -> None:
        self.state = {"shared": shared, f"own{rank}": own}
        self.group = dist.new_group(backend="gloo")

    def save(self, folder: Path) -> Times:
        """Synchronously."""
        from torch.distributed import checkpoint

        begun = time.perf_counter()
        checkpoint.save(self.state, checkpoint_id=folder)
        return (time.perf_counter() - begun,) * 2

    def async_save(self, folder: Path) -> Times:
        """With a thread."""
        from torch.distributed import checkpoint

        begun = time.perf_counter()
        future = checkpoint.async_save(self.state, checkpoint_id=folder, process_group=self.group)
        stall = time.perf_counter() - begun
        future.result()
        return stall, time.perf_counter() - begun

    def close(self) -> None:
        """Give the group back."""
        dist.destroy_process_group(self.group)


CONTESTANTS: dict[str, type[Solution | DCP]] = {"solution": Solution, "DCP": DCP}


def compare(kind: str, repeats: int, scale: int = 1, number: int = 0) -> dict[str, list[Times]]:
    """(stall, total) in seconds of the slower rank; the state is ``scale`` times smaller."""
    with tempfile.TemporaryDirectory(prefix="distlab-") as name:

        def body(ctx: RankContext) -> dict[str, list[Times]]:
            logging.disable()
            warnings.simplefilter("ignore")
            shared, own = state_of(9, SHARED // scale), state_of(ctx.rank, OWN // scale)
            found: dict[str, list[Times]] = {n: [] for n in CONTESTANTS}
            runs = {n: make(ctx.rank, shared, own) for n, make in CONTESTANTS.items()}
            order = [*runs, *turns(runs, repeats, number)]  # each warms up once
            for at, contestant in enumerate(order):
                folder = Path(name) / f"{contestant}-{at}"
                dist.barrier()
                times = torch.tensor(getattr(runs[contestant], kind)(folder))
                dist.all_reduce(times, dist.ReduceOp.MAX)
                if at >= len(runs):
                    found[contestant].append(tuple(times.tolist()))
                dist.barrier()
                if ctx.rank == 0:
                    shutil.rmtree(folder)
            for run in runs.values():
                run.close()
            return found

        return run_ranks(body, 2, timeout=300, ledger=False)[0]


def start(kind: str, column: int, rounds: int, number: int) -> Start:
    """One start of the ranks."""
    found = compare(kind, rounds, number=number)
    return Start({name: [1e3 * times[column] for times in taken] for name, taken in found.items()})


CASES = {("save", "stall = total"): 1, ("async_save", "stall"): 0, ("async_save", "total"): 1}
PAIRED = Paired(
    title=f"Checkpoints: {(SHARED + 2 * OWN) // MIB} MiB of state, 2 ranks",
    labels=("", ""),
    unit="ms",
    pairs=[("solution", "DCP")],
    cases=lambda: [
        Case(labels, partial(start, labels[0], column)) for labels, column in CASES.items()
    ],
    rounds=2,
    note="Exercises 4.1, 4.15 and 4.3 against `torch.distributed.checkpoint` (DCP). Both flush to "
    "the disk. The solution also hashes everything (SHA-256) while it writes and flushes. "
    "Its rank 0 writes and hashes 192 MiB, because rank 0 writes the state that all ranks "
    "share. DCP lets each rank write 128 MiB.",
)
