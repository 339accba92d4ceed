# Exercises 4.1: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase4.py 4.1
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Checkpoints that survive: after a kill at any moment a whole checkpoint can be loaded.

A checkpoint of W ranks is a folder:

    000007-step-00001200/
        shared.safetensors      rank-00000.safetensors … rank-(W-1).safetensors
        manifest.json           step, world size, score, metadata; size and SHA-256 of every file
        COMPLETE                SHA-256 of the manifest; written last

Nothing is ever written where a reader looks. The folder is filled under another name, everything in
it is flushed to the disk, then it is renamed, and the marker comes last. An fsync forces each of
these orders: without it the disk is free to keep the rename and to lose the data. So a kill or a
power failure leaves either no marker (the checkpoint before this one counts) or all of it. A hash
finds data that rots later.

This is the part of one process. ``fault_tolerance`` (exercise 4.15) lets all ranks do it together.
Format: safetensors (``safe_format``) and JSON. Unlike pickle, loading runs no code. No message.

Invariant: at every moment the newest folder with a marker is whole. There is one as soon as one
save was finished.

Source: Pillai et al. 2014, "All File Systems Are Not Created Equal" (OSDI), section 2.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

from given.safe_format import flush_folder, hash_of_file, write_bytes

MANIFEST, MARKER = "manifest.json", "COMPLETE"
ASIDE = ".partial"  # the suffix of a folder that is being written, or deleted
UNFINISHED = f"not finished, there is no {MARKER}"
NAME = re.compile(r"(\d{6})-step-(\d{8})")  # the number of saves before, and the step


class CheckpointFolder:
    """The checkpoints that lie in ``path``, as one process sees and changes them.

    *Newest* means saved last: after a run went back to step 100 and saved step 110, step 110 is the
    newest. One process at a time changes the folder. Any number of processes may look, and each
    call looks anew. No call sends a message, starts a thread or leaves a file open.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def names(self) -> list[str]:
        """The folders that have a checkpoint's final name, oldest first.

        Raises OSError if the folder is there and can't be read: that is not the same as an empty
        one.
        """
        try:
            return sorted(filter(NAME.fullmatch, os.listdir(self.path)))
        except FileNotFoundError:
            return []

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are complete, each once, ascending.

        It looks at marker, manifest and the files' sizes, not at their contents. A folder that
        isn't there has no steps. Raises OSError as ``names`` does.
        """
        # Step 1: those in which `problem` finds nothing
        raise NotImplementedError("exercise 4.1")

    def manifest(self, name: str) -> dict[str, Any]:
        """The manifest as it was given to ``finish``, if the marker vouches for it.

        Raises ValueError or OSError if the checkpoint has no marker, no manifest, or another
        manifest than the marker was written for.
        """
        # Step 2: the marker holds the manifest's hash
        raise NotImplementedError("exercise 4.1")

    def problem(self, name: str, share: int | None = None, shares: int = 1) -> str | None:
        """Why the checkpoint can't be used, as text of at least one letter; None if it can.

        It looks at marker, manifest and every file's size. Of the files, sorted by name and counted
        from 0, it hashes those number ``share``, ``share + shares``, … and no other (None: no
        file). A file that can't be read or found is a problem, and no exception. The text of a
        checkpoint without marker, and of no other, contains UNFINISHED.
        """
        # Step 3: marker, manifest, sizes, hashes: the cheap ones first
        raise NotImplementedError("exercise 4.1")

    def begin(self, step: int) -> str:
        """Make a new, empty folder aside, ``name + ASIDE``, that may be filled; returns ``name``.

        ``name`` has the form of NAME; its number is above those of all finished checkpoints. First
        clears away the leftovers of killed saves: folders with a checkpoint's name, with ASIDE or
        without a marker. Finished checkpoints stay as they are, also damaged ones and those of the
        same step. Everything with another name stays as well. Makes ``path`` if it isn't there,
        with the folders above it. They survive a power failure after ``finish``.
        """
        # Step 4: a folder that is made is a name in the one above it, which must be flushed
        # Step 5: a folder is unfinished if it is still aside, or if it has no marker
        # Step 6: a name that was never used: an old checkpoint of the same step stays till the end
        raise NotImplementedError("exercise 4.1")

    def finish(self, name: str, manifest: dict[str, Any]) -> None:
        """The manifest, the final name and the marker, each on the disk before the next.

        The folder aside has been filled, and its files are on the disk. ``manifest`` (JSON, where
        the score may be NaN or infinite) has step, score, ``files``, and any entries that the
        caller adds. ``files`` has by name the ``bytes`` and ``sha256`` of each. Before the call is
        over the checkpoint counts as a whole or not at all. Afterwards it counts. Both hold if the
        process is killed or power fails at any moment.
        """
        # Step 7: the names of the files count, too: a folder is flushed like a file
        # Step 8: the marker appears whole: written under another name, flushed, renamed
        raise NotImplementedError("exercise 4.1")

    def prune(self, keep: int, keep_best: int) -> None:
        """Delete all but the last ``keep`` ≥ 1 and, of all, the ``keep_best`` ≥ 0 best.

        Damaged checkpoints count like others. The best have the highest scores; of equal scores the
        newer is better. A checkpoint without a score (None, NaN, -infinity, or a manifest that
        can't be read) is never among the best. A folder that loses a file has lost its final name
        or its marker before, and after a kill the next ``begin`` clears it away.
        """
        # Step 9: of equal scores the newer one; NaN is no score
        # Step 10: rename first: a half-deleted folder must not look like a checkpoint
        raise NotImplementedError("exercise 4.1")

    def _score(self, name: str) -> float:
        """The checkpoint's score; minus infinity if it has none that can be compared."""
        try:
            score = self.manifest(name)["score"]
        except (OSError, ValueError):
            return -math.inf
        return -math.inf if score is None or math.isnan(score) else score
