# for: 2.26
"""Written differently: F and B are sorted by the time of a rhythm, and W fill what is idle."""

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
