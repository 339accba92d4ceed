"""Checkpoints that survive: whatever is killed at whatever moment, a whole one can be loaded.

A checkpoint of W ranks is a folder. Rank 0 writes what all ranks share, every rank what is its own:

    000007-step-00001200/
        shared.safetensors      rank-00000.safetensors … rank-(W-1).safetensors
        manifest.json           step, world size, score, metadata; size and SHA-256 of every file
        COMPLETE                SHA-256 of the manifest; written last

Nothing is ever written to a place that a reader looks at. The folder is filled under another name,
everything in it is flushed to the disk, then it is renamed, and the marker comes last. Each of
these orders is forced by an fsync: without it the disk is free to keep the rename and to lose the
data. So a kill or a power cut leaves either no marker (the checkpoint before this one counts) or
all of it; what rots later is found by its hash.

Cost of saving P bytes of shared and Q bytes of own state per rank: P + W·Q bytes written and hashed
once, W + 4 files flushed, three all-gathers of some hundred bytes. Loading: every file is hashed by
one rank, read by those who want it. All ranks must see the same folder (a shared file system).
Format: safetensors (``safe_format``) and JSON; loading runs no code, unlike pickle.

Invariants: a function returns on all ranks, or raises the same error on all ranks; when ``save``
returns, the checkpoint is on the disk and every rank can read it; one path is written by one rank.

Sources: Pillai et al. 2014, "All File Systems Are Not Created Equal" (OSDI), section 2; Mohan et
al. 2021, "CheckFreq" (FAST), section 4.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn import functional

from given.agreement import Group
from given.safe_format import (
    Tree,
    flush_folder,
    hash_of_file,
    read_tree,
    write_bytes,
    write_trees,
)

T = TypeVar("T")

SHARED, MANIFEST, MARKER = "shared.safetensors", "manifest.json", "COMPLETE"
ASIDE = ".partial"  # the suffix of what is being written, or deleted
UNFINISHED = f"not finished, there is no {MARKER}"
NAME = re.compile(r"(\d{6})-step-(\d{8})")  # how often was saved before, and the step


class CheckpointError(RuntimeError):
    """A save or a load failed, on whichever rank: one line, raised on all of them."""


def own_file(rank: int) -> str:
    """The name of the file with a rank's own state."""
    return f"rank-{rank:05d}.safetensors"


