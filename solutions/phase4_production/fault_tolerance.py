"""Checkpoints of all ranks: each writes its part, and all agree on every save and every load.

Rank 0 writes the shared state, and every rank its own, into a folder that one process can't leave
half done (``checkpoint_folder``, exercise 4.1). The rest is agreement:

    save     make the folder ─ agree ─ write ─ agree ─ finish ─ agree ─ delete old ─ agree
    load     names from rank 0 ─ agree ─ every rank hashes its share ─ agree ─ read ─ agree

To agree is an all-gather of one value per rank (``values_of_all``). A rank that fails still comes
to it, so no rank waits for ever. All ranks raise its error.

Cost of saving P bytes of shared and Q bytes of own state per rank: P + W·Q bytes are written and
hashed once, and there are all-gathers of some hundred bytes. Loading: one rank hashes each file,
and the ranks that need a file read it. All ranks must see the same folder (a shared file system).

Invariants: a function returns on all ranks, or raises the same error on all ranks. When ``save``
returns, the checkpoint is on the disk and every rank can read it. One rank writes one path.

Source: Mohan et al. 2021, "CheckFreq" (FAST), section 4.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn import functional

from given.agreement import Group, device_in
from given.safe_format import (
    Tree,
    read_tree,
    write_trees,
)

from .checkpoint_folder import ASIDE, UNFINISHED, CheckpointFolder

T = TypeVar("T")

SHARED = "shared.safetensors"


class CheckpointError(RuntimeError):
    """A save or a load failed on one rank or more. It is raised on all ranks."""


def own_file(rank: int) -> str:
    """The name of the file with a rank's own state."""
    return f"rank-{rank:05d}.safetensors"


