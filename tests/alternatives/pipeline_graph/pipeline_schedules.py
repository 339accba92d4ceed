# for: 2.9, 2.21
"""Written differently: one graph of all steps; a message is a single node of both ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from solutions.phase2_advanced.pipeline_schedules import (
    SPLIT_COSTS,
    Schedule,
    Step,
    message_after,
    needs,
    rank_of_stages,
)

COSTS = {"F": 1.0, "B": 2.0}


def graph_of(schedule, nodes):
    """Predecessors of every node: the step before it on its rank (or, for a message, both)."""
    before = {}
    for steps in schedule:
        previous = None
        for step in steps:
            node = nodes.get(step, step)
            before.setdefault(node, set())
            if previous is not None and previous != node:
                before[node].add(previous)
            previous = node
    return before


def sorted_nodes(before):
    try:
        return list(TopologicalSorter(before).static_order())
    except CycleError as error:
        raise ValueError(f"a circle of steps: {', '.join(map(str, error.args[1]))}") from None


def dependencies(order):
    """The graph of compute steps: program order and data."""
    last = max(rank_of_stages(order), default=0)
    before = graph_of(order, {})
    for step in list(before):
        if not before.keys() >= {*needs(step, last)}:
            raise ValueError(f"{step} needs what is nowhere")
        before[step].update(needs(step, last))
    return before


def with_messages(order):
    """A message is put where its receiver needs it, at the sender's end of what it has done."""
    rank_of = rank_of_stages(order)
    last = max(rank_of, default=0)
    out = [[] for _ in order]
    for step in sorted_nodes(dependencies(order)):
        mine = rank_of[step.stage]
        for need in needs(step, last):
            theirs = rank_of[need.stage]
            if theirs != mine:
                send, receive = message_after(need, last)
                out[theirs].append(send)
                out[mine].append(receive)
        out[mine].append(step)
    return out


def validate(schedule, stages, micro_batches):
    if stages <= 0 or micro_batches <= 0:
        raise ValueError(f"nothing to do: {stages} stages, {micro_batches} micro-batches")
    last = stages - 1
    rank_of = rank_of_stages(schedule)
    if set(rank_of) != set(range(stages)):
        raise ValueError(f"stages are {sorted(rank_of)}, not 0 to {last}")
    kinds = {step.kind for steps in schedule for step in steps}
    wanted = Counter()
    nodes = {}
    for kind in "FBW" if "W" in kinds else "FB":
        for stage in range(stages):
            for i in range(micro_batches):
                step = Step(kind, stage, i)
                wanted[rank_of[stage], step] += 1
                pair = message_after(step, last)
                if pair and rank_of[pair[0].stage] != rank_of[pair[1].stage]:
                    for end in pair:
                        wanted[rank_of[end.stage], end] += 1
                        nodes[end] = pair
    there = Counter((rank, step) for rank, steps in enumerate(schedule) for step in steps)
    for rank, step in wanted | there:
        if wanted[rank, step] != there[rank, step]:
            raise ValueError(f"rank {rank}: {step} is there {there[rank, step]} times")
    check_places(schedule, rank_of, last, nodes)
    before = graph_of(schedule, nodes)
    try:
        list(TopologicalSorter(before).static_order())
    except CycleError:
        where = [f"rank {rank}" for rank in range(len(schedule))]
        raise ValueError(f"a circle of messages among {', '.join(where)}: a deadlock") from None


def check_places(schedule, rank_of, last, nodes):
    for rank, steps in enumerate(schedule):
        place = {step: k for k, step in enumerate(steps)}
        for step in steps:
            kind, stage, i = step
            if kind.startswith("send"):
                first = [Step(kind[-1], stage, i)]
            elif len(kind) == 1:
                first = [
                    need if rank_of[need.stage] == rank else message_after(need, last)[1]
                    for need in needs(step, last)
                ]
            else:
                first = []
            for need in first:
                if place[need] > place[step]:
                    raise ValueError(f"rank {rank}: {step} comes before {need}")


@dataclass
class Replay:
    spans: list

    @property
    def seconds(self):
        return max(each[-1][2] for each in self.spans if each)

    @property
    def bubble(self):
        idle = [self.seconds - sum(end - start for _, start, end in each) for each in self.spans]
        return sum(idle) / len(idle) / self.seconds


def replay(schedule: Schedule, costs=None, *, message=0.0):
    order = [[step for step in steps if len(step.kind) == 1] for steps in schedule]
    rank_of = rank_of_stages(order)
    last = max(rank_of)
    if costs is None:
        costs = SPLIT_COSTS if any(s.kind == "W" for steps in order for s in steps) else COSTS
    ends, spans = {}, [[] for _ in order]
    for step in sorted_nodes(dependencies(order)):
        rank = rank_of[step.stage]
        starts = [0.0, *(end for _, _, end in spans[rank][-1:])]
        starts += [ends[n] + message * (rank_of[n.stage] != rank) for n in needs(step, last)]
        ends[step] = max(starts) + costs[step.kind]
        spans[rank].append((step, max(starts), ends[step]))
    return Replay(spans)


def peak_live(schedule):
    found = []
    for steps in schedule:
        split = any(step.kind == "W" for step in steps)
        change = {"F": 1, "W" if split else "B": -1}
        counts = [0]
        for step in steps:
            counts.append(counts[-1] + change.get(step.kind, 0))
        found.append(max(counts))
    return found
