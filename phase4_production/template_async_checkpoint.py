# Exercises 4.3: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase4.py 4.3
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Asynchronous checkpoints: training goes on while the snapshot of a moment is written.

A synchronous save of P bytes stops training until it ends, an asynchronous one only for a copy:

    synchronous      max(P/hash, P/disk)    hashing runs beside writing: both some 1 GB/s
    asynchronous     P/copy                 some 20 GB/s in the host, 25 to 50 GB/s by PCIe

                 step 1   step 2  │snapshot│  step 3   step 4   step 5   step 6  │snapshot│
    writer                                 └── hash ─ write ─ flush ─ marker ──┘          └── …

The copy makes the file right. The optimizer changes the weights in place, and a writer that reads
them later finds some of step 2 and some of step 5. The snapshot's memory is kept and used again,
because allocating it takes longer than filling it. Copies from a GPU go to pinned pages.

The writer is a thread. It talks to the other ranks' writers in a process group of its own, because
messages of two threads in one group get mixed up. At most one save is under way, and the next one
waits for it. So there is memory for one snapshot, and checkpoints appear in order.

Cost: a copy of P + Q bytes in memory, and the time to make it. Invariant: the file holds all
tensors as they were at the moment of the call. An error of the writer is raised at the next call,
on all ranks.

Sources: Mohan et al. 2021, "CheckFreq" (FAST), section 4.2 (snapshot and persist); Maurya et al.
2024, "DataStates-LLM" (HPDC, arXiv 2406.10707), section 3.
"""

from __future__ import annotations

import copy
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from given.safe_format import Tree

from .template_fault_tolerance import CheckpointStore


class Snapshot:
    """Copies of trees on the CPU, in memory that is used again by the next copy."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}  # copies of the last call, by the original's path

    def take(self, tree: Tree) -> Tree:
        """``tree`` with all tensors copied. Tied weights, which are one tensor, are one copy.

        Dicts, lists and tuples are new, too; other values are taken as they are. On return nothing
        depends on the originals any more, and they have not changed. Copies are on the CPU, of the
        same dtype and shape, without autograd history. Memory of the last call is used again where
        a tensor at the same path has the same shape and dtype. So one copy is valid at a time.
        Memory that this call does not need is given back.
        """
        # Step 1: copy each piece of memory once; keep this call's copies, and nothing else
        # Step 2: copies from a GPU run on their own: start all, then wait once
        raise NotImplementedError("exercise 4.3")

    def _copied(
        self, value: Any, path: str, fresh: dict[str, Tensor], copies: dict[Any, Tensor]
    ) -> Any:
        """A copy of ``value``, which lies at ``path``; its tensors go to ``fresh`` and ``copies``.

        ``fresh``: copies by path; ``copies``: by the memory of the original, its device last.
        """
        # Step 3: walk through the tree (a function within `take` that calls itself would keep the
        #         copies alive until the garbage collector comes)
        raise NotImplementedError("exercise 4.3")

    def _room(self, path: str, value: Tensor) -> Tensor:
        """A tensor on the CPU to copy ``value`` to, the last call's if it fits."""
        # Step 4: a GPU can copy to pinned memory by itself
        raise NotImplementedError("exercise 4.3")


class AsyncCheckpointer:
    """``store.save`` beside training: ``save`` returns when the snapshot is taken.

    All ranks of the store's group make, use and close it together, and no others do. While it is
    open, save by it only. ``stalls`` has, for each ``save`` that returned, the seconds for which it
    held training up. As a context manager it is closed at the end, also after an exception, and an
    error of the writer is raised there.
    """

    def __init__(self, store: CheckpointStore) -> None:
        """Make the writers' own process group (gloo), with the ranks of the store's.

        ``store`` itself keeps its group. Without a process group a single process makes none.
        """
        # Step 5: the same store, over a group of its own; only members take part in making it
        raise NotImplementedError("exercise 4.3")

    def save(
        self,
        step: int,
        shared: Tree,
        own: Tree | None = None,
        *,
        score: float | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> float:
        """As ``CheckpointStore.save``, but written later; the seconds that this call took.

        All of it is written as it is at the call, tensors and the rest. It first waits for the save
        before, if that is still under way, and raises its error, if it had one. Then nothing new
        was begun. Otherwise it does not wait for the disk. Ranks other than 0 copy only their
        ``own``, which they write. A rank that can't copy raises nothing here. The save then fails
        as if its disk were full, on all ranks at their next call.
        """
        # Step 6: one save at a time; the error of the last one is raised here
        # Step 7: copy now, write later: the writer must see nothing but the copy
        # Step 8: a rank that can't copy must not leave the other writers waiting: it lets its own
        #         writer fail, with a value that can't be saved
        raise NotImplementedError("exercise 4.3")

    def _write(
        self, step: int, shared: Tree, own: Tree, metadata: Tree, score: float | None
    ) -> None:
        """The writer's life: one save. Its error is kept for the next call."""
        # Step 9: an exception in a thread is printed and forgotten, unless the program keeps it
        raise NotImplementedError("exercise 4.3")

    def wait(self) -> Path | None:
        """Wait until nothing is under way; the folder of the last save that succeeded, or None.

        Raises the writer's error, once; the next save begins anew.
        """
        # Step 10: join, then raise the error that was kept
        raise NotImplementedError("exercise 4.3")

    def close(self) -> None:
        """Wait for the save under way, and give the process group back, also after an error.

        Raises as ``wait`` does. No thread is left. Closing once more does nothing.
        """
        # Step 11: the group goes in any case
        raise NotImplementedError("exercise 4.3")

    def __enter__(self) -> AsyncCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()
