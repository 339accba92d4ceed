"""NCCL's rules of issue on virtual ranks: each breaks one program and leaves another alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.ranks import RankContext, RankFailure
from distlab.virtual import load_cluster, run_virtual

HERE = (__file__,)
MODES = ("nccl2", "legacy lazy", "legacy eager")
BOUND = ("nccl2", "legacy eager")
Body = Callable[[RankContext], Any]


def run(body: Body, world_size: int, rules: str, **options: Any) -> list[Any]:
    """The results, in two interleavings and in the order of time."""
    options = {"rules": rules, "learner_files": HERE, "timeout": 20} | options
    results = run_virtual(body, world_size, **options)
    again = run_virtual(body, world_size, **options, seed=3, seeds=2)
    for one, other in zip(results, again, strict=True):
        torch.testing.assert_close(one, other)
    return [*results]


def deadlock(body: Body, world_size: int, rules: str, **options: Any) -> RankFailure:
    """The failure, the same in every interleaving."""
    options = {"rules": rules, "learner_files": HERE, "timeout": 20} | options
    found = []
    for seed in (None, 3, 4):
        with pytest.raises(RankFailure) as caught:
            run_virtual(body, world_size, seed=seed, **options)
        assert (caught.value.kind, caught.value.cause) == ("hang", "hang"), caught.value.message
        assert caught.value.message.startswith("deadlock: ")
        found.append(caught.value)
    return found[0]


def numbers(ctx: RankContext, value: float, count: int = 4) -> torch.Tensor:
    return torch.full((count,), float(value), device=ctx.device)


# -- one order per communicator ----------------------------------------------------------------
def exchange(ctx: RankContext) -> torch.Tensor:
    """Both ends queue their receive before their send."""
    other, got = 1 - ctx.rank, numbers(ctx, -1)
    receiving = dist.irecv(got, other)
    sending = dist.isend(numbers(ctx, ctx.rank), other)
    receiving.wait()
    sending.wait()
    return got


@pytest.mark.parametrize("rules", MODES)
def test_an_exchange_that_receives_first_on_both_ends(rules: str) -> None:
    failure = deadlock(exchange, 2, rules)
    assert "receiving.wait()" in failure.line
    assert "NCCL runs the operations of a group in the order in which" in failure.message
    assert "gloo forgives this order, for it matches each message by itself" in failure.message
    for rank in (0, 1):
        assert f"rank {rank}: send of 4 float32 elements to rank {1 - rank} (" in failure.message
        assert "sending = dist.isend(" in failure.message
        assert "is behind recv" in failure.message
    assert next(iter(run_virtual(exchange, 2))).tolist() == [1.0] * 4


@pytest.mark.parametrize("count", [2, 3])
def test_of_what_is_behind_the_message_names_what_others_wait_for(count: int) -> None:
    """Both edges of a ring: a receive is behind the first receive, too, but closes no circle."""

    def body(ctx: RankContext) -> None:
        before, after = (ctx.rank - 1) % count, (ctx.rank + 1) % count
        handles = [dist.irecv(numbers(ctx, 0), before), dist.irecv(numbers(ctx, 0), after)]
        handles += [dist.isend(numbers(ctx, 1), after), dist.isend(numbers(ctx, 2), before)]
        for handle in handles:
            handle.wait()

    told = deadlock(body, count, "nccl2").message
    for rank in range(count):
        before, after = (rank - 1) % count, (rank + 1) % count
        assert f"rank {rank}: send of 4 float32 elements to rank {after} (test" in told
        assert f"is behind recv of 4 float32 elements from rank {before} (test" in told
    assert told.count("is behind") == count


@pytest.mark.parametrize("rules", MODES)
def test_an_exchange_in_one_order(rules: str) -> None:
    def body(ctx: RankContext) -> torch.Tensor:
        other, got = 1 - ctx.rank, numbers(ctx, -1)
        calls = [lambda: dist.isend(numbers(ctx, ctx.rank), other), lambda: dist.irecv(got, other)]
        for handle in [call() for call in calls[:: 1 - 2 * ctx.rank]]:
            handle.wait()
        return got

    assert [got.tolist() for got in run(body, 2, rules)] == [[1.0] * 4, [0.0] * 4]


def batch(ctx: RankContext, source: int, target: int) -> torch.Tensor:
    got = numbers(ctx, -1)
    receive = dist.P2POp(dist.irecv, got, source)
    send = dist.P2POp(dist.isend, numbers(ctx, ctx.rank), target)
    handles = dist.batch_isend_irecv([receive, send])
    assert len(handles) == 1
    handles[0].wait()
    return got


@pytest.mark.parametrize("rules", MODES)
def test_a_batch_may_be_complete_in_any_order(rules: str) -> None:
    def body(ctx: RankContext) -> torch.Tensor:
        size = ctx.world_size
        for step in (1, 2, size - 1):
            got = batch(ctx, (ctx.rank - step) % size, (ctx.rank + step) % size)
        return got

    assert [got[0].item() for got in run(body, 5, rules)] == [1, 2, 3, 4, 0]


@pytest.mark.parametrize("rules", MODES)
def test_collectives_of_a_batch(rules: str) -> None:
    def body(ctx: RankContext) -> list[float]:
        x, y, z = (numbers(ctx, ctx.rank + k) for k in range(3))
        with dist._coalescing_manager(device=ctx.device, async_ops=True) as manager:
            dist.broadcast(x, 1)
            dist.broadcast(y, 0)
        manager.wait()
        with dist._coalescing_manager(device=ctx.device):
            dist.all_reduce(y)
            dist.all_reduce(z)
        return [t[0].item() for t in (x, y, z)]

    assert run(body, 2, rules) == [[1.0, 2.0, 5.0]] * 2


@pytest.mark.parametrize("rules", MODES)
def test_a_ring(rules: str) -> None:
    def body(ctx: RankContext) -> torch.Tensor:
        size, total, mine = ctx.world_size, numbers(ctx, 0), numbers(ctx, ctx.rank)
        for _ in range(size):
            total += mine
            got = torch.empty_like(mine)
            ends = [
                dist.P2POp(dist.isend, mine, (ctx.rank + 1) % size),
                dist.P2POp(dist.irecv, got, (ctx.rank - 1) % size),
            ]
            for handle in dist.batch_isend_irecv(ends):
                handle.wait()
            mine = got
        return total

    assert [total[0].item() for total in run(body, 4, rules)] == [6.0] * 4


def test_messages_of_two_pairs_are_of_two_communicators_in_legacy_lazy_only() -> None:
    """0 receives from 2 before it sends to 1, who goes on to 2: one queue blocks, two do not."""

    def body(ctx: RankContext) -> None:
        x = numbers(ctx, ctx.rank)
        for a, b in ((0, 1), (0, 2), (1, 2)):  # makes each communicator
            if ctx.rank in (a, b):
                (dist.send if ctx.rank == a else dist.recv)(x, a + b - ctx.rank)
        if ctx.rank == 0:
            for handle in [dist.irecv(numbers(ctx, 0), 2), dist.isend(x, 1)]:
                handle.wait()
        elif ctx.rank == 1:
            dist.recv(x, 0)
            dist.send(x, 2)
        else:
            dist.recv(x, 1)
            dist.send(x, 0)

    run(body, 3, "legacy lazy")
    for rules in BOUND:
        assert "rank 0: send" in deadlock(body, 3, rules).message


@pytest.mark.parametrize("rules", MODES)
def test_a_message_beside_a_collective(rules: str) -> None:
    """A rank issues a receive before the all-reduce, the other its send after it."""

    def body(ctx: RankContext) -> None:
        x, y = numbers(ctx, ctx.rank), numbers(ctx, 5)
        if ctx.rank == 0:
            handles = [dist.irecv(x, 1), dist.all_reduce(y, async_op=True)]
        else:
            handles = [dist.all_reduce(y, async_op=True), dist.isend(x, 0)]
        for handle in handles:
            handle.wait()

    if rules in BOUND:
        assert "all_reduce" in deadlock(body, 2, rules).message
    else:  # the first of a pair's messages makes its communicator, and waits for that
        assert "communicator of ranks 0 and 1" in deadlock(body, 2, rules).message


def test_a_message_and_a_batch_meet_on_one_communicator_only() -> None:
    def body(ctx: RankContext) -> None:
        x = numbers(ctx, ctx.rank)
        dist.barrier()
        if ctx.rank == 0:
            for handle in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1)]):
                handle.wait()
        else:
            dist.recv(x, 0)

    for rules in BOUND:
        run(body, 2, rules)
    deadlock(body, 2, "legacy lazy")


@pytest.mark.parametrize("rules", MODES)
def test_two_groups_have_queues_of_their_own(rules: str) -> None:
    def body(ctx: RankContext) -> torch.Tensor:
        x, y = numbers(ctx, ctx.rank), numbers(ctx, 2)
        other = dist.new_group([0, 1])
        dist.barrier()
        dist.barrier(group=other)
        issued = [(x, None), (y, other)][:: 1 - 2 * ctx.rank]
        handles = [dist.all_reduce(t, group=g, async_op=True) for t, g in issued]
        for handle in handles[:: 1 - 2 * ctx.rank]:
            handle.wait()
        return x

    run(body, 2, rules)


@pytest.mark.parametrize("rules", MODES)
def test_a_second_wait_returns(rules: str) -> None:
    def body(ctx: RankContext) -> torch.Tensor:
        got = numbers(ctx, 3)
        handle = dist.isend(got, 1) if ctx.rank == 0 else dist.irecv(got, 0)
        handle.wait()
        handle.wait()
        return got

    run(body, 2, rules)


# -- how communicators are made ----------------------------------------------------------------
@pytest.mark.parametrize("rules", MODES)
def test_a_first_batch_needs_all_ranks_where_the_communicator_is_made_at_first_use(
    rules: str,
) -> None:
    def body(ctx: RankContext) -> torch.Tensor | None:
        return None if ctx.rank == 2 else batch(ctx, 1 - ctx.rank, 1 - ctx.rank)

    if rules == "legacy eager":
        run(body, 3, rules)
        return
    failure = deadlock(body, 3, rules)
    assert "rank 0 waits in the first use of the communicator of ranks 0, 1 and 2" in str(failure)
    assert "rank 2 never came to it. gloo forgives this" in failure.message
    assert "dist.batch_isend_irecv([receive, send])" in failure.line


@pytest.mark.parametrize("rules", MODES)
def test_a_later_batch_needs_its_own_ranks(rules: str) -> None:
    def body(ctx: RankContext) -> torch.Tensor | None:
        dist.barrier()
        return None if ctx.rank == 2 else batch(ctx, 1 - ctx.rank, 1 - ctx.rank)

    run(body, 3, rules)


@pytest.mark.parametrize("rules", MODES)
def test_a_first_message_needs_its_pair_in_legacy_lazy(rules: str) -> None:
    def body(ctx: RankContext) -> None:
        x = numbers(ctx, ctx.rank)
        if ctx.rank == 0:
            dist.send(x, 1)
        elif ctx.rank == 1:
            dist.recv(x, 0)

    if rules == "nccl2":
        deadlock(body, 3, rules)
    else:
        run(body, 3, rules)


def alone(ctx: RankContext) -> torch.Tensor:
    """Only its members make the group."""
    x = numbers(ctx, ctx.rank)
    group = dist.new_group([0, 1], use_local_synchronization=True)
    if ctx.rank < 2:
        dist.all_reduce(x, group=group)
    return x


@pytest.mark.parametrize("rules", BOUND)
def test_a_group_that_its_members_make_alone_hangs_where_a_device_is_bound(rules: str) -> None:
    failure = deadlock(alone, 3, rules)
    assert "group = dist.new_group([0, 1], use_local_synchronization=True)" in failure.line
    assert "rank 2 never came to it" in failure.message
    if rules == "legacy eager":
        assert "new_group, which splits the world's communicator" in failure.message


def test_a_group_that_its_members_make_alone() -> None:
    assert [x[0].item() for x in run(alone, 3, "legacy lazy")] == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("rules", MODES)
def test_groups_that_all_ranks_make(rules: str) -> None:
    def body(ctx: RankContext) -> torch.Tensor:
        x = numbers(ctx, ctx.rank)
        local = dist.new_group([2 * (ctx.rank // 2) + i for i in (0, 1)], None, None, None, True)
        every = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        dist.all_reduce(x, group=local)
        dist.all_reduce(x, group=every[ctx.rank % 2])
        return x

    assert [x[0].item() for x in run(body, 4, rules)] == [6.0] * 4


@pytest.mark.parametrize("rules", MODES)
def test_two_ranks_on_one_gpu(rules: str) -> None:
    def body(ctx: RankContext) -> None:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", rank=ctx.rank, world_size=2, store=dist.HashStore())
        dist.barrier()

    with pytest.raises(RankFailure, match="Duplicate GPU detected: ranks 0 and 1 are on cuda:0"):
        run_virtual(body, 2, rules=rules, process_group=False, learner_files=HERE)


@pytest.mark.parametrize("rules", MODES)
def test_a_program_that_joins_by_itself(rules: str) -> None:
    """With a device bound the world's communicator is made when the group is."""

    def body(ctx: RankContext, bind: bool) -> float:
        device = torch.device("cuda", ctx.rank)
        more = {"device_id": device} if bind else {}
        torch.cuda.set_device(device)
        store = dist.distributed_c10d.PrefixStore("own", dist.HashStore())
        dist.init_process_group("nccl", rank=ctx.rank, world_size=3, store=store, **more)
        if ctx.rank < 2:
            batch(ctx, 1 - ctx.rank, 1 - ctx.rank)
        dist.destroy_process_group()
        return 1.0

    alone = {"rules": rules, "learner_files": HERE, "process_group": False}
    assert [*run_virtual(body, 3, True, **alone)] == [1.0] * 3
    if rules != "legacy eager":
        with pytest.raises(RankFailure, match="rank 2 never came to it"):
            run_virtual(body, 3, False, **alone)


