# for: 4.1
"""Written differently: the marker waits in the folder under another name, numbers go on from all
names that are there, and deleting begins with the marker."""

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

MANIFEST, MARKER = ("manifest.json", "COMPLETE")
ASIDE = ".partial"
UNFINISHED = f"not finished, there is no {MARKER}"
NAME = re.compile("(\\d{6})-step-(\\d{8})")


class CheckpointFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def names(self) -> list[str]:
        try:
            return sorted(filter(NAME.fullmatch, os.listdir(self.path)))
        except FileNotFoundError:
            return []

    def steps(self) -> list[int]:
        result: set[int] = set()
        for name in self.names():
            match = NAME.fullmatch(name)
            if match and (not self.problem(name)):
                result.add(int(match.group(2)))
        return sorted(result)

    def manifest(self, name: str) -> dict[str, Any]:
        with open(self.path / name / MARKER, encoding="ascii") as file:
            wanted = file.read().strip()
        with open(self.path / name / MANIFEST, "rb") as file:
            text = file.read()
        digest = hashlib.sha256()
        digest.update(text)
        if digest.hexdigest() != wanted:
            raise ValueError(f"the manifest of {name} is not the one that was finished")
        manifest: dict[str, Any] = json.loads(text.decode())
        return manifest

    def problem(self, name: str, share: int | None = None, shares: int = 1) -> str | None:
        folder = self.path / name
        try:
            if MARKER not in os.listdir(folder):
                return UNFINISHED
        except FileNotFoundError:
            return UNFINISHED
        except OSError as error:
            return f"the folder can't be listed ({error!r})"
        try:
            manifest = self.manifest(name)
            listed = sorted(manifest["files"])
            for file in listed:
                with open(folder / file, "rb") as opened:
                    size = os.fstat(opened.fileno()).st_size
                if size != manifest["files"][file]["bytes"]:
                    return f"wrong size of {file}: {size}"
            for number, file in enumerate(listed):
                if share is None or number < share or (number - share) % shares:
                    continue
                if hash_of_file(folder / file) != manifest["files"][file]["sha256"]:
                    return f"wrong hash of {file}"
        except Exception as error:
            return f"damaged ({error!r})"
        return None

    def begin(self, step: int) -> str:

        def make(folder: Path) -> None:
            try:
                os.mkdir(folder)
            except FileExistsError:
                return
            except FileNotFoundError:
                make(folder.parent)
                os.mkdir(folder)
            flush_folder(folder.parent)

        make(Path(os.path.abspath(self.path)))
        taken = [0]
        with os.scandir(self.path) as entries:
            present = list(entries)
        for entry in present:
            plain = entry.name[: -len(ASIDE)] if entry.name.endswith(ASIDE) else entry.name
            match = NAME.fullmatch(plain)
            if match is None:
                continue
            taken.append(int(match.group(1)))
            if entry.is_dir(follow_symlinks=False):
                unfinished = plain != entry.name or MARKER not in os.listdir(entry.path)
                if unfinished:
                    shutil.rmtree(entry.path)
        name = f"{max(taken) + 1:06d}-step-{step:08d}"
        (self.path / (name + ASIDE)).mkdir()
        return name

    def finish(self, name: str, manifest: dict[str, Any]) -> None:
        aside = self.path / f"{name}{ASIDE}"
        text = json.dumps(manifest, sort_keys=True, indent=1).encode("ascii")
        write_bytes(aside / MANIFEST, text)
        write_bytes(aside / f"{MARKER}.new", hashlib.sha256(text).hexdigest().encode("ascii"))
        flush_folder(aside)
        final = aside.rename(self.path / name)
        flush_folder(self.path)
        os.replace(final / f"{MARKER}.new", final / MARKER)
        flush_folder(final)

    def prune(self, keep: int, keep_best: int) -> None:
        finished = [n for n in self.names() if os.path.lexists(self.path / n / MARKER)]
        finished.reverse()
        newest = finished[:keep]
        best: list[str] = []
        left = [(self._score(name), name) for name in finished]
        left = [pair for pair in left if pair[0] != -math.inf]
        while left and len(best) < keep_best:
            top = max(left)
            left.remove(top)
            best.append(top[1])
        for name in finished:
            if name in newest or name in best:
                continue
            (self.path / name / MARKER).unlink()
            flush_folder(self.path / name)
            shutil.rmtree(self.path / name)

    def _score(self, name: str) -> float:
        try:
            score = self.manifest(name)["score"]
        except (OSError, ValueError):
            return -math.inf
        return -math.inf if score is None or math.isnan(score) else score
