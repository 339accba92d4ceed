# for: 4.15
"""Written differently: rank 0 gives out one name after the other, and a failed save is cleared
away by all ranks together."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn import functional

from given.agreement import Group
from given.safe_format import Tree, read_tree, write_trees

from .checkpoint_folder import ASIDE, UNFINISHED, CheckpointFolder

T = TypeVar("T")
SHARED = "shared.safetensors"


class CheckpointError(RuntimeError): ...


def own_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def values_of_all(value: Any, group: Group = None) -> list[Any]:
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
    step: int
    shared: Tree
    metadata: dict[str, Any]
    world_size: int
    folder: Path
    device: torch.device | str
    skipped: tuple[str, ...]

    def own(self, rank: int) -> Tree:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank}: the checkpoint is of {self.world_size} ranks")
        return read_tree(self.folder / own_file(rank), self.device)


class CheckpointStore:
    def __init__(
        self, folder: str | Path, *, keep: int = 3, keep_best: int = 1, group: Group = None
    ) -> None:
        if keep < 1 or keep_best < 0:
            raise ValueError(f"keep must be 1 or more, keep_best 0 or more: {keep}, {keep_best}")
        self.folder = Path(folder)
        self.keep, self.keep_best, self.group = (keep, keep_best, group)
        self.files = CheckpointFolder(self.folder)

    @property
    def rank(self) -> int:
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
        if not 0 <= step < 10**8:
            raise ValueError(f"a step has 1 to 8 digits, got {step}")
        first = self.rank == 0

        def only_first(act: Callable[[], T]) -> T:
            return self._agree(lambda: act() if first else None)[0]

        def make() -> str:
            json.dumps([score, metadata])
            return self.files.begin(step)

        name: str = only_first(make)
        error: CheckpointError | None = None
        try:
            files: dict[str, dict[str, Any]] = {}
            mine: dict[str, Tree] = {SHARED: shared} if first else {}
            mine[own_file(self.rank)] = own or {}
            aside = self.folder / f"{name}{ASIDE}"
            for found in self._agree(lambda: [[n, f] for n, f in write_trees(aside, mine).items()]):
                files.update(dict(found))
            ranks = dist.get_world_size(self.group) if dist.is_initialized() else 1
            facts = {"step": step, "score": score, "world_size": ranks, "files": files}
            only_first(lambda: self.files.finish(name, {**facts, "metadata": metadata or {}}))
        except CheckpointError as failed:
            error = failed
        if error is not None:
            with contextlib.suppress(CheckpointError):
                only_first(lambda: self._discard(name))
            raise error
        only_first(lambda: self.files.prune(self.keep, self.keep_best))
        return self.folder / name

    def steps(self) -> list[int]:
        return self.files.steps()

    def load(
        self, step: int | None = None, *, map_location: torch.device | str = "cpu"
    ) -> Saved | None:
        me, ranks = (0, 1)
        if dist.is_initialized():
            me, ranks = (self.rank, dist.get_world_size(self.group))
        waiting: list[str] = []

        def look() -> None:
            end = "" if step is None else f"-step-{step:08d}"
            waiting.extend(name for name in self.files.names() if name.endswith(end))

        self._agree(look)
        passed: dict[str, str] = {}
        was_finished = False
        while True:
            name = self._agree(lambda: waiting.pop() if me == 0 and waiting else None)[0]
            if name is None:
                break
            said = self._agree(lambda: (self.files.problem(name, me, ranks) or "")[:2000])
            if not any(said):
                return self._read(name, torch.device(map_location), tuple(passed.values()))
            wrong = next(text for text in said if text)
            passed[name] = f"{name} ({wrong})"
            was_finished |= not all(UNFINISHED in text for text in said)
        if step is not None:
            raise ValueError(f"there is no intact checkpoint of step {step}")
        if was_finished:
            raise CheckpointError("damaged, all of them: " + "; ".join(passed.values()))
        return None

    def _read(self, name: str, device: torch.device | str, skipped: tuple[str, ...]) -> Saved:
        found: dict[str, Any] = {}

        def look() -> bool:
            found["manifest"] = self.files.manifest(name)
            found["shared"] = read_tree(self.folder / name / SHARED, device)
            facts = found["manifest"]
            found["saved"] = Saved(
                facts["step"],
                found["shared"],
                facts["metadata"],
                facts["world_size"],
                self.folder / name,
                device,
                skipped,
            )
            return True

        self._agree(look)
        saved: Saved = found["saved"]
        return saved

    def _agree(self, action: Callable[[], T]) -> list[T]:
        try:
            message = {"ok": action()}
        except Exception as error:
            message = {"failed": repr(error)[:2000]}
        said = values_of_all(message, self.group)
        failed = {rank: what["failed"] for rank, what in enumerate(said) if "failed" in what}
        if failed:
            raise CheckpointError(f"failed on some ranks: {failed}")
        return [what["ok"] for what in said]


def _discard(self: CheckpointStore, name: str) -> None:
    aside, final = (self.folder / f"{name}{ASIDE}", self.folder / name)
    if os.path.isdir(final):
        os.replace(final, aside)
    shutil.rmtree(aside, ignore_errors=True)


CheckpointStore._discard = _discard