@pytest.mark.parametrize("rules", MODES)
def test_each_node_counts_its_own_gpus(rules: str) -> None:
    def body(ctx: RankContext) -> float:
        x = numbers(ctx, 1)
        dist.all_reduce(x)
        return x[0].item()

    cluster = dataclasses.replace(load_cluster("laptop"), gpus_per_node=2)
    assert run(body, 4, rules, cluster=cluster) == [4.0] * 4


def test_legacy_lazy_takes_the_tensors_gpu() -> None:
    def body(ctx: RankContext) -> float:
        torch.cuda.set_device(0)
        x = numbers(ctx, 1)
        dist.all_reduce(x)
        return x.sum().item()

    assert run(body, 2, "legacy lazy") == [8.0, 8.0]


def test_a_group_of_gloo_beside_nccl() -> None:
    def body(ctx: RankContext) -> torch.Tensor:
        beside, x = dist.new_group(backend="gloo"), torch.full((4,), float(ctx.rank))
        dist.all_reduce(x, group=beside)
        assert (dist.get_backend(), dist.get_backend(beside)) == ("nccl", "gloo")
        assert dist.get_backend_config() == "cuda:nccl"
        assert "cpu:gloo" in dist.get_backend_config(beside)
        return x

    for rules in MODES:
        assert [x[0].item() for x in run(body, 2, rules)] == [1.0, 1.0]


def test_rules_that_there_are_not() -> None:
    for options in ({"rules": "nccl3"}, {"rules": "nccl2", "lose": (0, 1)}):
        with pytest.raises(ValueError, match="rules"):
            run_virtual(exchange, 2, **options)
