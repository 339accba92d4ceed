# for: 2.26
"""Written differently: a rank takes its next F or B in each unit of time, and W fill the gaps."""

from __future__ import annotations

from .pipeline_schedules import Step, needs


def written_out(plan, stages):
    names = list(plan)
    owed = [name for name in names if name[0] == "B"]
    names += ["W"] * (len(owed) - names.count("W"))
    found, backwards = [], 0
    for place, name in enumerate(names):
        if name != "W":
            before = names[:place].count(name)
            found.append(Step(name[0], stages[int(name[1:])], before))
            continue
        done = [step for step in found if step.kind == "B"]
        if backwards >= len(done):
            raise ValueError(f"name {place} of the plan is a W, and no backward is left")
        found.append(done[backwards]._replace(kind="W"))
        backwards += 1
    return found


def filled(compute, last, limit):
    """In each unit of time a rank takes its next F or B if it can, else a W. F only below the
    limit of what is kept; with ``limit`` reached a W comes first."""
    ranks = len(compute)
    todo = [steps[::-1] for steps in compute]
    later = [[] for _ in compute]
    kept = [0] * ranks
    order = [[] for _ in compute]
    done = set()
    while any(todo) or any(later):
        now = []
        for rank, steps in enumerate(todo):
            able = steps and done.issuperset(needs(steps[-1], last))
            if able and (steps[-1].kind == "B" or kept[rank] < limit):
                step = steps.pop()
                kept[rank] += step.kind == "F"
                if step.kind == "B":
                    later[rank].append(step._replace(kind="W"))
            elif later[rank]:
                step = later[rank].pop(0)
                kept[rank] -= 1
            else:
                continue
            order[rank].append(step)
            now.append(step)
        assert now, "nobody can go on"
        done.update(now)
    return order


def interleaved_zero_bubble(ranks, micro_batches, chunks):
    if ranks < 1 or chunks < 1 or micro_batches not in range(ranks, 10**9, ranks):
        raise ValueError(f"{micro_batches} micro-batches are no multiple of {ranks} ranks")
    compute = []
    for r in range(ranks):
        groups = [range(g, g + ranks) for g in range(0, micro_batches, ranks)]
        up = [(c * ranks + r, i) for g in groups for c in range(chunks) for i in g]
        down = [(c * ranks + r, i) for g in groups for c in reversed(range(chunks)) for i in g]
        steps = [Step("F", *each) for each in up[: ranks * chunks - r - 1]]
        for number, each in enumerate(down):
            steps += [Step("F", *e) for e in up[ranks * chunks - r - 1 + number :][:1]]
            steps.append(Step("B", *each))
        compute.append(steps)
    return filled(compute, ranks * chunks - 1, ranks * chunks)


def zero_bubble_v(ranks, micro_batches):
    if min(ranks, micro_batches) < 1:
        raise ValueError(f"there are {ranks} ranks, {micro_batches} micro-batches")
    n = max(micro_batches, 2 * ranks - 1)
    order = []
    for r in range(ranks):
        late = ranks - r
        first = [Step("F", r, i) for i in range(n)]
        second = [Step("F", 2 * ranks - 1 - r, i) for i in range(n)]
        back = [[f._replace(kind="B") for f in each] for each in (first, second)]
        steps, first = first[: 2 * late - 1], first[2 * late - 1 :]
        for k in range(n):
            if k < r:
                steps += [second[k], first.pop(0)]
            elif k < ranks:
                steps += [second[k], back[1].pop(0)]
            else:
                steps += [*first[:1], back[0].pop(0), second[k], back[1].pop(0)]
                first = first[1:]
        while back[1]:
            steps += [back[0].pop(0), back[1].pop(0)]
        order.append([s for s in [*steps, *back[0]] if s.micro_batch < micro_batches])
    return filled(order, 2 * ranks - 1, 2 * ranks)


def dual_pipe_v(ranks, micro_batches):
    if ranks < 1 or micro_batches < 2 * ranks:
        raise ValueError(f"{micro_batches} micro-batches are too few for {ranks} ranks")
    order = []
    for r in range(ranks):
        others = ranks - 1 - r
        up = {
            own: [Step("F", stage, i) for i in range(micro_batches)]
            for own, stage in enumerate((r, 2 * ranks - 1 - r))
        }
        down = {own: [s._replace(kind="B") for s in up[own]] for own in up}
        steps = [up[0].pop(0) for _ in range(2 * others)]
        steps += [up[own].pop(0) for _ in range(r + 1) for own in (0, 1)]
        for _ in range(others):
            steps += [down[1].pop(0), "W", up[1].pop(0)]
        while up[1]:
            for own in (0, 1):
                steps += [*up[own][:1], down[1 - own].pop(0), "W"]
                del up[own][:1]
        late = [step for both in zip(down[1], down[0], strict=False) for step in both]
        late += down[0][len(down[1]) :]
        waiting, mine = [], []
        for step in [*steps, *late]:
            if step == "W":
                mine.append(waiting.pop(0))
                continue
            mine.append(step)
            if step.kind == "B":
                waiting.append(step._replace(kind="W"))
        order.append([*mine, *waiting])
    return order
