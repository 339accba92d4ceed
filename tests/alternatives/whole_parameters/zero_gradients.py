# for: 3.14
"""Written differently: whole gradients, each reduced to the owner of its parameter."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .zero import ZeroOptimizer


class Zero2Optimizer(ZeroOptimizer):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        if not hasattr(self, "sums"):
            self.sums, self.order, self.gone, self.came, self.running = {}, [], 0, set(), False
        for p in reversed(self.param_groups[-1]["params"]):
            if p.requires_grad:
                self.order.append(p)
                p.register_post_accumulate_grad_hook(self.ready)

    def ready(self, p):
        if not self.running:
            self.running, self.gone, self.came = True, 0, set()
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        if p in self.came:
            raise RuntimeError(f"second gradient of a parameter {tuple(p.shape)}")
        self.came.add(p)
        while self.gone < len(self.order) and self.order[self.gone] in self.came:
            self.reduce()

    @torch.no_grad()
    def reduce(self):
        p = self.order[self.gone]
        self.gone += 1
        total = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
        p.grad = None
        dist.reduce(total, group=self.group, group_dst=self.owner[p])
        if self.owner[p] == dist.get_rank(self.group):
            total /= dist.get_world_size(self.group)
            self.sums[p] = self.sums[p] + total if p in self.sums else total

    def finish(self):
        self.running = False
        while self.gone < len(self.order):
            self.reduce()
        flags = [[p in self.came] for p in self.order]
        used = torch.tensor(flags, dtype=torch.int32, device=self.order[0].device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self.group)
        for p, [flag] in zip(self.order, used.tolist(), strict=True):
            if not flag and not self.sums.get(p, torch.ones(1)).any():
                del self.sums[p]

    def before_step(self):
        for p, gradient in self.sums.items():
            p.grad = gradient

    def step(self, closure=None):
        loss = super().step(closure)
        for p in self.sums:
            p.grad = None
        return loss

    def zero_grad(self, set_to_none=True):
        self.sums.clear()

    @torch.no_grad()
    def clip_by_global_norm(self, limit):
        double = any(p.dtype == torch.float64 for p in self.order)
        dtype = torch.float64 if double else torch.float32
        squares = torch.zeros((), dtype=dtype, device=self.order[0].device)
        for gradient in self.sums.values():
            squares += gradient.to(dtype).norm() ** 2
        dist.all_reduce(squares, group=self.group)
        for gradient in self.sums.values():
            gradient *= (limit / (squares.sqrt() + 1e-6)).clamp(max=1)
        return squares.sqrt()
