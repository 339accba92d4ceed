"""Checks of exercise 3.33: where ranks are on a grid, which axes are near, and the groups."""

from __future__ import annotations

import math
from itertools import chain, combinations, permutations, product

import torch
import torch.distributed as dist

from distlab.grading import exercise, expect_equal, expect_refusals, fail, refusal
from tests.phase3.mesh_cases import (
    GRIDS,
    SHAPES,
    batch_of,
    block,
    coordinates,
    holds,
    layout_of,
    on_line,
    plain,
    spec_of,
)


def subsets(sizes) -> list[tuple[str, ...]]:
    """All sets of axes, the names in falling order of the grid."""
    names = [*sizes][::-1]
    return [*chain.from_iterable(combinations(names, k) for k in range(len(names) + 1))]


@exercise("3.33", "virtual", asserts="coordinates")
def test_coordinates_are_row_major(impl, run):
    """The last axis has neighbours, and coordinates come in the order of the axes."""

    def body(ctx):
        grids = [impl.Grid(sizes) for sizes in GRIDS]
        return [[[*g.coordinates(r).items()] for r in range(g.world_size)] for g in grids]

    for sizes, got in zip(GRIDS, run(body, 1)[0], strict=True):
        want = [[*coordinates(sizes, rank).items()] for rank in range(len(got))]
        what = f"coordinates of all ranks of {plain(sizes)}"
        expect_equal([[*map(tuple, each)] for each in got], want, what=what, cause="coordinates")


@exercise("3.33", "virtual", asserts="line on line-refused refusals")
def test_lines_differ_on_the_named_axes(impl, run):
    """A line has all ranks that differ on the named axes at most; ``on`` leaves some out."""
    ends = {"pipeline": [2, 0], "data": [1]}

    def body(ctx):
        out = []
        for sizes in GRIDS:
            grid, on = impl.Grid(sizes), {a: c for a, c in ends.items() if max(c) < sizes.get(a, 0)}
            asked = product(subsets(sizes), range(grid.world_size))
            out += [[list(grid.line(r, axes)), list(grid.line(r, axes, on))] for axes, r in asked]
        return out, [refusal(grid.line, 0, ("nobody",)), refusal(grid.line, 1, ("expert", "day"))]

    got, refused = run(body, 1)[0]
    lines = iter(got)
    for sizes in GRIDS:
        on = {a: c for a, c in ends.items() if max(c) < sizes.get(a, 0)}
        for axes in subsets(sizes):
            for rank in range(math.prod(sizes.values())):
                whole, part = next(lines)
                what = f"{plain(sizes)}: line of rank {rank} on {axes}"
                expect_equal(whole, on_line(sizes, rank, axes), what=what, cause="line")
                want = on_line(sizes, rank, axes, on)
                expect_equal(part, want, what=f"{what}, where {on} count", cause="line-on")
    expect_refusals(refused, ["an axis that is not there", "one of two that is not there"])


