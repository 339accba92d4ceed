"""What the tier calls a deadlock is one in a model that visits all interleavings, and only that.

The model (``explorer.py``) shares no code with the toolkit. Programs are drawn from a fixed seed:
from an order that goes well, in which some operations of a rank have changed places.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from distlab.ranks import RankContext, RankFailure
from distlab.virtual import run_virtual
from tests.distlab.explorer import Explorer, Operation, Step

pytestmark = pytest.mark.verdict

MODES = ("nccl2", "legacy lazy", "legacy eager")
PROGRAMS = 102
PAIR = (0, 1)  # a group beside that of all ranks


def drawn(rng: random.Random) -> list[list[Step]]:
    """The steps of three ranks: eight operations each, or more."""
    size = 3
    entries: list[list[list[Operation]]] = [[] for _ in range(size)]
    while min(sum(map(len, own)) for own in entries) < 8:
        kind = rng.choice(("message", "message", "exchange", "ring", "all", "all", "pair"))
        one, other = rng.sample(range(size), 2)
        if kind == "message":
            entries[one].append([("send", other)])
            entries[other].append([("recv", one)])
        elif kind == "exchange":
            for a, b in ((one, other), (other, one)):
                entries[a].append([("recv", b), ("send", b)])
        elif kind == "ring":
            for rank in range(size):
                entries[rank].append([("recv", (rank - 1) % size), ("send", (rank + 1) % size)])
        else:
            members = PAIR if kind == "pair" else tuple(range(size))
            for rank in members:
                entries[rank].append([("all", members)])
    for own in entries:
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            at = rng.randrange(len(own) - 1)
            own[at], own[at + 1] = own[at + 1], own[at]
    return [_with_waits(own, rng) for own in entries]


def _with_waits(entries: list[list[Operation]], rng: random.Random) -> list[Step]:
    """Issue each entry, and wait for it at once or a little later."""
    steps: list[Step] = []
    open_: list[int] = []
    for name, operations in enumerate(entries):
        steps.append(("issue", name, operations))
        open_.append(name)
        while open_ and (len(open_) > 2 or rng.random() < 0.6):
            steps.append(("wait", open_.pop(rng.randrange(len(open_)))))
    return steps + [("wait", name) for name in open_]


def play(ctx: RankContext, programs: list[list[Step]]) -> bool:
    """Run a program on this rank."""
    groups = {(0, 1, 2): dist.group.WORLD, PAIR: dist.new_group(PAIR)}
    handles: dict[int, list[dist.Work]] = {}
    for kind, name, *rest in programs[ctx.rank]:
        if kind == "wait":
            for handle in handles.pop(name):
                handle.wait()
            continue
        handles[name] = _issued(ctx, rest[0], groups)
    return True


def _issued(ctx: RankContext, operations: list[Operation], groups: dict) -> list[dist.Work]:
    tensors = [torch.zeros(2, device=ctx.device) for _ in operations]
    calls = {"send": dist.isend, "recv": dist.irecv}
    if len(operations) > 1:
        pairs = zip(operations, tensors, strict=True)
        return dist.batch_isend_irecv([dist.P2POp(calls[k], t, about) for (k, about), t in pairs])
    (kind, about), tensor = operations[0], tensors[0]
    if kind == "all":
        return [dist.all_reduce(tensor, group=groups[about], async_op=True)]
    return [calls[kind](tensor, about)]


def test_deadlocks_are_those_of_all_interleavings() -> None:
    rng, verdicts = random.Random(14), Counter()
    for number in range(PROGRAMS):
        programs, rules = drawn(rng), MODES[number % len(MODES)]
        lazy = rules == "legacy lazy"
        made = frozenset() if lazy else frozenset({(0, 1, 2), PAIR})
        expected = Explorer(programs, lazy, made).ends_of(200_000)
        assert len(expected) == 1, "the order of events decides"
        ended, said = True, "deadlock: "
        try:
            run_virtual(play, 3, programs, rules=rules, seed=number, seeds=2)
        except RankFailure as failure:
            ended, said = False, failure.message
        assert said.startswith("deadlock: "), said
        assert {ended} == expected, (number, rules, programs)
        verdicts[rules, ended] += 1
    stuck = [verdicts[rules, False] for rules in MODES]
    assert sum(stuck) >= 30, verdicts
    assert min(stuck) >= 5, verdicts
    assert min(verdicts[rules, True] for rules in MODES) >= 5, verdicts
