# for: 2.26
"""Written differently: loops over phases, each kind of step with a count of its own."""

from __future__ import annotations

from collections import defaultdict

from .pipeline_schedules import Step


class Rank:
    """The steps of one rank so far."""

    def __init__(self, stages):
        self.stages, self.steps, self.later = stages, [], []
        self.next = defaultdict(int)

    def take(self, kind, own):
        stage = self.stages[own]
        step = Step(kind, stage, self.next[kind, stage])
        self.next[kind, stage] += 1
        self.steps.append(step)
        if kind == "B":
            self.later.insert(0, step)

    def weights(self):
        if not self.later:
            raise ValueError(f"a W after {self.steps[-1:]}, and no B has left any")
        self.steps.append(Step("W", *self.later.pop()[1:]))

    def back(self, own):
        self.take("B", own)
        self.weights()

    def end(self):
        while self.later:
            self.weights()
        return self.steps


def written_out(plan, stages):
    rank = Rank(stages)
    for name in plan:
        if name == "W":
            rank.weights()
        else:
            rank.take(name[:1], int(name[1:]))
    return rank.end()


def interleaved_zero_bubble(ranks, micro_batches, chunks):
    if min(ranks, micro_batches, chunks) < 1 or micro_batches % ranks:
        raise ValueError(f"{micro_batches} micro-batches, {ranks} ranks with {chunks} stages each")
    order = []
    for r in range(ranks):
        rank = Rank([c * ranks + r for c in range(chunks)])
        owns = [k // ranks % chunks for k in range(micro_batches * chunks)]
        ahead = ranks * chunks - r - 1
        for own in owns[:ahead]:
            rank.take("F", own)
        for k, own in enumerate(owns):
            if k + ahead < len(owns):
                rank.take("F", owns[k + ahead])
            rank.take("B", chunks - 1 - own)
            if k >= r:
                rank.weights()
        order.append(rank.end())
    return order


def zero_bubble_v(ranks, micro_batches):
    if ranks <= 0 or micro_batches <= 0:
        raise ValueError(f"{ranks} ranks and {micro_batches} micro-batches")
    m = max(micro_batches, 2 * ranks - 1)
    order = []
    for r in range(ranks):
        rank = Rank([r, 2 * ranks - r - 1])
        for _ in range(2 * (ranks - r) - 1):
            rank.take("F", 0)
        for _ in range(r):
            rank.take("F", 1)
            rank.take("F", 0)
        for _ in range(ranks - r):
            rank.take("F", 1)
            rank.back(1)
        while rank.next["F", rank.stages[1]] < m:
            if rank.next["F", r] < m:
                rank.take("F", 0)
            rank.back(0)
            rank.take("F", 1)
            rank.back(1)
        for _ in range(r):
            rank.take("B", 0)
            rank.take("B", 1)
        for _ in range(ranks - r):
            rank.take("B", 0)
            rank.weights()
        order.append([s for s in rank.end() if s.micro_batch in range(micro_batches)])
    return order


def dual_pipe_v(ranks, micro_batches):
    if ranks < 1 or micro_batches < 2 * ranks:
        raise ValueError(f"{ranks} ranks need {2 * ranks} micro-batches, not {micro_batches}")
    order = []
    for r in range(ranks):
        rank = Rank([r, 2 * ranks - r - 1])
        others = ranks - r - 1
        for _ in range(2 * others):
            rank.take("F", 0)
        for _ in range(r + 1):
            rank.take("F", 0)
            rank.take("F", 1)
        for _ in range(others):
            rank.back(1)
            rank.take("F", 1)
        for k in range(micro_batches - r - 1):
            if k < micro_batches - 2 * ranks + r + 1:
                rank.take("F", 0)
            elif k >= micro_batches - ranks:
                break
            rank.back(1)
            rank.take("F", 1)
            rank.back(0)
        for k in range(r + 1):
            for own in (1, 0):
                if 2 * k + (own == 0) < r + 1:
                    rank.back(own)
                else:
                    rank.take("B", own)
        for _ in range(others):
            rank.weights()
            rank.take("B", 0)
        order.append(rank.end())
    return order
