# for: 2.9, 2.21
"""Written differently: queues, sets of steps, and a sorted graph in place of a walk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate

from solutions.phase2_advanced.pipeline_schedules import (
    Step,
    message_after,
    messages_of,
    needs,
    rank_of_stages,
)

COMPUTE = ("F", "B", "W")

COSTS = {"F": 1.0, "B": 2.0}

SPLIT_COSTS = {"F": 1.0, "B": 1.0, "W": 1.0}

Schedule = Sequence[Sequence[Step]]


def with_messages(order: Schedule) -> list[list[Step]]:
    owner = rank_of_stages(order)
    last = max(owner, default=-1)
    queues = [list(reversed(steps)) for steps in order]
    lists: list[list[Step]] = [[] for _ in order]
    happened: set[Step] = set()
    while any(queues):
        stuck = True
        for rank in reversed(range(len(queues))):
            queue = queues[rank]
            if not queue or not all(need in happened for need in needs(queue[-1], last)):
                continue
            step = queue.pop()
            happened.add(step)
            lists[rank].append(step)
            stuck = False
            pair = message_after(step, last)
            if pair is None:
                continue
            peer = owner.get(pair[1].stage)
            if peer is not None and peer != rank:
                lists[rank].append(pair[0])
                lists[peer].append(pair[1])
        if stuck:
            heads = [str(queue[-1]) for queue in queues if queue]
            raise ValueError("nobody can go on; the next steps are " + " ".join(heads))
    return lists


def validate(schedule: Schedule, stages: int, micro_batches: int) -> None:
    for number, name in ((stages, "stages"), (micro_batches, "micro-batches")):
        if number < 1:
            raise ValueError(f"{name}: {number} is below 1")
    owner = rank_of_stages(schedule)
    if set(owner) != set(range(stages)):
        raise ValueError(f"stages {sorted(owner)}, expected 0 to {stages - 1}")
    kinds = ["F", "B"]
    if any(step.kind == "W" for steps in schedule for step in steps):
        kinds.append("W")
    expected: list[set[Step]] = [set() for _ in schedule]
    crossing: dict[Step, Step] = {}
    for stage, rank in owner.items():
        for i in range(micro_batches):
            for kind in kinds:
                step = Step(kind, stage, i)
                expected[rank].add(step)
                for send, receive in messages_of([step], stages - 1):
                    if owner[receive.stage] != rank:
                        crossing[send] = receive
                        expected[rank].add(send)
                        expected[owner[receive.stage]].add(receive)
    for rank, (steps, wanted) in enumerate(zip(schedule, expected, strict=True)):
        if set(steps) != wanted:
            raise ValueError(
                f"rank {rank}: {sorted(set(steps) ^ wanted)[:4]} missing or unexpected"
            )
        if len(steps) != len(wanted):
            twice = [step for step, count in Counter(steps).items() if count > 1]
            raise ValueError(f"rank {rank}: more than once: {twice[:4]}")
    _run_through(schedule, owner, crossing)


def _run_through(
    schedule: Schedule, rank_of: Mapping[int, int], crossing: Mapping[Step, Step]
) -> None:
    last = max(rank_of)
    for rank, steps in enumerate(schedule):
        at = {step: place for place, step in enumerate(steps)}
        for step in steps:
            before = []
            if step.kind in COMPUTE:
                for need in needs(step, last):
                    here = rank_of[need.stage] == rank
                    before.append(need if here else Step("recv " + need.kind, *step[1:]))
            elif step in crossing:
                before.append(Step(step.kind[-1], *step[1:]))
            for need in before:
                if need not in at or at[need] > at[step]:
                    raise ValueError(f"rank {rank}: {step} comes before {need}")
    sender = {receive: send for send, receive in crossing.items()}
    graph: TopologicalSorter[Step] = TopologicalSorter()
    for steps in schedule:
        nodes = [sender.get(step, step) for step in steps]
        for place, node in enumerate(nodes):
            graph.add(node, *nodes[max(place - 1, 0) : place])
    try:
        graph.prepare()
    except CycleError as error:
        circle = " <- ".join(str(Step(*step)) for step in error.args[1])
        raise ValueError(f"a deadlock: {circle}") from None


@dataclass(frozen=True)
class Replay:
    spans: list[list[tuple[Step, float, float]]]

    @property
    def seconds(self) -> float:
        return max((end for spans in self.spans for _, _, end in spans))

    @property
    def bubble(self) -> float:
        idle = 0.0
        for spans in self.spans:
            idle += self.seconds - sum((end - start for _, start, end in spans))
        whole = self.seconds * len(self.spans)
        return idle / whole if whole > 0 else 0.0


def replay(
    schedule: Schedule, costs: Mapping[str, float] | None = None, *, message: float = 0.0
) -> Replay:
    owner = rank_of_stages(schedule)
    last = max(owner, default=-1)
    work = [[step for step in steps if step.kind in COMPUTE] for steps in schedule]
    if costs is None:
        costs = SPLIT_COSTS if any(s.kind == "W" for steps in work for s in steps) else COSTS
    known = {step for steps in work for step in steps}
    waits: dict[Step, list[Step]] = {}
    for steps in work:
        for place, step in enumerate(steps):
            waits[step] = [*needs(step, last), *steps[max(place - 1, 0) : place]]
            if not known.issuperset(waits[step]):
                raise ValueError(f"{step} waits for a step that is nowhere")
    try:
        common = list(TopologicalSorter(waits).static_order())
    except CycleError:
        raise ValueError("ranks wait for each other in a circle") from None
    ended: dict[Step, float] = {}
    started: dict[Step, float] = {}
    for step in common:
        begin = 0.0
        for need in waits[step]:
            far = owner[need.stage] != owner[step.stage]
            begin = max(begin, ended[need] + message * far)
        started[step], ended[step] = (begin, begin + costs[step.kind])
    return Replay([[(step, started[step], ended[step]) for step in steps] for steps in work])


def peak_live(schedule: Schedule) -> list[int]:

    def peak(steps: Sequence[Step]) -> int:
        kinds = [step.kind for step in steps]
        last_reader = "W" if "W" in kinds else "B"
        changes = {"F": 1, last_reader: -1}
        return max(accumulate((changes.get(kind, 0) for kind in kinds), initial=0))

    return [peak(steps) for steps in schedule]
