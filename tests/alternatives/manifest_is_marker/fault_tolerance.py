# for: 4.15
"""Written differently: safetensors' own writer, structure in JSON files, hashes by reading back;
a checkpoint's folder has its final name from the start, and the manifest, renamed into place last,
is what makes it one. It holds its own hash."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

INDEX = "manifest"


class CheckpointError(RuntimeError):
    pass


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.close(number)


def _text(path: Path, content: str) -> None:
    path.write_text(content)
    _sync(path)


def _plain(value: Any, tensors: list) -> list:
    """[kind, content]: tensors are replaced by their number."""
    if isinstance(value, torch.Tensor):
        found = [i for i, t in enumerate(tensors) if t is value]
        if not found:
            tensors.append(value)
        return ["tensor", found[0] if found else len(tensors) - 1]
    if isinstance(value, dict):
        return ["dict", [[k, _named(k, v, tensors)] for k, v in value.items()]]
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, [_named(i, v, tensors) for i, v in enumerate(value)]]
    if value is None or isinstance(value, (str, bool, int, float)):
        return ["value", value]
    raise TypeError(f"{type(value)} is not data")


def _named(key: Any, value: Any, tensors: list) -> list:
    try:
        return _plain(value, tensors)
    except TypeError as error:
        raise TypeError(f"{key[-200:]}: {error}") from None


def _back(data: list, tensors: list) -> Any:
    kind, content = data
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {k: _back(v, tensors) for k, v in content}
    if kind in ("list", "tuple"):
        items = [_back(v, tensors) for v in content]
        return tuple(items) if kind == "tuple" else items
    return content


def _write(folder: Path, name: str, tree: dict) -> dict[str, str]:
    tensors: list = []
    data = _plain(tree, tensors)
    copies = {str(i): t.detach().cpu().clone().contiguous() for i, t in enumerate(tensors)}
    save_file(copies, folder / f"{name}.safetensors")
    _sync(folder / f"{name}.safetensors")
    _text(folder / f"{name}.json", json.dumps([data, len(tensors)]))
    return {f"{name}.{end}": _hash(folder / f"{name}.{end}") for end in ("safetensors", "json")}


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read(folder: Path, name: str, device) -> dict:
    data, count = json.loads((folder / f"{name}.json").read_text())
    found = load_file(folder / f"{name}.safetensors")
    return _back(data, [found[str(i)].to(device) for i in range(count)])


class Saved(NamedTuple):
    step: int
    shared: dict
    metadata: dict
    world_size: int
    skipped: tuple
    folder: Path
    device: Any

    def own(self, rank: int) -> dict:
        if rank not in range(self.world_size):
            raise ValueError(f"no rank {rank} among {self.world_size}")
        return _read(self.folder, f"own-{rank}", self.device)


class CheckpointStore:
    def __init__(self, folder, *, keep: int = 3, keep_best: int = 1, group=None) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}")
        if keep_best < 0:
            raise ValueError(f"keep_best={keep_best}")
        self.folder, self.keep, self.keep_best, self.group = Path(folder), keep, keep_best, group

    def _everyone(self, value: Any) -> list:
        if not dist.is_initialized():
            return [value]
        values: list = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _attempt(self, action, only_first: bool = False) -> list:
        out = ("", None)
        if not only_first or self._rank() == 0:
            try:
                out = ("", action())
            except Exception as error:
                out = (f"rank {self._rank()} failed: {repr(error)[:300]}", None)
        every = self._everyone(out)
        if any(problem for problem, _ in every):
            raise CheckpointError(", ".join(problem for problem, _ in every if problem))
        return [value for _, value in every]

    def _rank(self) -> int:
        return dist.get_rank(self.group) if dist.is_initialized() else 0

    def _folders(self) -> list[Path]:
        if not self.folder.exists():
            return []
        found = (path for path in self.folder.iterdir() if path.name.startswith("save"))
        return sorted(found, key=lambda p: int(p.name[4:10]))

    def _index(self, folder: Path) -> dict:
        text, _, digest = (folder / INDEX).read_text().rpartition("\n")
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            raise ValueError("the manifest is not as written")
        return json.loads(text)

    def _start(self, step: int) -> str:
        self.folder.mkdir(parents=True, exist_ok=True)
        for folder in self._folders():
            if not (folder / INDEX).exists():
                shutil.rmtree(folder)
        last = self._folders()[-1:]
        number = int(last[0].name[4:10]) + 1 if last else 0
        folder = self.folder / f"save{number:06d}step{step}"
        folder.mkdir()
        return str(folder)

    def save(self, step, shared, own=None, *, score=None, metadata=None) -> Path:
        if step < 0 or len(str(step)) > 8:
            raise ValueError(f"step {step}")
        folder = Path(self._attempt(lambda: self._start(step), only_first=True)[0])
        rank = self._rank()
        try:
            hashes = self._attempt(lambda: _write(folder, f"own-{rank}", own or {}))
            hashes += self._attempt(lambda: _write(folder, "shared", shared), only_first=True)[:1]
            index = {
                "step": step,
                "ranks": len(hashes) - 1,
                "score": score,
                "metadata": metadata or {},
                "hashes": {k: v for part in hashes for k, v in part.items()},
            }
            self._attempt(lambda: self._complete(folder, json.dumps(index)), only_first=True)
        except CheckpointError:
            if rank == 0:
                (folder / INDEX).unlink(missing_ok=True)
                shutil.rmtree(folder)
            raise
        self._attempt(self._tidy, only_first=True)
        return folder

    def _complete(self, folder: Path, text: str) -> None:
        _sync(folder)
        _sync(self.folder)
        digest = hashlib.sha256(text.encode()).hexdigest()
        _text(folder / "manifest.tmp", f"{text}\n{digest}")
        os.replace(folder / "manifest.tmp", folder / INDEX)
        _sync(folder)

    def _tidy(self) -> None:
        scores = {}
        for folder in self._folders():
            score = self._index(folder)["score"]
            if score is not None and score == score:
                scores[folder] = score
        newest_first = self._folders()[::-1]
        ranked = [f for f in newest_first if f in scores]
        ranked.sort(key=lambda f: -scores[f])
        for folder in newest_first[self.keep :]:
            if folder not in ranked[: self.keep_best]:
                (folder / INDEX).unlink()
                shutil.rmtree(folder)

    def _fault(self, folder: Path) -> str:
        try:
            index = self._index(folder)
            for name, digest in index["hashes"].items():
                if not (folder / name).is_file() or _hash(folder / name) != digest:
                    return f"{folder.name}: {name} is damaged"
        except (OSError, ValueError) as error:
            return f"{folder.name}: {error}"
        return ""

    def steps(self) -> list[int]:
        return sorted({self._index(f)["step"] for f in self._folders() if not self._fault(f)})

    def _choose(self, step: int | None) -> list:
        skipped, begun = [], False
        for folder in reversed(self._folders()):
            fault = self._fault(folder)
            if not fault and step in (None, self._index(folder)["step"]):
                return [str(folder), skipped, begun]
            if fault:
                skipped.append(fault)
                begun |= (folder / INDEX).exists()
        return ["", skipped, begun]

    def load(self, step=None, *, map_location="cpu"):
        chosen, skipped, begun = self._attempt(lambda: self._choose(step), only_first=True)[0]
        if not chosen:
            if step is not None:
                raise ValueError(f"step {step} is not there: {skipped}")
            if begun:
                raise CheckpointError(f"nothing is intact: {skipped}")
            return None
        folder = Path(chosen)
        out: list = []
        self._attempt(lambda: out.append(_read(folder, "shared", map_location)))
        index = self._index(folder)
        return Saved(
            index["step"],
            out[0],
            index["metadata"],
            index["ranks"],
            tuple(skipped),
            folder,
            map_location,
        )
