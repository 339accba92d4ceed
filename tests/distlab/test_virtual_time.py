"""Virtual time: closed forms hold exactly, overlap overlaps, clusters are read strictly."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.grading.runners import VirtualRunner
from distlab.hardware.clusters import names, numbers
from distlab.hardware.collectives import ALGORITHMS, collective_time
from distlab.ranks import RankContext
from distlab.virtual import Cluster, load_cluster, run_virtual
from solutions.phase3_multi_node import (
    halving_doubling,
    ring_allreduce,
    segmented_ring,
    tree_allreduce,
)

NODE = dataclasses.replace(load_cluster("dgx-h100"), gpus_per_node=256, nics_per_node=256)
ALPHA, BETA = NODE.inside.alpha, NODE.inside.beta


def exact(seconds: float):
    return pytest.approx(seconds, rel=1e-12)


def ring(ctx: RankContext, n: int) -> None:
    """A plain ring all-reduce of ``n`` elements per chunk, from messages."""
    w, r = ctx.world_size, ctx.rank
    chunks, buffer = [torch.ones(n) for _ in range(w)], torch.empty(n)
    for step in range(2 * (w - 1)):
        send, receive = (r - step) % w, (r - step - 1) % w
        handle = dist.isend(chunks[send], (r + 1) % w)
        dist.recv(buffer, (r - 1) % w)
        handle.wait()
        chunks[receive].copy_(chunks[receive] + buffer if step < w - 1 else buffer)
    assert chunks[0][0] == w


@pytest.mark.parametrize("world_size", [2, 3, 8, 64])
def test_ring_of_messages_takes_what_the_formula_says(world_size: int) -> None:
    n = 1000
    results = run_virtual(ring, world_size, n, cluster=NODE, ledger=False)
    want = 2 * (world_size - 1) * (ALPHA + 4 * n * BETA)
    assert results.clocks == [exact(want)] * world_size


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_patterns_of_phase_3_take_their_closed_forms(world_size: int) -> None:
    segments = 3
    segment = math.ceil(ALPHA / BETA / 4)  # elements that take as long as the latency
    n = segments * segment * world_size
    shape, rounds = (world_size, 1, world_size), math.log2(world_size)

    def plain(ctx: RankContext) -> None:
        ring_allreduce.ring_all_reduce(torch.empty(n))

    def segmented(ctx: RankContext) -> None:
        segmented_ring.segmented_ring_all_reduce(torch.empty(n), segment_bytes=4 * segment)

    def tree(ctx: RankContext) -> None:
        tree_allreduce.tree_all_reduce(torch.empty(n))

    def halving(ctx: RankContext) -> None:
        halving_doubling.halving_doubling_all_reduce(torch.empty(n))

    for body, want in (
        (plain, ALGORITHMS["ring"](4 * n, shape, NODE)),
        (segmented, 2 * (world_size - 1) / world_size * 4 * n * BETA + ALPHA),
        (tree, 2 * rounds * (ALPHA + 4 * n * BETA)),
        (halving, ALGORITHMS["halving"](4 * n, shape, NODE)),
    ):
        assert run_virtual(body, world_size, cluster=NODE).clock == exact(want)


def test_checks_can_ask_for_virtual_time() -> None:
    results = VirtualRunner((), 5, "cpu").simulate(ring, 3, 1000, cluster=NODE)
    assert results.clock == exact(4 * (ALPHA + 4000 * BETA))


def test_tree_halving_naive_and_pipeline_from_messages() -> None:
    n, w = 4096, 8

    def tree(ctx: RankContext) -> None:  # binomial broadcast: log2 W steps
        x, step = torch.ones(n), 1
        while step < w:
            if ctx.rank < step and ctx.rank + step < w:
                dist.send(x, ctx.rank + step)
            elif step <= ctx.rank < 2 * step:
                dist.recv(x, ctx.rank - step)
            step *= 2

    def halving(ctx: RankContext) -> None:  # reduce-scatter, then all-gather, by exchanges
        sizes = [n // 2**k for k in range(1, 4)]
        for distance, size in zip((4, 2, 1, 1, 2, 4), sizes + sizes[::-1], strict=True):
            partner = ctx.rank ^ distance
            handle = dist.isend(torch.ones(size), partner)
            dist.recv(torch.empty(size), partner)
            handle.wait()

    def naive(ctx: RankContext) -> None:
        x = torch.ones(n)
        for r in range(1, w):
            if ctx.rank == 0:
                dist.recv(x, r)
            elif ctx.rank == r:
                dist.send(x, 0)
        for r in range(1, w):
            if ctx.rank == 0:
                dist.send(x, r)
            elif ctx.rank == r:
                dist.recv(x, 0)

    nbytes = 4 * n
    for body, want in (
        (tree, 3 * (ALPHA + nbytes * BETA)),
        (halving, 6 * ALPHA + 2 * (w - 1) / w * nbytes * BETA),
        (naive, 2 * (w - 1) * (ALPHA + nbytes * BETA)),
    ):
        assert run_virtual(body, w, cluster=NODE).clock == exact(want)


def test_pipeline_bubble() -> None:
    """p stages and m micro-batches of equal time: (p-1)/(m+p-1) of the time is bubble."""
    import time

    p, m, seconds = 4, 8, 0.5

    def body(ctx: RankContext) -> None:
        x = torch.ones(1)
        for _ in range(m):
            if ctx.rank:
                dist.recv(x, ctx.rank - 1)
            time.sleep(seconds)
            if ctx.rank < p - 1:
                dist.send(x, ctx.rank + 1)

    results = run_virtual(body, p, cluster=NODE)
    assert results.clock == pytest.approx((m + p - 1) * seconds, rel=1e-4)
    assert 1 - m * seconds / results.clock == pytest.approx((p - 1) / (m + p - 1), rel=1e-3)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_backends_collective_takes_what_its_algorithm_says(name: str) -> None:
    def body(ctx: RankContext) -> None:
        dist.all_reduce(torch.ones(5000))

    cluster = load_cluster("p4d-a100")
    for w in (2, 8, 32):
        got = run_virtual(body, w, cluster=cluster, algorithm=name).clock
        assert got == exact(collective_time("all_reduce", 20_000, tuple(range(w)), cluster, name))
    group = tuple(range(8))
    n = 1e6
    flat = {
        "ring": 14 * (cluster.inside.alpha + n / 8 * cluster.inside.beta),
        "tree": 6 * cluster.inside.alpha + 2 * n * cluster.inside.beta,
        "hierarchical": 14 * (cluster.inside.alpha + n / 8 * cluster.inside.beta),
        "naive": 14 * (cluster.inside.alpha + n * cluster.inside.beta),
        "halving": 6 * cluster.inside.alpha + 14 / 8 * n * cluster.inside.beta,
    }
    got = collective_time("all_reduce", n, group, cluster, name)
    assert got == exact(cluster.launch + flat[name])


def test_slow_cards_are_shared_and_oversubscription_counts() -> None:
    base = load_cluster("ethernet-v100")  # one card per node
    two = dataclasses.replace(base, gpus_per_node=2)

    def pairs(ctx: RankContext) -> None:  # both ranks of node 0 send to node 1 at once
        x = torch.ones(250_000)
        if ctx.rank < 2:
            dist.send(x, ctx.rank + 2)
        else:
            dist.recv(x, ctx.rank - 2)

    alone = base.between.alpha + 1e6 * base.between.beta
    assert run_virtual(pairs, 4, cluster=two).clock == exact(alone + 1e6 * base.between.beta)
    own = dataclasses.replace(two, nics_per_node=2)
    assert run_virtual(pairs, 4, cluster=own).clock == exact(alone)
    crowded = dataclasses.replace(own, oversubscription=4.0)
    assert run_virtual(pairs, 4, cluster=crowded).clock > 1.5 * alone


def test_asynchronous_communication_overlaps_with_compute() -> None:
    import time

    def body(ctx: RankContext, compute: float) -> None:
        handle = dist.all_reduce(torch.ones(1_000_000), async_op=True)
        time.sleep(compute)
        handle.wait()

    alone = run_virtual(body, 4, 0.0, cluster=NODE).clock
    assert run_virtual(body, 4, alone / 2, cluster=NODE).clock == pytest.approx(alone, rel=1e-3)
    assert run_virtual(body, 4, 3 * alone, cluster=NODE).clock == pytest.approx(3 * alone, rel=1e-3)


def test_roofline_counts_flops_bytes_and_memory() -> None:
    gpu = NODE.gpu

    def body(ctx: RankContext, device: str, n: int) -> int:
        a = torch.ones(n, n, device=device, dtype=torch.bfloat16)
        b = a @ a
        c = b + a
        del b
        return c.numel()

    # a processor without instructions for bfloat16 computes the product of 2,048 for a minute
    for device, n in (("meta", 2048), ("cpu", 256)):
        results = run_virtual(body, 1, device, n, cluster=NODE, compute="roofline")
        product = max(2 * n**3 / gpu.flops["bfloat16"], 3 * n**2 * 2 / gpu.bandwidth, gpu.kernel)
        memory = n**2 * 2 / gpu.bandwidth
        want = max(memory, gpu.kernel) + product + max(3 * memory, gpu.kernel)
        assert results.clock == pytest.approx(want, rel=1e-6)
        assert results.flops == [2 * n**3]
        assert results.peaks == [3 * n**2 * 2]


def test_small_values_are_known_on_meta_tensors_and_large_ones_are_not() -> None:
    def body(ctx: RankContext) -> list:
        counts = torch.tensor([ctx.rank + 1, 7], device="meta")
        dist.all_reduce(counts)
        loss = torch.empty(10_000, device="meta").sum()
        return [counts.tolist(), (counts * 2)[1].item(), loss.item(), counts.device.type]

    for got in run_virtual(body, 3, compute="roofline"):
        assert got == [[6, 21], 42, 0.0, "meta"]


def test_operators_without_a_rule_work_and_are_listed() -> None:
    def body(ctx: RankContext) -> None:
        torch.empty(5000, device="meta").sort()

    assert list(run_virtual(body, 1, compute="roofline").unmodelled) == ["aten.sort.default"]


# -- cluster descriptions -------------------------------------------------------------------------
@pytest.mark.parametrize("name", names())
def test_every_number_of_a_cluster_has_a_source(name: str) -> None:
    cluster = load_cluster(name)
    for field, value in numbers(cluster):
        assert value >= 0
        assert not value or cluster.sources.get(field) or cluster.sources.get(field.split(".")[0])
    for op in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather"):
        times = [collective_time(op, n, tuple(range(32)), cluster) for n in (1, 1e6, 1e9)]
        assert times == sorted(times)
        assert all(math.isfinite(t) and t > 0 for t in times)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("bandwidth: 370.8e9", "bandwidth: -1"), "inside.bandwidth must be positive"),
        (("  inside.alpha: NCCL", "  inside.gamma: NCCL"), "says nothing about inside.alpha"),
        (("launch: 8.4e-6", "lunch: 8.4e-6"), "unknown field lunch"),
        (("gpus_per_node: 8\n", ""), "not a cluster description"),
        (("gpu:", "gpu: ["), "not a cluster description"),
    ],
)
def test_wrong_descriptions_are_refused(tmp_path: Path, change: tuple, words: str) -> None:
    text = (Path(__file__).parents[2] / "clusters" / "dgx-h100.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(*change, 1))
    with pytest.raises(ValueError, match=r"mine\.yaml") as caught:
        load_cluster(path)
    assert words in str(caught.value)


def test_ones_own_cluster_is_read(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "clusters" / "dgx-h100.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert isinstance(load_cluster(path), Cluster)
    assert load_cluster(path).name == "mine"


def test_groups_that_share_a_network_card_wait_for_each_other() -> None:
    """Two all-reduces between the same nodes: at once over a card each, in turn over one."""

    def body(ctx: RankContext) -> None:
        columns = [dist.new_group([k, 2 + k]) for k in range(2)]
        dist.all_reduce(torch.ones(100_000), group=columns[ctx.rank % 2])

    seconds, dgx = {}, load_cluster("dgx-h100")
    for cards in (1, 2):
        cluster = dataclasses.replace(dgx, gpus_per_node=2, nics_per_node=cards)
        seconds[cards] = run_virtual(body, 4, cluster=cluster).clock
        alone = collective_time("all_reduce", 4e5, (0, 2), cluster)
    assert seconds[2] == exact(alone)
    assert seconds[1] == exact(2 * alone)


@pytest.mark.parametrize("nodes", [2, 3])
def test_three_stages_take_what_the_hierarchical_formula_says(nodes: int) -> None:
    local, n = 4, 4 * 3 * 10_000
    cluster = dataclasses.replace(
        load_cluster("dgx-h100"), gpus_per_node=local, nics_per_node=local, launch=0.0
    )

    def body(ctx: RankContext) -> None:
        of_nodes = [dist.new_group([*range(k, k + local)]) for k in range(0, nodes * local, local)]
        across = [dist.new_group([*range(k, nodes * local, local)]) for k in range(local)]
        mine, own = of_nodes[ctx.rank // local], torch.empty(n // local)
        dist.reduce_scatter_tensor(own, torch.ones(n), group=mine)
        dist.all_reduce(own, group=across[ctx.rank % local])
        dist.all_gather_into_tensor(torch.empty(n), own, group=mine)

    shape = nodes * local, nodes, local
    want = ALGORITHMS["hierarchical"](4 * n, shape, cluster)
    results = run_virtual(body, nodes * local, cluster=cluster, algorithm="ring")
    assert results.clock == exact(want)


def test_compute_is_modelled_in_every_interleaving() -> None:
    """The modules' hooks follow the world that runs, not the first one of the process."""

    def body(ctx):
        layer = torch.nn.Linear(8, 8, device="meta")
        layer(torch.ones(2, 8, device="meta"))
        return ctx.ledger.depth

    results = run_virtual(body, 2, seed=1, seeds=3, compute="roofline")
    assert list(results) == [0, 0]
    assert {name for log in results.logs for name, _, _ in log.spans} >= {"forward"}
