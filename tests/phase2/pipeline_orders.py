"""Schedules for the checks of the pipeline exercises: made, walked and timed by code of their own.

Nothing here calls the implementation under test.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

Plain = tuple[str, int, int]  # kind, stage, micro-batch
Steps = Sequence[Sequence[Plain]]  # per rank its steps


def plain(schedule: Any) -> list[list[Plain]]:
    """A schedule as plain data, as it comes back from a rank."""
    return [[(str(k), int(s), int(i)) for k, s, i in steps] for steps in schedule]


def as_steps(impl: Any, schedule: Steps) -> Any:
    """Plain data as the implementation's own steps."""
    step = impl.module("pipeline_schedules").Step
    return [[step(*each) for each in steps] for steps in schedule]


def placement(kind: str, ranks: int, chunks: int) -> list[int]:
    """The rank of each stage: ``"round"`` (0, 1, 0, 1), ``"v"`` (0, 1, 1, 0), ``"block"``."""
    if kind == "block":
        return [s // chunks for s in range(ranks * chunks)]
    rounds = [list(range(ranks)) for _ in range(chunks)]
    if kind == "v":
        rounds = [r[::-1] if c % 2 else r for c, r in enumerate(rounds)]
    return [rank for each in rounds for rank in each]


def needs(step: Plain, last: int) -> list[Plain]:
    """What must have been computed before."""
    kind, s, i = step
    if kind == "F":
        return [("F", s - 1, i)] if s else []
    if kind == "W":
        return [("B", s, i)]
    return [("F", s, i)] + ([("B", s + 1, i)] if s < last else [])


def any_order(seed: int, rank_of: list[int], m: int, kinds: str = "FB") -> list[list[Plain]]:
    """A possible order of compute steps in which every choice was made by chance."""
    draws = random.Random(seed)
    last = len(rank_of) - 1
    left = {(k, s, i) for k in kinds for s in range(last + 1) for i in range(m)}
    done: set[Plain] = set()
    order: list[list[Plain]] = [[] for _ in range(max(rank_of) + 1)]
    while left:
        ready = sorted(step for step in left if done.issuperset(needs(step, last)))
        step = draws.choice(ready)
        left.remove(step)
        done.add(step)
        order[rank_of[step[1]]].append(step)
    return order


def early_receives(ranks: int, m: int) -> list[list[Plain]]:
    """All forwards first, with messages: each receive is posted one compute step early."""
    schedule = []
    for r in range(ranks):
        steps: list[Plain] = []
        for kind, source, target in (("F", r > 0, r < ranks - 1), ("B", r < ranks - 1, r > 0)):
            receives: list[Plain] = [(f"recv {kind}", r, i) for i in range(m) if source]
            steps += receives[:1]
            for i in range(m):
                steps += receives[i + 1 : i + 2]
                steps.append((kind, r, i))
                steps += [(f"send {kind}", r, i)] if target else []
        schedule.append(steps)
    return schedule


def one_after_another(ranks: int, m: int) -> list[list[Plain]]:
    """Every micro-batch goes forward and backward before the next one starts."""
    return [[(k, r, i) for i in range(m) for k in "FB"] for r in range(ranks)]


def messages(order: Steps) -> dict[Plain, tuple[Plain, int, int]]:
    """Every send that an order needs: (its receive, sending rank, receiving rank)."""
    rank_of = {s: rank for rank, steps in enumerate(order) for _, s, _ in steps}
    found = {}
    for steps in order:
        for kind, s, i in steps:
            to = {"F": s + 1, "B": s - 1}.get(kind, -1)
            if rank_of.get(to, rank_of[s]) != rank_of[s]:
                found[f"send {kind}", s, i] = (f"recv {kind}", to, i), rank_of[s], rank_of[to]
    return found


def completed(seed: int, order: Steps) -> list[list[Plain]]:
    """A valid schedule with the order's messages: each as late as chance wants, both ends at once.

    Messages of one direction between two ranks keep their order.
    """
    draws = random.Random(seed)
    crossing = messages(order)
    last = max(s for steps in order for _, s, _ in steps)
    rank_of = {s: rank for rank, steps in enumerate(order) for _, s, _ in steps}
    left = [list(reversed(steps)) for steps in order]
    out: list[list[Plain]] = [[] for _ in order]
    waiting: list[Plain] = []
    there: set[Plain] = set()  # computed, and known where it is needed

    def out_rank(steps: list[Plain]) -> int:
        return rank_of[steps[-1][1]]

    def flush() -> None:
        send = waiting.pop(0)
        receive, source, target = crossing[send]
        out[source].append(send)
        out[target].append(receive)
        there.add((send[0][-1], send[1], send[2]))

    while any(left) or waiting:
        ready = [
            steps
            for steps in left
            if steps
            and all(
                need in there or (need in done_on(out) and rank_of[need[1]] == out_rank(steps))
                for need in needs(steps[-1], last)
            )
        ]
        if waiting and (not ready or draws.random() < 0.5):
            flush()
            continue
        step = draws.choice(ready).pop()
        out[rank_of[step[1]]].append(step)
        send = (f"send {step[0]}", step[1], step[2])
        if send in crossing:
            waiting.append(send)
    return out


def done_on(out: list[list[Plain]]) -> set[Plain]:
    """All compute steps so far."""
    return {step for steps in out for step in steps if len(step[0]) == 1}


def problem_of(schedule: Steps, stages: int, m: int) -> tuple[str, str]:
    """(cause, sentence) of what is wrong with a schedule with messages; ("", "") if nothing is."""
    have = Counter(step for steps in schedule for step in steps)
    kinds = "FBW" if any(step[0] == "W" for step in have) else "FB"
    every = {(k, s, i) for k in kinds for s in range(stages) for i in range(m)}
    if not have:
        return "empty", "the schedule has no steps at all"
    compute = {step: n for step, n in have.items() if len(step[0]) == 1}
    for step in sorted(every - set(compute)):
        return "incomplete", f"{_name(step)} is nowhere in the schedule"
    for step, count in sorted(compute.items()):
        if step not in every or count > 1:
            return "too-often", f"{_name(step)} is there {count} times"
    crossing = messages([[x for x in steps if len(x[0]) == 1] for steps in schedule])
    want = {*crossing, *(receive for receive, _, _ in crossing.values())}
    moved = {step: n for step, n in have.items() if len(step[0]) > 1}
    for step in sorted(want - set(moved)):
        return "message-missing", f"{_name(step)} is missing"
    for step, count in sorted(moved.items()):
        if step not in want or count > 1:
            return "message-too-often", f"{_name(step)} is there {count} times"
    return _walk(schedule, crossing, stages - 1)


def _walk(
    schedule: Steps, crossing: dict[Plain, tuple[Plain, int, int]], last: int
) -> tuple[str, str]:
    """Take all steps with rendezvous sends."""
    left = [list(reversed(steps)) for steps in schedule]
    known: list[set[Plain]] = [set() for _ in schedule]  # computed or received, per rank
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(left):
            while steps and not steps[-1][0].startswith("recv"):
                step = steps[-1]
                own = (step[0][-1], step[1], step[2])
                before = [own] if step in crossing else needs(step, last)
                for need in before:
                    if need not in known[rank]:
                        text = f"rank {rank} comes to {_name(step)} before it has {_name(need)}"
                        return "too-early", text
                if step in crossing:
                    receive, _, target = crossing[step]
                    if not left[target] or left[target][-1] != receive:
                        break
                    left[target].pop()
                    known[target].add(own)
                else:
                    known[rank].add(step)
                steps.pop()
                moved = True
    if any(left):
        stuck = [f"rank {r} at {_name(steps[-1])}" for r, steps in enumerate(left) if steps]
        return "deadlock", f"with sends that wait for their receive it stops: {', '.join(stuck)}"
    return "", ""


def _name(step: Plain) -> str:
    return f"{step[0]}({step[1]}, {step[2]})"


def times(order: Steps, costs: dict[str, float], message: float = 0.0) -> dict[Plain, float]:
    """When each compute step ends, if nobody waits for anything but what it needs."""
    last = max(step[1] for steps in order for step in steps)
    rank_of = {step[1]: rank for rank, steps in enumerate(order) for step in steps}
    left = [[x for x in reversed(steps) if len(x[0]) == 1] for steps in order]
    ends: dict[Plain, float] = {}
    free = [0.0] * len(order)
    while any(left):
        rank, step = next(
            (r, steps[-1])
            for r, steps in enumerate(left)
            if steps and all(need in ends for need in needs(steps[-1], last))
        )
        arrivals = [
            ends[n] + (message if rank_of[n[1]] != rank else 0.0) for n in needs(step, last)
        ]
        free[rank] = ends[step] = max([free[rank], *arrivals]) + costs[step[0]]
        left[rank].pop()
    return ends


def bubble(order: Steps, costs: dict[str, float], message: float = 0.0) -> float:
    """The idle share of all ranks' time."""
    ends = times(order, costs, message)
    busy = sum(costs[step[0]] for step in ends)
    return 1 - busy / (len(order) * max(ends.values()))


def peaks(order: Steps) -> list[int]:
    """Per rank, the most forwards whose last backward step has not come."""
    found = []
    for steps in order:
        last = "W" if any(step[0] == "W" for step in steps) else "B"
        live = [0]
        for kind, _, _ in steps:
            live.append(live[-1] + (kind == "F") - (kind == last))
        found.append(max(live))
    return found
