# for: 2.10, 2.11, 2.12
"""Written differently: orders by a greedy list scheduler, and an interpreter without autograd's
accumulation: gradients by torch.autograd.grad, messages in batches, the loss by an all-reduce."""

from __future__ import annotations

import heapq

import torch
import torch.distributed as dist

from solutions.phase2_advanced.pipeline_schedules import (
    Step,
    needs,
    rank_of_stages,
    validate,
    with_messages,
)


def greedy(forwards, backwards, limits):
    """Whoever is free takes its next backward if that can start, else its next forward, as long as
    it keeps less than its limit; F takes 1, B takes 2."""
    ranks = len(forwards)
    last = max(step.stage for steps in forwards for step in steps)
    todo = [[f[::-1], b[::-1]] for f, b in zip(forwards, backwards, strict=True)]
    order = [[] for _ in range(ranks)]
    live = [0] * ranks
    done, events = set(), []
    free = set(range(ranks))
    now = 0.0
    while any(f or b for f, b in todo):
        for rank in sorted(free):
            f, b = todo[rank]
            if b and done.issuperset(needs(b[-1], last)):
                step, cost = b.pop(), 2.0
                live[rank] -= 1
            elif f and live[rank] < limits[rank] and done.issuperset(needs(f[-1], last)):
                step, cost = f.pop(), 1.0
                live[rank] += 1
            else:
                continue
            order[rank].append(step)
            free.remove(rank)
            heapq.heappush(events, (now + cost, rank, step))
        now = events[0][0]
        while events and events[0][0] == now:
            _, rank, step = heapq.heappop(events)
            done.add(step)
            free.add(rank)
    return order


def numbers(**values):
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")


def gpipe(ranks, micro_batches):
    numbers(ranks=ranks, micro_batches=micro_batches)
    every = range(micro_batches)
    return [
        [Step("F", r, i) for i in every] + [Step("B", r, i) for i in reversed(every)]
        for r in range(ranks)
    ]


def one_f_one_b(ranks, micro_batches):
    numbers(ranks=ranks, micro_batches=micro_batches)
    steps = {
        kind: [[Step(kind, r, i) for i in range(micro_batches)] for r in range(ranks)]
        for kind in "FB"
    }
    return greedy(steps["F"], steps["B"], [ranks - r for r in range(ranks)])


def interleaved(ranks, micro_batches, chunks):
    """Needs fewer activations than the usual warm-up: (v-1)p + p-r."""
    numbers(ranks=ranks, micro_batches=micro_batches, chunks=chunks)
    if micro_batches % ranks != 0:
        raise ValueError(f"{micro_batches} micro-batches for {ranks} ranks: not a multiple")
    forwards, backwards = [], []
    for r in range(ranks):
        groups = [range(g, g + ranks) for g in range(0, micro_batches, ranks)]
        mine = [(c * ranks + r, i) for group in groups for c in range(chunks) for i in group]
        forwards.append([Step("F", s, i) for s, i in mine])
        mine = [
            (c * ranks + r, i) for group in groups for c in reversed(range(chunks)) for i in group
        ]
        backwards.append([Step("B", s, i) for s, i in mine])
    limits = [(chunks - 1) * ranks + ranks - r for r in range(ranks)]
    order = []
    for r, limit in enumerate(limits):
        f, b = forwards[r], backwards[r]
        steps = f[: limit - 1]
        for k in range(len(f)):
            steps += [*f[limit - 1 + k : limit + k], b[k]]
        order.append(steps)
    return order


def make_schedule(name, ranks, micro_batches, chunks=1):
    makers = {"gpipe": gpipe, "1f1b": one_f_one_b}
    if name == "interleaved":
        return with_messages(interleaved(ranks, micro_batches, chunks))
    if name not in makers or chunks != 1:
        raise ValueError(f"no schedule {name!r} with {chunks} chunks per rank")
    return with_messages(makers[name](ranks, micro_batches))


