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
            self.flying, self.used = [], set()
        for p in reversed(self.param_groups[-1]["params"]):
            if p.requires_grad and p.numel():
                self.order.append(p)
                p.belongs_to = id(self)
                p.register_post_accumulate_grad_hook(self.ready)

    def ready(self, p):
        if p.belongs_to != id(self):
            return
        if not self.running:
            self.running, self.gone, self.came = True, 0, set()
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        if p.grad is None:
            return
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
        if len(self.flying) == 2:
            self.land()
        work = dist.reduce(total, group=self.group, group_dst=self.owner[p], async_op=True)
        self.flying.append((p, total, work))

    @torch.no_grad()
    def land(self):
        p, total, work = self.flying.pop(0)
        work.wait()
        if self.owner[p] == dist.get_rank(self.group):
            total /= dist.get_world_size(self.group)
            self.sums[p] = self.sums[p] + total if p in self.sums else total

    def finish(self):
        self.running = False
        while self.gone < len(self.order):
            self.reduce()
        while self.flying:
            self.land()
        flags = [[p in self.came] for p in self.order]
        used = torch.tensor(flags, dtype=torch.uint8, device=self.order[0].device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self.group)
        for p, [flag] in zip(self.order, used.tolist(), strict=True):
            if flag:
                self.used.add(p)
            elif p not in self.used:
                self.sums.pop(p, None)

    def before_step(self):
        for p, gradient in self.sums.items():
            p.grad = gradient

    def step(self, closure=None, **more):
        loss = super().step(closure, **more)
        for p in self.sums:
            p.grad = None
        return loss

    def zero_grad(self, set_to_none=True):
        if self.running:
            for p in self.order[self.gone :]:
                p.grad = p.detach() * float("nan")
            self.finish()
        self.sums.clear()
        self.used.clear()

    @torch.no_grad()
    def clip_by_global_norm(self, max_norm):
        if not max_norm > 0:
            raise ValueError("max_norm")
        squares = torch.zeros((), dtype=torch.float64, device=self.order[0].device)
        for gradient in self.sums.values():
            squares += gradient.double().norm() ** 2
        dist.all_reduce(squares, group=self.group)
        norm = squares.sqrt().item()
        if norm > max_norm and norm != float("inf"):
            for gradient in self.sums.values():
                gradient *= max_norm / norm
        return norm
