# for: 2.10, 2.11, 2.12
"""Written differently: copies are sent, one limit for all sends, and the loss is an all-reduce."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group
from solutions.phase2_advanced.pipeline_parallel import check_sizes

from .pipeline_schedules import Schedule, Step, rank_of_stages, validate, with_messages

Key = tuple[int, int]


def gpipe(ranks: int, micro_batches: int) -> list[list[Step]]:
    check_sizes(ranks, micro_batches)
    forth = range(micro_batches)
    order: list[list[Step]] = []
    for rank in range(ranks):
        order.append([Step("F", rank, i) for i in forth])
        order[-1].extend(Step("B", rank, i) for i in reversed(forth))
    return order


def one_f_one_b(ranks: int, micro_batches: int) -> list[list[Step]]:
    check_sizes(ranks, micro_batches)
    order: list[list[Step]] = []
    for rank in range(ranks):
        most, steps, forth, back = (min(micro_batches, ranks - rank), [], 0, 0)
        while back < micro_batches:
            if forth < micro_batches and forth - back < most:
                steps.append(Step("F", rank, forth))
                forth += 1
            else:
                steps.append(Step("B", rank, back))
                back += 1
        order.append(steps)
    return order


def alternate(forwards: list[Step], backwards: list[Step], warm_up: int) -> list[Step]:
    coming, returning = (deque(forwards), deque(backwards))
    steps = [coming.popleft() for _ in range(min(warm_up, len(forwards)))]
    while coming or returning:
        if coming:
            steps.append(coming.popleft())
        if returning:
            steps.append(returning.popleft())
    return steps


def interleaved(ranks: int, micro_batches: int, chunks: int) -> list[list[Step]]:
    check_sizes(ranks, micro_batches, chunks)
    if micro_batches % ranks != 0:
        raise ValueError(f"the {ranks} ranks don't divide the {micro_batches} micro-batches")
    order = []
    groups = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [Step("F", stage, i) for group in groups for stage in stages for i in group]
        backwards = [
            Step("B", stage, i) for group in groups for stage in reversed(stages) for i in group
        ]
        warm_up = ranks - rank - 1 + (chunks - 1) * ranks
        order.append(alternate(forwards, backwards, min(warm_up, len(forwards))))
    return order


def make_schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> list[list[Step]]:
    check_sizes(ranks, micro_batches, chunks)
    match name:
        case "gpipe" | "1f1b" if chunks != 1:
            raise ValueError(f"{chunks} chunks per rank need the schedule 'interleaved'")
        case "gpipe":
            order = gpipe(ranks, micro_batches)
        case "1f1b":
            order = one_f_one_b(ranks, micro_batches)
        case "interleaved":
            order = interleaved(ranks, micro_batches, chunks)
        case _:
            raise ValueError(f"unknown schedule {name}")
    return with_messages(order)


class Pipeline:
    kinds = "FB"

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        schedule: Schedule,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        boundaries: Sequence[Tensor],
        *,
        group: Group = None,
    ) -> None:
        ranks, rank = (dist.get_world_size(group), dist.get_rank(group))
        if len(schedule) != ranks:
            raise ValueError(f"the schedule is for {len(schedule)} ranks, the group has {ranks}")
        steps = [step for steps in schedule for step in steps]
        for kind in sorted({step.kind[-1] for step in steps} - {*self.kinds}):
            raise ValueError(f"{type(self).__name__} takes steps {self.kinds}, not {kind}")
        self.micro_batches = 1 + max((step.micro_batch for step in steps), default=-1)
        self.last = len(boundaries)
        validate(schedule, self.last + 1, self.micro_batches)
        self.rank_of = rank_of_stages(schedule)
        mine = [stage for stage, owner in sorted(self.rank_of.items()) if owner == rank]
        if len(chunks) != len(mine):
            raise ValueError(f"{len(chunks)} chunks for the {len(mine)} stages of this rank")
        self.chunks = dict(zip(mine, chunks, strict=True))
        self.steps = list(schedule[rank])
        self.loss_fn, self.boundaries, self.group = (loss_fn, boundaries, group)
        self.kept: dict[Key, tuple[Tensor, Tensor]] = {}
        self.gradients: dict[Key, Tensor] = {}
        self.arriving: dict[Step, tuple[Tensor, dist.Work]] = {}
        self.sending: deque[tuple[Tensor, dist.Work]] = deque()

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        parts = []
        for tensor in (inputs, targets):
            if tensor.dim() == 0 or tensor.numel() == 0 or len(tensor) % self.micro_batches:
                raise ValueError(f"{tuple(tensor.shape)} is not {self.micro_batches} equal parts")
            parts.append(tensor.detach().split(len(tensor) // self.micro_batches))
        self.data, self.wanted = parts
        self.losses: list[Tensor] = []
        for step in self.steps:
            self.take(step)
        while self.sending:
            self.sending.pop()[1].wait()
        total = torch.zeros(1, dtype=torch.float64, device=inputs.device)
        for loss in self.losses:
            total += loss.to(torch.float64)
        self.data = self.wanted = ()
        dist.all_reduce(total, group=self.group)
        return (total / self.micro_batches).item()

    def take(self, step: Step) -> None:
        compute = {"F": self.forward, "B": self.backward}.get(step.kind)
        if compute is not None:
            compute(step.stage, step.micro_batch)
            return
        verb, kind = step.kind.split()
        towards = step.stage + (1 if (verb == "send") == (kind == "F") else -1)
        key = (step.stage, step.micro_batch)
        if verb == "send":
            self.send(self.kept[key][1] if kind == "F" else self.gradients.pop(key), towards)
            return
        like = self.boundaries[min(step.stage, towards)]
        buffer = torch.zeros(like.shape, dtype=like.dtype, device=self.data[0].device)
        peer = self.rank_of[towards]
        self.arriving[step] = (buffer, dist.irecv(buffer, group=self.group, group_src=peer))

    def forward(self, stage: int, i: int) -> None:
        receive = Step("recv F", stage, i)
        if stage == 0:
            x = self.data[i]
        else:
            before = self.kept.get((stage - 1, i))
            x = self.arrived(receive) if receive in self.arriving else before[1].detach().clone()
            x.requires_grad_(True)
        y = self.call(stage, i, x)
        if stage < self.last:
            like = self.boundaries[stage]
            if (y.shape, y.dtype) != (like.shape, like.dtype):
                raise ValueError(f"output of stage {stage}: {y.shape}, {y.dtype} is not {like}")
        else:
            loss = self.loss_fn(y, self.wanted[i])
            self.losses.append(loss.detach())
            y = loss
        self.kept[stage, i] = (x, y)

    def call(self, stage: int, i: int, x: Tensor) -> Tensor:
        return self.chunks[stage](x)

    def backward(self, stage: int, i: int) -> None:
        receive = Step("recv B", stage, i)
        x, y = self.kept.pop((stage, i))
        if stage == self.last:
            gradient = torch.full_like(y, 1 / self.micro_batches)
        elif receive in self.arriving:
            gradient = self.arrived(receive)
        else:
            gradient = self.gradients.pop((stage + 1, i))
        if y.requires_grad:
            y.backward(gradient)
        if stage > 0:
            found, x.grad = (x.grad, None)
            self.gradients[stage, i] = torch.zeros_like(x) if found is None else found

    def send(self, tensor: Tensor, stage: int) -> None:
        data = tensor.detach().clone(memory_format=torch.contiguous_format)
        work = dist.isend(data, group=self.group, group_dst=self.rank_of[stage])
        self.sending.append((data, work))
        while len(self.sending) > 2:
            self.sending.popleft()[1].wait()

    def arrived(self, receive: Step) -> Tensor:
        buffer, handle = self.arriving.pop(receive)
        handle.wait()
        return buffer