def leaving(sizes, traffic, node_size: int) -> float:
    """Message by message: what each node's ranks send to the next rank of each line."""
    world = math.prod(sizes.values())
    nodes = [0.0] * -(-world // node_size)
    for rank in range(world):
        for axis in sizes:
            line = on_line(sizes, rank, [axis])
            after = line[(line.index(rank) + 1) % len(line)]
            if after // node_size != rank // node_size:
                nodes[rank // node_size] += traffic.get(axis, 0)
    return max(nodes)


SENT = {"tensor": 2.0**30 + 1, "pipeline": 7.0, "data": 30.0, "shard": 60.0, "expert": 45.0}
LARGE = {"data": 4, "pipeline": 2, "tensor": 4}


@exercise("3.33", "virtual", asserts="bytes-leaving")
def test_bytes_that_leave_the_busiest_node(impl, run):
    """Counted hop by hop, for nodes of any size; an axis without traffic sends nothing."""
    cases = [(sizes, size) for sizes in (LARGE, *GRIDS) for size in (1, 2, 3, 4, 8)]

    def body(ctx):
        return [impl.bytes_leaving(impl.Grid(sizes), SENT, size) for sizes, size in cases]

    for (sizes, size), got in zip(cases, run(body, 1)[0], strict=True):
        want, what = leaving(sizes, SENT, size), f"{plain(sizes)}, {size} ranks per node: bytes"
        expect_equal(float(got), want, what=what, cause="bytes-leaving")


@exercise("3.33", "virtual", asserts="arranged ties")
def test_the_best_order_sends_least(impl, run):
    """Also where the axis that sends most must not have the neighbours; the batch stays."""
    trap = {"shard": 16, "expert": 2}, {"shard": 100.0, "expert": 60.0}, 8
    cases = [(sizes, SENT, size) for sizes in (LARGE, *GRIDS) for size in (2, 4)]
    cases += [trap, ({"data": 2, "tensor": 2, "shard": 2}, {}, 2)]

    def body(ctx):
        grids = [impl.arranged(impl.Grid(s, batch_of(s)), t, n) for s, t, n in cases]
        return [[[*map(list, grid.sizes.items())], [*grid.batch]] for grid in grids]

    for (sizes, traffic, size), (got, batch) in zip(cases, run(body, 1)[0], strict=True):
        orders = [dict(order) for order in permutations(sizes.items())]
        want = min(orders, key=lambda order: leaving(order, traffic, size))
        what = f"{plain(sizes)} on nodes of {size} ranks, with {traffic}: the order"
        expect_equal([*map(tuple, got)], [*want.items()], what=what, cause="order")
        expect_equal(batch, [*batch_of(sizes)], what=f"{what}: the batch's axes", cause="batch")


@exercise("3.33", "virtual", asserts="bounds uneven")
def test_blocks_are_cut_one_axis_after_another(impl, run):
    """Sizes rounded up, the last blocks shorter or empty; a second axis cuts the block again."""
    more = (
        {"shape": [5, 7], "cut": {"tensor": 1, "data": 1, "shard": 0}},
        {
            "shard": 4,
            "data": 2,
            "tensor": 3,
        },
    )
    cases = [(spec_of(name, sizes), sizes) for sizes in GRIDS for name in SHAPES] + [more]

    def body(ctx):
        out = []
        for spec, sizes in cases:
            grid = impl.Grid(sizes)
            bounds = [impl.Spec(**spec).bounds(grid, rank) for rank in range(grid.world_size)]
            out.append([[list(pair) for pair in each] for each in bounds])
        return out

    for (spec, sizes), got in zip(cases, run(body, 1)[0], strict=True):
        whole = torch.arange(math.prod(spec["shape"])).view(spec["shape"])
        for rank, bounds in enumerate(got):
            own = whole[tuple(slice(*pair) for pair in bounds)]
            want = block(whole, spec, sizes, rank)
            what = f"{plain(sizes)}, rank {rank}, {spec}: the block {bounds} has elements"
            sizes_of = [end - begin for begin, end in bounds]
            expect_equal(sizes_of, [*want.shape], what=f"{what} of shape", cause="block")
            expect_equal(own.tolist(), want.tolist(), what=what, cause="block")


RULES = {
    "embed": [["pipeline", "data", "shard", "context", "expert"], 81],
    "norm": [["data", "shard", "context", "expert", "tensor"], 81],
    "up": [["data", "context", "expert"], 27],
    "scale": [["data", "shard", "context", "expert"], 81],
    "wrapped": [["context", "expert"], 9],
    "experts": [["data", "shard", "context"], 81],
    "down": [["data", "context", "expert"], 81],
}


@exercise("3.33", "virtual", asserts="rule")
def test_rules_for_gradients(impl, run):
    """Which axes sum a gradient, in the grid's order, and by which number it is divided."""
    sizes = {"pipeline": 3, "data": 3, "shard": 3, "context": 3, "expert": 3, "tensor": 3}

    def body(ctx):
        layout, grid = layout_of(impl, sizes), impl.Grid(sizes, batch_of(sizes))
        return {name: [*spec.rule(grid)] for name, spec in layout.items()}

    for name, (axes, divisor) in run(body, 1)[0].items():
        what = f"{spec_of(name, sizes)} with the batch's axes {batch_of(sizes)}"
        expect_equal([*axes], RULES[name][0], what=f"{what}: summed over", cause="rule-axes")
        expect_equal(divisor, RULES[name][1], what=f"{what}: divided by", cause="rule-divisor")


@exercise("3.33", "virtual", asserts="first-holder")
def test_each_block_has_one_first_holder(impl, run):
    """The lowest rank of those with a block, also where a tied or a late stage holds it."""

    def body(ctx):
        out = []
        for sizes in GRIDS:
            grid, layout = impl.Grid(sizes, batch_of(sizes)), layout_of(impl, sizes)
            ranks = range(grid.world_size)
            out += [[bool(s.first_holder(grid, r)) for r in ranks] for s in layout.values()]
        return out

    answers = iter(run(body, 1)[0])
    for sizes in GRIDS:
        for name in SHAPES:
            spec, seen, want = spec_of(name, sizes), set(), []
            for rank in range(math.prod(sizes.values())):
                cuts = tuple(coordinates(sizes, rank)[axis] for axis in spec.get("cut", {}))
                want.append(holds(spec, sizes, rank) and cuts not in seen)
                if holds(spec, sizes, rank):
                    seen.add(cuts)
            what = f"{plain(sizes)}, {spec}: first holders among the ranks"
            expect_equal(next(answers), want, what=what, cause="first-holder")


JOINED = [("data", "tensor"), ("tensor", "data"), ("pipeline", "shard", "data", "tensor")]


@exercise("3.33", "virtual gloo cuda", asserts="groups joined group-count group-refused resources")
def test_groups_of_axes_and_of_sums(impl, run, cases):
    """A group per set of ranks, each made once; asked for by axes in any order."""
    first, turned = {"data": 2, "shard": 1, "tensor": 2}, {"tensor": 2, "data": 3}
    grids = cases(first, turned, GRIDS[6], {"data": 1, "tensor": 1})
    by_size = {math.prod(sizes.values()): sizes for sizes in grids}

    def body(ctx):
        sizes = by_size[ctx.world_size]
        joined = [axes for axes in JOINED if {*axes} <= sizes.keys()]
        layout = layout_of(impl, sizes)
        before = dist.distributed_c10d._world.group_count
        mesh = impl.Mesh(impl.Grid(sizes, batch_of(sizes)), layout, joined)
        made, out = dist.distributed_c10d._world.group_count - before, []
        for axes in [*((axis,) for axis in sizes), *joined]:
            group = mesh.group(*axes)
            x = torch.full((1,), 2.0**ctx.rank, device=ctx.device)
            dist.all_reduce(x, group=group)
            out.append([sorted(dist.get_process_group_ranks(group)), int(x)])
        refused = [refusal(mesh.group, "night"), refusal(mesh.group, "data", "night")]
        if "pipeline" in sizes:
            refused.append(refusal(mesh.group, "tensor", "pipeline"))
        return made, out, refused

    worlds = [*by_size]
    for world, results in zip(worlds, run.worlds(body, worlds), strict=True):
        sizes = by_size[world]
        expect_groups(results, sizes, [axes for axes in JOINED if {*axes} <= sizes.keys()])


def expect_groups(results, sizes, joined) -> None:
    """A sum of one rank, or of ranks that do not hold the parameter, may have a group."""
    asked, ranks = [*((axis,) for axis in sizes), *joined], range(len(results))
    needed = {tuple(on_line(sizes, rank, axes)) for axes in asked for rank in ranks}
    allowed = set(needed)
    for name in SHAPES:
        spec = spec_of(name, sizes)
        terms = [a for a in sizes if a in batch_of(sizes) or a in spec.get("partial", [])]
        left = {*spec.get("cut", {}), *spec.get("done", [])}
        summed = [a for a in terms if a not in left]
        lines = [tuple(on_line(sizes, rank, summed, spec.get("on", {}))) for rank in ranks]
        allowed.update(lines)
        needed.update(line for r, line in enumerate(lines) if r in line and len(line) > 1)
    for rank, (made, got, refused) in enumerate(results):
        if not len(needed) <= made <= len(allowed):
            text = f"{plain(sizes)}: {made} groups were made, one per set of ranks is {len(needed)}"
            fail(text, cause="number-of-groups", rank=rank)
        for axes, (told, total) in zip(asked, got, strict=True):
            members = on_line(sizes, rank, axes)
            what = f"{plain(sizes)}: group of {axes}"
            expect_equal(told, members, what=what, rank=rank, cause="group-members")
            expect_equal(total, sum(2**r for r in members), what=f"{what}, its sum", rank=rank)
        expect_refusals(
            refused, ["group(night)", "group(data, night)", "no such group"][: len(refused)]
        )


@exercise("3.33", "virtual", asserts="mesh-refused refusals")
def test_a_grid_of_other_ranks_is_refused(impl, run):
    """A grid of another size, or an unknown axis: ValueError on all ranks before any group."""

    def body(ctx):
        before = dist.distributed_c10d._world.group_count
        good, spec = impl.Grid({"data": 2, "tensor": 2}), impl.Spec
        bad = [
            refusal(impl.Mesh, impl.Grid({"data": 2, "tensor": 3}), {}),
            refusal(impl.Mesh, impl.Grid({"data": 2}), {}),
            refusal(impl.Mesh, good, {}, [("data", "day")]),
            refusal(impl.Mesh, good, {"w": spec(shape=[2], cut={"day": 0})}),
            refusal(impl.Mesh, good, {"w": spec(shape=[2], on={"day": [0]})}),
            refusal(impl.Mesh, good, {"w": spec(shape=[2], partial=["day"])}),
            refusal(impl.Mesh, good, {"w": spec(shape=[2], done=["day"])}),
        ]
        return bad, dist.distributed_c10d._world.group_count - before

    results = run(body, 4)
    calls = [
        "6 ranks",
        "2 ranks",
        "joined: day",
        "cut: day",
        "on: day",
        "partial: day",
        "done: day",
    ]
    for rank, (bad, made) in enumerate(results):
        expect_refusals(bad, [f"Mesh with {call}" for call in calls], rank=rank)
        if made:
            fail(f"{made} groups were made before the refusal", cause="late-check", rank=rank)