def values_of_all(value: Any, group: Group = None) -> list[Any]:
    """The JSON values of all ranks, by rank. A single process without process group gets its own.

    Two all-gathers of bytes: of the lengths, and of the texts, filled up to the longest. It is a
    barrier, too: no rank returns before all have come.
    """
    if not dist.is_initialized():
        return [value]
    device = device_in(group)
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    length = torch.tensor([text.numel()], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    longest = int(max(lengths))
    padded = functional.pad(text, (0, longest - text.numel()))
    texts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(texts, padded, group=group)
    return [json.loads(bytes(t[: int(n)].tolist())) for t, n in zip(texts, lengths, strict=True)]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was found intact. ``skipped``: newer ones that were not intact, and why."""

    step: int
    shared: Tree
    metadata: dict[str, Any]
    world_size: int
    folder: Path
    device: torch.device | str
    skipped: tuple[str, ...]

    def own(self, rank: int) -> Tree:
        """The own state of ``rank`` of the saving run. It is read now, so ask before you save."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"no rank {rank} in this checkpoint: it has {self.world_size} ranks")
        return read_tree(self.folder / own_file(rank), self.device)


def discard(aside: Path, folder: Path) -> None:
    """Delete the leftovers of a failed save in ``aside`` or, already renamed, in ``folder``."""
    if folder.exists():  # perhaps with its marker: it must not count while it is half deleted
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


class CheckpointStore:
    """The checkpoints of one run, in ``folder``, which is made if it isn't there.

    The last ``keep`` saved are kept, and the ``keep_best`` with the highest score. *Newest* means
    saved last: after a run went back to step 100 and saved step 110, step 110 is the newest. All
    ranks of ``group``, and no others, call ``save`` and ``load``. Without a process group a single
    process does. Ranks are counted in the group. Raises ValueError if ``keep`` < 1 or ``keep_best``
    < 0.
    """

    def __init__(
        self, folder: str | Path, *, keep: int = 3, keep_best: int = 1, group: Group = None
    ) -> None:
        if keep < 1 or keep_best < 0:
            raise ValueError(f"keep must be 1 or more, keep_best 0 or more: {keep}, {keep_best}")
        self.folder = Path(folder)
        self.keep, self.keep_best, self.group = keep, keep_best, group
        self.files = CheckpointFolder(self.folder)

    @property
    def rank(self) -> int:
        """This rank in the store's group."""
        return dist.get_rank(self.group) if dist.is_initialized() else 0

    def save(
        self,
        step: int,
        shared: Tree,
        own: Tree | None = None,
        *,
        score: float | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Path:
        """Write ``shared`` of rank 0 and ``own`` of every rank. Returns the folder when all is on
        disk.

        The same folder comes back on all ranks, and every rank can load it at once. ``step``,
        ``score`` (higher is better), ``metadata`` (JSON; None: {}) and ``shared`` are rank 0's.
        Those of other ranks are ignored. No ``own`` counts as {}. The saved objects are not
        changed.

        Raises CheckpointError on all ranks if anything fails on any rank (disk full, a value that
        can't be saved …). Then the earlier checkpoints are as they were, and this one's files are
        gone. But if only the deletion of old ones fails, the new one stays. The store can be used
        again after an error. Raises ValueError on a rank whose step is below 0 or has more than 8
        digits, before anything is sent.

        Cost: one rank opens each file for writing, once. Names and hashes travel, at most 64 KiB
        per rank, and no tensors. Files are safetensors, JSON or ASCII text. No file is left open,
        and no thread is left running.
        """
        if not 0 <= step < 10**8:
            raise ValueError(f"a step has 1 to 8 digits, got {step}")
        # --- exercise 4.15: start
        # Step 1: rank 0 makes the folder before any rank writes into it
        # Step 2: every rank writes its files, and all learn whether all ranks could
        # Step 3: rank 0 finishes; no rank returns earlier. Only then may older ones be deleted. A
        #         failed save is cleared away before any rank raises
        rank = self.rank
        name = self._agree(lambda: self.files.begin(step) if rank == 0 else "")[0]
        aside, folder = self.folder / (name + ASIDE), self.folder / name
        trees = {own_file(rank): own or {}} | ({SHARED: shared} if rank == 0 else {})
        try:
            written = self._agree(partial(write_trees, aside, trees))
            files = {file: entry for rank in written for file, entry in rank.items()}
            manifest = {"step": step, "world_size": len(written), "score": score, "files": files}
            manifest["metadata"] = metadata or {}
            self._agree(lambda: self.files.finish(name, manifest) if rank == 0 else None)
        except CheckpointError:
            self._agree(lambda: discard(aside, folder) if rank == 0 else None)
            raise
        self._agree(lambda: self.files.prune(self.keep, self.keep_best) if rank == 0 else None)
        return folder
        # --- exercise 4.15: end

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are complete, ascending, as this rank sees them.

        It looks at marker, manifest and the files' sizes. Only ``load`` looks at their contents.
        """
        return self.files.steps()

    def load(
        self, step: int | None = None, *, map_location: torch.device | str = "cpu"
    ) -> Saved | None:
        """The newest checkpoint that is intact (of ``step``, if given), the same on all ranks.

        ``shared`` comes with its tensors on ``map_location``, wherever they were when saved. Tied
        tensors are one tensor again. All ranks give the same ``step``. A checkpoint that was not
        finished, or in which a size or hash is wrong, is passed over. ``skipped`` has one text for
        it: the name of its folder, and why. All ranks pass over a checkpoint that is damaged for
        one rank. Returns None if none was ever finished. Each file is hashed by one rank, and by no
        other. Only names and hashes travel, at most 64 KiB per rank.

        It raises on all ranks or on none. It raises ValueError if there is no intact checkpoint of
        ``step``. Without a ``step`` it raises CheckpointError if there are finished ones and all
        are damaged. It raises CheckpointError if a rank can't read the folder, or can't load a
        checkpoint that all found intact.
        """
        # --- exercise 4.15: start
        # Step 4: rank 0 says which checkpoints there are: other ranks might see a newer one
        #         meanwhile
        # Step 5: from the newest on: each rank hashes its share of the files, all hear the result
        names = self._agree(lambda: self.files.names() if self.rank == 0 else [])[0]
        if step is not None:
            names = [name for name in names if int(name[-8:]) == step]
        skipped: list[str] = []
        share = self.rank, dist.get_world_size(self.group) if dist.is_initialized() else 1
        for name in reversed(names):
            verdicts = self._agree(partial(self.files.problem, name, *share))
            problems = [problem for problem in verdicts if problem]
            if not problems:
                return self._read(name, map_location, tuple(skipped))
            skipped.append(f"{name}: {problems[0]}")
        if step is not None:
            raise ValueError(f"no intact checkpoint of step {step}: {skipped or 'never saved'}")
        if any(UNFINISHED not in text for text in skipped):
            raise CheckpointError(f"{self.folder} has damaged checkpoints only: {skipped}")
        return None
        # --- exercise 4.15: end

    def _read(self, name: str, device: torch.device | str, skipped: tuple[str, ...]) -> Saved:
        """The checkpoint ``name``, with its tensors on ``device``, on all ranks.

        Raises CheckpointError on all ranks if any rank can't read it.
        """
        # --- exercise 4.15: start
        # Step 6: a rank that lacks the memory for it, or can't see it, must not raise alone
        folder, found = self.folder / name, []

        def read() -> None:
            found.extend([self.files.manifest(name), read_tree(folder / SHARED, device)])

        self._agree(read)
        manifest, shared = found
        step, metadata, world_size = (manifest[k] for k in ("step", "metadata", "world_size"))
        return Saved(step, shared, metadata, world_size, folder, device, skipped)
        # --- exercise 4.15: end

    def _agree(self, action: Callable[[], T]) -> list[T]:
        """The results of ``action`` (JSON values) on all ranks, after it ended on all.

        If it raised on any rank, all raise CheckpointError.
        """
        # --- exercise 4.15: start
        # Step 7: a rank that failed must come to the all-gather, or the others wait for ever. A
        #         long text of an error is shortened, because it travels, too
        result, problem = None, None
        try:
            result = action()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"[:1000]
        everyone = values_of_all([result, problem], self.group)
        failed = [f"rank {r}: {p}" for r, (_, p) in enumerate(everyone) if p is not None]
        if failed:
            raise CheckpointError(f"{self.folder}: {'; '.join(failed)}")
        return [value for value, _ in everyone]
        # --- exercise 4.15: end