def gather(value: Any, group: Group = None) -> list[Any]:
    """The JSON values of all ranks, by rank; a single process without process group gets its own.

    Two all-gathers of bytes: of the lengths, and of the texts, filled up to the longest. Also a
    barrier: nobody returns before everybody has come.
    """
    if not dist.is_initialized():
        return [value]
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
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
    """A checkpoint that was found intact. ``skipped``: newer ones that were not, and why."""

    step: int
    shared: Tree
    metadata: dict[str, Any]
    world_size: int
    folder: Path
    device: torch.device | str
    skipped: tuple[str, ...]

    def own(self, rank: int) -> Tree:
        """What ``rank`` of the saving run saved as its own; read now, so ask before you save."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank}: the checkpoint is of {self.world_size} ranks")
        return read_tree(self.folder / own_file(rank), self.device)


class CheckpointStore:
    """The checkpoints of one run, in ``folder``, which is made if it isn't there.

    The last ``keep`` saved are kept, and the ``keep_best`` with the highest score. *Newest* means
    saved last: who goes back to step 100 and saves step 110 has step 110 as the newest. All ranks
    of ``group`` call ``save`` and ``load``; without a process group a single process does.
    Raises ValueError if ``keep`` < 1 or ``keep_best`` < 0.
    """

    def __init__(
        self, folder: str | Path, *, keep: int = 3, keep_best: int = 1, group: Group = None
    ) -> None:
        if keep < 1 or keep_best < 0:
            raise ValueError(f"keep must be 1 or more, keep_best 0 or more: {keep}, {keep_best}")
        self.folder = Path(folder)
        self.keep, self.keep_best, self.group = keep, keep_best, group

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
        """Write ``shared`` of rank 0 and ``own`` of every rank; the folder, when all is on disk.

        ``step``, ``score`` (higher is better) and ``metadata`` (JSON) are rank 0's. Raises
        CheckpointError on all ranks if anything fails on any (disk full, a value that can't be
        saved …): then the earlier checkpoints are as they were, and this one's files are gone.
        Raises ValueError for a step below 0 or of more than 8 digits.
        """
        if not 0 <= step < 10**8:
            raise ValueError(f"a step has 1 to 8 digits, got {step}")
        # --- exercise 4.1: start
        # Step 1: rank 0 makes the folder before anybody writes into it
        # Step 2: every rank writes its files, and all learn whether all could
        # Step 3: rank 0 finishes; nobody returns earlier. Only then may older ones be deleted
        rank = self.rank
        name = self._agree(lambda: self._begin(step) if rank == 0 else None)[0]
        aside, folder = self.folder / (name + ASIDE), self.folder / name

        def write() -> dict[str, Any]:
            trees = {own_file(rank): own or {}} | ({SHARED: shared} if rank == 0 else {})
            return write_trees(aside, trees)

        try:
            written = self._agree(write)
            files = {file: entry for rank in written for file, entry in rank.items()}
            manifest = {"step": step, "world_size": len(written), "score": score, "files": files}
            manifest["metadata"] = metadata or {}
            self._agree(lambda: self._finish(aside, folder, manifest) if rank == 0 else None)
        except CheckpointError:
            if rank == 0:
                shutil.rmtree(aside, ignore_errors=True)
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self._agree(lambda: self._prune() if rank == 0 else None)
        return folder
        # --- exercise 4.1: end

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are complete, ascending, as this rank sees them.

        Marker, manifest and the files' sizes are looked at; their contents by ``load`` only.
        """
        # --- exercise 4.1: start
        # Step 4: those in which `_problem` finds nothing
        good = [name for name in self._names() if self._problem(name, share=None) is None]
        return sorted({self._manifest(name)["step"] for name in good})
        # --- exercise 4.1: end

    def load(
        self, step: int | None = None, *, map_location: torch.device | str = "cpu"
    ) -> Saved | None:
        """The newest checkpoint that is intact (of ``step``, if given), the same on all ranks.

        ``shared`` comes with its tensors on ``map_location``, wherever they were when saved. A
        checkpoint that was not finished, or in which a size or hash is wrong, is passed over and
        named in ``skipped``. None if none was ever finished. Raises CheckpointError if there are
        finished ones and all are damaged, or if the folder can't be read; ValueError if there is
        none of ``step``.
        """
        # --- exercise 4.1: start
        # Step 5: rank 0 says which ones there are: others might see a newer one meanwhile
        # Step 6: from the newest on: each rank hashes its share of the files, all hear the result
        names = self._agree(lambda: self._names() if self.rank == 0 else None)[0]
        if step is not None:
            names = [name for name in names if int(name[-8:]) == step]
        rank, skipped = self.rank, []
        for name in reversed(names):
            verdicts = self._agree(lambda name=name: self._problem(name, share=rank))
            problems = [problem for problem in verdicts if problem]
            if not problems:
                return self._read(name, map_location, tuple(skipped))
            skipped.append(f"{name}: {problems[0]}")
        if step is not None:
            raise ValueError(f"no intact checkpoint of step {step}: {skipped or 'never saved'}")
        if any(UNFINISHED not in text for text in skipped):
            raise CheckpointError(f"{self.folder} has damaged checkpoints only: {skipped}")
        return None
        # --- exercise 4.1: end

    def _read(self, name: str, device: torch.device | str, skipped: tuple[str, ...]) -> Saved:
        """The checkpoint ``name``, on all ranks or on none."""
        # --- exercise 4.1: start
        # Step 7: a rank that has no memory left for it, or can't see it, must not go alone
        folder, manifest = self.folder / name, self._manifest(name)
        trees: list[Tree] = []
        self._agree(lambda: trees.append(read_tree(folder / SHARED, device)))
        step, metadata, world_size = (manifest[k] for k in ("step", "metadata", "world_size"))
        return Saved(step, trees[0], metadata, world_size, folder, device, skipped)
        # --- exercise 4.1: end

    def _agree(self, action: Callable[[], T]) -> list[T]:
        """What ``action`` (it gives JSON values) gave on every rank, after it ended on all.

        If it raised on any rank: CheckpointError on all, with one line that names rank and reason.
        """
        # --- exercise 4.1: start
        # Step 8: a rank that failed must come to the all-gather, or the others wait for ever
        result, problem = None, None
        try:
            result = action()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        everyone = gather([result, problem], self.group)
        failed = [f"rank {r}: {p}" for r, (_, p) in enumerate(everyone) if p is not None]
        if failed:
            raise CheckpointError(f"{self.folder}: {'; '.join(failed)}")
        return [value for value, _ in everyone]
        # --- exercise 4.1: end

    def _names(self) -> list[str]:
        """The folders that have a checkpoint's final name, oldest first.

        OSError if the folder is there and can't be read: that is not the same as an empty one.
        """
        try:
            return sorted(filter(NAME.fullmatch, os.listdir(self.folder)))
        except FileNotFoundError:
            return []

    def _manifest(self, name: str) -> dict[str, Any]:
        """The manifest, if the marker vouches for it; else ValueError or OSError."""
        # --- exercise 4.1: start
        # Step 9: the marker holds the manifest's hash
        folder = self.folder / name
        if not (folder / MARKER).is_file():
            raise ValueError(UNFINISHED)
        text = (folder / MANIFEST).read_bytes()
        if (folder / MARKER).read_bytes() != hashlib.sha256(text).hexdigest().encode():
            raise ValueError(f"{MARKER} and {MANIFEST} don't belong together")
        return json.loads(text)
        # --- exercise 4.1: end

    def _problem(self, name: str, share: int | None) -> str | None:
        """Why the checkpoint can't be used, or None. Every file's size is looked at; this rank
        hashes the files number ``share``, ``share`` + W, … of the list (None: no file)."""
        # --- exercise 4.1: start
        # Step 10: marker, manifest, sizes, hashes: the cheap ones first
        try:
            files = sorted(self._manifest(name)["files"].items())
            for file, entry in files:
                size = (self.folder / name / file).stat().st_size
                if size != entry["bytes"]:
                    return f"{file} has {size:,} bytes, not {entry['bytes']:,}"
            world_size = dist.get_world_size(self.group) if dist.is_initialized() else 1
            for file, entry in files[share::world_size] if share is not None else ():
                if hash_of_file(self.folder / name / file) != entry["sha256"]:
                    return f"{file} is not what was written: its hash differs"
        except (OSError, ValueError, KeyError) as error:
            return str(error)
        return None
        # --- exercise 4.1: end

    def _begin(self, step: int) -> str:
        """Rank 0: clear away what killed saves have left, make a new folder aside; its final name.

        Folders with other names are not touched.
        """
        # --- exercise 4.1: start
        # Step 11: unfinished is what is still aside, and what has no marker
        # Step 12: a name that was never used: an old checkpoint of the same step stays till the end
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            flush_folder(self.folder.parent)
        for path in self.folder.iterdir():
            if NAME.fullmatch(path.name.removesuffix(ASIDE)) and (
                path.name.endswith(ASIDE) or not (path / MARKER).is_file()
            ):
                shutil.rmtree(path)
        number = 1 + max((int(name[:6]) for name in self._names()), default=0)
        name = f"{number:06d}-step-{step:08d}"
        (self.folder / (name + ASIDE)).mkdir()
        return name
        # --- exercise 4.1: end

    def _finish(self, aside: Path, folder: Path, manifest: dict[str, Any]) -> None:
        """Rank 0: the manifest, the final name and the marker, each on the disk before the next."""
        # --- exercise 4.1: start
        # Step 13: the names of the files count, too: a folder is flushed like a file
        # Step 14: the marker appears whole: written under another name, flushed, renamed
        text = json.dumps(manifest, indent=1).encode()
        write_bytes(aside / MANIFEST, text)
        flush_folder(aside)
        os.rename(aside, folder)
        flush_folder(self.folder)
        marker = folder / (MARKER + ASIDE)
        write_bytes(marker, hashlib.sha256(text).hexdigest().encode())
        os.rename(marker, folder / MARKER)
        flush_folder(folder)
        # --- exercise 4.1: end

    def _prune(self) -> None:
        """Rank 0: delete all but the last ``keep`` and the ``keep_best`` with the highest score."""
        # --- exercise 4.1: start
        # Step 15: of equal scores the newer one; NaN is no score
        # Step 16: rename first: what is half deleted must not look like a checkpoint
        names = self._names()
        scored = [name for name in reversed(names) if self._score(name) > -math.inf]
        best = sorted(scored, key=self._score, reverse=True)[: self.keep_best]
        for name in names[: -self.keep]:
            if name not in best:
                os.rename(self.folder / name, self.folder / (name + ASIDE))
                shutil.rmtree(self.folder / (name + ASIDE))
        # --- exercise 4.1: end

    def _score(self, name: str) -> float:
        """The checkpoint's score; minus infinity if it has none that can be compared."""
        try:
            score = self._manifest(name)["score"]
        except (OSError, ValueError):
            return -math.inf
        return -math.inf if score is None or math.isnan(score) else score
