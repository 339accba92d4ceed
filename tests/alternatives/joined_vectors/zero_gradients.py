# for: 3.14
"""Written differently: vectors joined and split by torch, one dictionary of what is on its way."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from given.hooks import weakly

from .zero import FlatVector, ZeroOptimizer


class Zero2Optimizer(ZeroOptimizer):
    running = False  # a backward is under way

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        before = len(self.vectors)
        super().add_param_group(param_group)
        for vector in self.vectors[before:]:
            for p in vector.parameters:
                ready = functools.partial(weakly(self._ready), vector)
                if hasattr(p, "_zero2_hook"):
                    p._zero2_hook.remove()  # another optimizer's
                p._zero2_hook = p.register_post_accumulate_grad_hook(ready)

    def _ready(self, vector: FlatVector, p: nn.Parameter) -> None:
        if not self.running:
            self.running = True
            self.come: dict[int, nn.Parameter] = {}
            self.queue = list(self.vectors)  # have not left
            self.under_way: list[Any] = []
            self.filler = 0.0
            torch.autograd.Variable._execution_engine.queue_callback(weakly(self._finish))
        if p.grad is None:
            return
        if id(p) in self.come:
            raise RuntimeError("the gradient of a parameter came a second time in this backward")
        self.come[id(p)] = p
        while self.queue and all(id(each) in self.come for each in self.queue[0].parameters):
            self._leave(self.queue[0])

    def _leave(self, vector: FlatVector) -> None:
        self.queue.remove(vector)
        if len(self.under_way) == 2:
            self._arrive()
        world_size = dist.get_world_size(self.group)
        parts = []
        for p in vector.parameters:
            if id(p) in self.come:
                parts.append(p.grad.detach().reshape(-1))
                p.grad = None
            else:
                parts.append(vector.flat.new_full((p.numel(),), self.filler))
        parts.append(vector.flat.new_zeros(len(vector.flat) - sum(map(len, parts))))
        joined = torch.cat(parts)
        del parts
        joined /= world_size
        mean = torch.empty_like(vector.own)
        work = dist.reduce_scatter_tensor(mean, joined, group=self.group, async_op=True)
        self.under_way.append((vector, mean, work))

    def _arrive(self) -> None:
        vector, mean, work = self.under_way.pop(0)
        work.wait()
        vector.gradient = mean if vector.gradient is None else vector.gradient.add_(mean)

    def _finish(self) -> None:
        with torch.no_grad():
            for vector in list(self.queue):
                self._leave(vector)
            while self.under_way:
                self._arrive()
            every = [p for vector in self.vectors for p in vector.parameters]
            flags = [int(id(p) in self.come or self.filler != 0) for p in every]
            told = torch.tensor(flags, dtype=torch.uint8, device=every[0].device)
            dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.group)
            used = {id(p) for p, flag in zip(every, told.tolist(), strict=True) if flag}
            for vector in self.vectors:
                sizes = [piece.stop - piece.start for piece in vector.pieces]
                parts = vector.gradient[: sum(sizes)].split(sizes)
                for piece, part in zip(vector.pieces, parts, strict=bool(sizes)):
                    if id(piece.whole) in used:
                        piece.part.grad = part
        self.running = False
        self.come = {}

    def give_gradients(self) -> None:
        """Backward has given them."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.running:
            self.filler = float("nan")
            self._finish()
        for users in self.param_groups:
            for p in users["params"]:
                p.grad = None
        for vector in self.vectors:
            for piece in vector.pieces:
                piece.part.grad = None
            vector.gradient = None

    @torch.no_grad()
    def clip_by_global_norm(self, max_norm: float) -> float:
        if not max_norm > 0:
            raise ValueError(f"a gradient can't be clipped to a norm of {max_norm}")
        parts = [piece.part.grad for piece in self.pieces]
        device = self.param_groups[0]["params"][0].device
        known = torch.zeros(1, dtype=torch.float64, device=device)
        for g in parts:
            if g is not None:
                known += (torch.view_as_real(g) if g.is_complex() else g).double().pow(2).sum()
        dist.all_reduce(known, group=self.group)
        norm = float(known) ** 0.5
        if norm > max_norm and norm != float("inf"):
            for g in parts:
                if g is not None:
                    g *= max_norm / norm
        return norm