class Pipeline:
    def __init__(self, chunks, schedule, loss_fn, boundaries, *, group=None):
        ranks = dist.get_world_size(group)
        if len(schedule) != ranks:
            raise ValueError(f"{len(schedule)} programs for {ranks} ranks")
        self.count = len({step.micro_batch for steps in schedule for step in steps})
        if "W" in {step.kind for steps in schedule for step in steps}:
            raise ValueError("a step W needs a backward in two halves")
        validate(schedule, len(boundaries) + 1, self.count)
        self.owner = rank_of_stages(schedule)
        self.program = schedule[dist.get_rank(group)]
        own = sorted({step.stage for step in self.program})
        self.modules = dict(zip(own, chunks, strict=True))
        self.loss_fn, self.shapes, self.group = loss_fn, boundaries, group

    def step(self, inputs, targets):
        n = self.count
        if min(len(inputs), len(targets)) < n or len(inputs) % n or len(targets) % n:
            raise ValueError(f"{len(inputs)} inputs, {len(targets)} targets: {n} micro-batches")
        self.xs = inputs.split(len(inputs) // n)
        self.ys = targets.split(len(targets) // n)
        self.device = inputs.device
        self.total = torch.zeros(1, dtype=torch.float64, device=self.device)
        self.box, self.graph, self.works = {}, {}, {}
        for step in self.program:
            if len(step.kind) == 1:
                self.compute(step)
            else:
                self.move(step)
        for work, _ in self.works.values():
            work.wait()
        dist.all_reduce(self.total, group=self.group)
        return float(self.total)

    def move(self, step):
        kind, stage, i = step
        other = stage + 1 if kind in ("send F", "recv B") else stage - 1
        peer = self.owner[other]
        if self.group is not None:
            peer = dist.get_global_rank(self.group, peer)
        if kind.startswith("recv"):
            like = self.shapes[min(stage, other)]
            tensor = torch.empty(like.shape, dtype=like.dtype, device=self.device)
            op = dist.irecv
        else:
            tensor = self.box.pop((kind[-1], other, i)).contiguous()
            op = dist.isend
            before = [key for key in self.works if key[:2] == (kind, stage)]
            if len(before) > 1:
                self.works.pop(before[0])[0].wait()
        (work,) = dist.batch_isend_irecv([dist.P2POp(op, tensor, peer, self.group)])
        self.works[kind, stage, i] = work, tensor

    def take(self, kind, stage, i):
        """What another stage gave: from this rank, or received."""
        if (kind, stage, i) in self.box:
            return self.box.pop((kind, stage, i))
        work, tensor = self.works.pop((f"recv {kind}", stage, i))
        work.wait()
        return tensor

    def compute(self, step):
        kind, stage, i = step
        last = len(self.shapes)
        if kind == "F":
            x = self.xs[i] if stage == 0 else self.take("F", stage, i).detach().requires_grad_()
            out = self.modules[stage](x)
            if stage == last:
                out = self.loss_fn(out, self.ys[i]) / self.count
                self.total += out.detach()
            elif out.shape != self.shapes[stage].shape or out.dtype != self.shapes[stage].dtype:
                raise ValueError(f"{tuple(out.shape)} is not {tuple(self.shapes[stage].shape)}")
            else:
                self.box["F", stage + 1, i] = out.detach()
            self.graph[stage, i] = x, out
            return
        x, out = self.graph.pop((stage, i))
        start = None if stage == last else self.take("B", stage, i)
        wanted = [p for p in self.modules[stage].parameters() if p.requires_grad]
        if stage:
            wanted.append(x)
        if stage and not out.requires_grad:
            self.box["B", stage - 1, i] = torch.zeros_like(x)
        if wanted and out.requires_grad:
            found = torch.autograd.grad(out, wanted, start, allow_unused=True)
            for p, g in zip(wanted, found, strict=True):
                if p is x:
                    self.box["B", stage - 1, i] = torch.zeros_like(x) if g is None else g
                elif g is not None:
                    p.grad = g if p.grad is None else p.grad + g
        sent = ("send F", stage, i)
        if sent in self.works:
            self.works.pop(sent)[0].wait()
