# for: 4.3
"""Written differently: a pool of one thread, a store of its own, and rooms that are taken out of
the last snapshot."""

from __future__ import annotations

import copy
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from given.safe_format import Tree

from .fault_tolerance import CheckpointStore


class Snapshot:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def take(self, tree: Tree) -> Tree:
        made: dict[str, Tensor] = {}
        by_memory: dict[Any, Tensor] = {}
        try:
            result = self._copied(tree, "tree", made, by_memory)
            gpus = {where[-1] for where in by_memory if where[-1].type == "cuda"}
            for gpu in gpus:
                torch.cuda.current_stream(gpu).synchronize()
        finally:
            self.tensors = made
        return result

    def _copied(
        self, value: Any, path: str, fresh: dict[str, Tensor], copies: dict[Any, Tensor]
    ) -> Any:
        if isinstance(value, Tensor):
            plain = value.detach()
            address = id(value) if plain.numel() == 0 else plain.data_ptr()
            memory = (
                address,
                plain.numel() == 0,
                plain.shape,
                plain.stride(),
                plain.dtype,
                plain.device,
            )
            if memory not in copies:
                copies[memory] = fresh[path] = self._room(path, plain)
                with torch.no_grad():
                    copies[memory].copy_(plain, non_blocking=True)
            return copies[memory]
        if isinstance(value, dict):
            result = {}
            for key, item in value.items():
                result[key] = self._copied(item, f"{path}[{key!r}]", fresh, copies)
            return result
        if type(value) is list:
            return [self._copied(v, f"{path}[{i}]", fresh, copies) for i, v in enumerate(value)]
        if type(value) is tuple:
            return tuple(
                (self._copied(v, f"{path}[{i}]", fresh, copies) for i, v in enumerate(value))
            )
        return value

    def _room(self, path: str, value: Tensor) -> Tensor:
        last = self.tensors.pop(path, None)
        if last is None or (last.dtype, last.shape) != (value.dtype, value.shape):
            last = torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)
            if value.is_cuda:
                last = last.pin_memory()
        return last


class AsyncCheckpointer:
    def __init__(self, store: CheckpointStore) -> None:
        self.group = None
        if dist.is_initialized():
            world = dist.group.WORLD if store.group is None else store.group
            self.group = dist.new_group(
                dist.get_process_group_ranks(world), backend="gloo", use_local_synchronization=True
            )
        self.store = CheckpointStore(
            store.folder, keep=store.keep, keep_best=store.keep_best, group=self.group
        )
        self.snapshot = Snapshot()
        self.stalls: list[float] = []
        self.threads: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[None] | None = None
        self.error: Exception | None = None
        self.last: Path | None = None

    def save(
        self,
        step: int,
        shared: Tree,
        own: Tree | None = None,
        *,
        score: float | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> float:
        start = time.monotonic()
        self.wait()
        if self.threads is None:
            raise RuntimeError("closed")
        if step < 0 or step >= 10**8:
            raise ValueError(f"no step that a folder could be named after: {step}")
        what: Tree = {"own": own or {}, "shared": {}, "metadata": {}}
        if self.store.rank == 0:
            what.update(shared=shared, metadata=metadata or {})
        try:
            what = self.snapshot.take(what)
            what["metadata"] = copy.deepcopy(what["metadata"])
        except Exception as error:
            text = f"the copy failed: {error!r}"[:1000]
            what = {"own": {text: {text}}, "shared": {}, "metadata": {}}
        self.pending = self.threads.submit(
            self._write, step, what["shared"], what["own"], what["metadata"], score
        )
        del what
        seconds = time.monotonic() - start
        self.stalls.append(seconds)
        return seconds

    def _write(
        self, step: int, shared: Tree, own: Tree, metadata: Tree, score: float | None
    ) -> None:
        try:
            folder = self.store.save(step, shared, own, score=score, metadata=metadata)
        except Exception as error:
            self.error = error
        else:
            self.last = folder

    def wait(self) -> Path | None:
        if self.pending is not None:
            self.pending.result()
            self.pending = None
        if self.error is not None:
            error = self.error
            self.error = None
            raise error.with_traceback(None)
        return self.last

    def close(self) -> None:
        threads, self.threads = (self.threads, None)
        if threads is None:
            return
        try:
            threads.shutdown(wait=True)
            self.wait()
        finally:
            group, self.group = (self.group, None)
            self.store.group = None
            self.snapshot.tensors.clear()
            if group is not None:
                dist.destroy_process_group(group)

    def __enter__(self) -> AsyncCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()
