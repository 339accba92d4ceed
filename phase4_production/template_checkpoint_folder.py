# Exercises 4.1: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase4.py 4.1
"""Checkpoints that survive: whatever is killed at whatever moment, a whole one can be loaded.

A checkpoint of W ranks is a folder:

    000007-step-00001200/
        shared.safetensors      rank-00000.safetensors … rank-(W-1).safetensors
        manifest.json           step, world size, score, metadata; size and SHA-256 of every file
        COMPLETE                SHA-256 of the manifest; written last

Nothing is ever written where a reader looks. The folder is filled under another name, everything in
it is flushed to the disk, then it is renamed, and the marker comes last. Each of these orders is
forced by an fsync: without it the disk is free to keep the rename and to lose the data. So a kill
or a power failure leaves either no marker (the checkpoint before this one counts) or all of it;
what rots later is found by its hash.

This is what one process does; ``fault_tolerance`` (exercise 4.15) lets all ranks do it together.
Format: safetensors (``safe_format``) and JSON; loading runs no code, unlike pickle. No message.

Invariant: at every moment the newest folder with a marker is whole, and there is one as soon as one
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
ASIDE = ".partial"  # the suffix of what is being written, or deleted
UNFINISHED = f"not finished, there is no {MARKER}"
NAME = re.compile(r"(\d{6})-step-(\d{8})")  # how often was saved before, and the step


class CheckpointFolder:
    """The checkpoints that lie in ``path``, as one process sees and changes them.

    *Newest* means saved last: who goes back to step 100 and saves step 110 has step 110 as the
    newest. One process at a time changes the folder; any number may look.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def names(self) -> list[str]:
        """The folders that have a checkpoint's final name, oldest first.

        OSError if the folder is there and can't be read: that is not the same as an empty one.
        """
        try:
            return sorted(filter(NAME.fullmatch, os.listdir(self.path)))
        except FileNotFoundError:
            return []

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are complete, ascending, as this process sees them.

        Marker, manifest and the files' sizes are looked at; their contents are not.
        """
        # Step 1: those in which `problem` finds nothing
        raise NotImplementedError("exercise 4.1")

    def manifest(self, name: str) -> dict[str, Any]:
        """The manifest, if the marker vouches for it; else ValueError or OSError."""
        # Step 2: the marker holds the manifest's hash
        raise NotImplementedError("exercise 4.1")

    def problem(self, name: str, share: int | None = None, shares: int = 1) -> str | None:
        """Why the checkpoint can't be used, or None. Every file's size is looked at; the files
        number ``share``, ``share + shares``, … of their list are hashed (None: no file). Of a
        checkpoint without marker it contains UNFINISHED.
        """
        # Step 3: marker, manifest, sizes, hashes: the cheap ones first
        raise NotImplementedError("exercise 4.1")

    def begin(self, step: int) -> str:
        """Clear away what killed saves have left, make a new folder aside (``name + ASIDE``) that
        may be filled; its final name.

        Folders with other names are not touched.
        """
        # Step 4: unfinished is what is still aside, and what has no marker
        # Step 5: a name that was never used: an old checkpoint of the same step stays till the end
        raise NotImplementedError("exercise 4.1")

    def finish(self, name: str, manifest: dict[str, Any]) -> None:
        """The manifest, the final name and the marker, each on the disk before the next.

        The folder aside has been filled, and its files are on the disk. ``manifest`` (JSON): step,
        score, and ``files``: by name the ``bytes`` and ``sha256`` of each.
        """
        # Step 6: the names of the files count, too: a folder is flushed like a file
        # Step 7: the marker appears whole: written under another name, flushed, renamed
        raise NotImplementedError("exercise 4.1")

    def prune(self, keep: int, keep_best: int) -> None:
        """Delete all but the last ``keep`` and the ``keep_best`` with the highest score."""
        # Step 8: of equal scores the newer one; NaN is no score
        # Step 9: rename first: what is half deleted must not look like a checkpoint
        raise NotImplementedError("exercise 4.1")

    def _score(self, name: str) -> float:
        """The checkpoint's score; minus infinity if it has none that can be compared."""
        try:
            score = self.manifest(name)["score"]
        except (OSError, ValueError):
            return -math.inf
        return -math.inf if score is None or math.isnan(score) else score
