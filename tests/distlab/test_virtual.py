"""Virtual ranks: values, isolation, strictness, determinism, and what failures say."""

from __future__ import annotations

import os
import random
import resource
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.grading.implementation import Implementation
from distlab.grading.sources import Source
from distlab.host.processes import children
from distlab.host.system import tells_of_processes
from distlab.observe.memory import PeakMemory
from distlab.ranks import RankContext, RankFailure
from distlab.virtual import reap_children, run_virtual, run_worlds
from distlab.virtual.child import TIME_IS_UP

HERE = (__file__,)
ANY_ORDER = [None, 0, 7]


def failure_of(body, world_size: int = 4, **options) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        run_virtual(
            body, world_size, learner_files=HERE, timeout=options.pop("timeout", 20), **options
        )
    return caught.value


# -- what a rank believes to be its own --------------------------------------------------------
def test_groups_environment_output_and_clock_are_the_ranks_own() -> None:
    def body(ctx: RankContext) -> list:
        half = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][ctx.rank // 2]
        x = torch.tensor([float(ctx.rank)])
        os.environ["OWN"] = str(ctx.rank)
        print("I am", ctx.rank)
        dist.barrier()
        return [os.environ["RANK"], os.environ["OWN"], dist.get_rank(), x.item(), half is not None]

    results = run_virtual(body, 4, seed=1)
    for rank, got in enumerate(results):
        assert got[:4] == [str(rank), str(rank), rank, float(rank)]
        assert results.output[rank] == f"I am {rank}\n"


@pytest.mark.parametrize("seed", ANY_ORDER)
def test_random_state_is_the_ranks_own(seed: int | None) -> None:
    def body(ctx: RankContext) -> list:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        out = []
        for _ in range(3):
            dist.barrier()  # the others draw in between
            out.append([torch.rand(1).item(), float(np.random.rand()), random.random()])
        return out

    results = run_virtual(body, 3, seed=seed)
    assert results[0] == results[1] == results[2]
    generator = torch.Generator().manual_seed(5)
    assert [row[0] for row in results[0]] == [
        torch.rand(1, generator=generator).item() for _ in "abc"
    ]
    alone = random.Random(5)
    assert [row[2] for row in results[0]] == [alone.random() for _ in "abc"]


def test_ranks_start_from_different_random_states() -> None:
    draws = run_virtual(lambda ctx: [torch.rand(1).item(), random.random()], 4)
    assert len({tuple(d) for d in draws}) == 4


def test_the_clock_is_virtual() -> None:
    def body(ctx: RankContext) -> float:
        begun = time.perf_counter()
        time.sleep(1000.0 if ctx.rank else 1.0)
        dist.barrier()
        return time.perf_counter() - begun

    begun = time.perf_counter()
    assert run_virtual(body, 2)[0] == pytest.approx(1000.0, rel=1e-3)
    assert time.perf_counter() - begun < 20


def test_modules_are_the_ranks_own(tmp_path: Path) -> None:
    (tmp_path / "mod.py").write_text("count = 0\ndef add():\n    global count\n    count += 1\n")
    implementation = Implementation(Source("own", tmp_path), "mod")

    def body(ctx: RankContext) -> int:
        implementation.add()
        dist.barrier()
        implementation.add()
        return implementation.count

    for seed in ANY_ORDER:
        assert run_virtual(body, 3, seed=seed)[:] == [2, 2, 2]


def test_device_mesh_and_store() -> None:
    def body(ctx: RankContext) -> list:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        out = []
        for name in ("rows", "columns"):
            x = torch.tensor([ctx.rank + 1.0])
            dist.all_reduce(x, group=mesh.get_group(name))
            out.append(x.item())
        store = dist.distributed_c10d._get_default_store()
        if ctx.rank == 3:
            store.set("late", "yes")
        return [*out, store.get("late") == b"yes"]

    assert run_virtual(body, 4, seed=2)[:] == [
        [4, 3, True],
        [6, 3, True],
        [4, 7, True],
        [6, 7, True],
    ]


def test_groups_are_made_in_one_order_on_all_ranks() -> None:
    """Another order on another rank is named at once; after a second start numbers begin again."""

    def body(ctx: RankContext, own_first: bool) -> float:
        pairs = [[0, 1], [2, 3]]
        if own_first and ctx.rank > 1:
            pairs.reverse()
        groups = {min(ranks): dist.new_group(ranks) for ranks in pairs}
        x = torch.ones(1)
        dist.all_reduce(x, group=groups[ctx.rank // 2 * 2])
        return x.item()

    def twice(ctx: RankContext) -> float:
        store = dist.distributed_c10d._get_default_store()
        first = body(ctx, False)
        dist.destroy_process_group()
        again = dist.PrefixStore("again", store)
        dist.init_process_group("virtual", store=again, rank=ctx.rank, world_size=4)
        group, x = dist.new_group([1, 2]), torch.ones(1)
        if ctx.rank in (1, 2):
            dist.all_reduce(x, group=group)
        return first + x.item()

    for seed in ANY_ORDER:
        assert run_virtual(body, 4, False, seed=seed)[:] == [2.0] * 4
        assert run_virtual(twice, 4, seed=seed)[:] == [3.0, 4.0, 4.0, 3.0]
        with pytest.raises(RankFailure, match=r"makes a group of ranks .* where others") as caught:
            run_virtual(body, 4, True, seed=seed)
        assert caught.value.cause == "mismatch"
        assert "every rank must make all groups in the same order" in caught.value.message


# -- all of c10d that the course uses ------------------------------------------------------------
@pytest.mark.parametrize("seed", ANY_ORDER)
def test_hooks_functional_collectives_and_futures(seed: int | None) -> None:
    def body(ctx: RankContext) -> list:
        import torch.distributed._functional_collectives as functional

        w = torch.ones(3, requires_grad=True)
        w.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        (w * (ctx.rank + 1)).sum().backward()
        y = functional.all_reduce(torch.ones(2) * ctx.rank, "sum", dist.group.WORLD) + 0
        pending = dist.all_reduce(torch.ones(1), async_op=True)
        then = pending.get_future().then(lambda done: done.value()[0] * 10)
        return [w.grad.tolist(), y.tolist(), then.wait().item()]

    for got in run_virtual(body, 3, seed=seed):
        assert got == [[6.0] * 3, [3.0] * 2, 30.0]


def test_futures_are_fulfilled_at_their_own_time() -> None:
    """A callback reads the clock when the communication is complete, whatever the rank does."""

    def body(ctx: RankContext) -> tuple[float, float, float]:
        moments = []
        pending = dist.all_reduce(torch.ones(1_000_000), async_op=True)
        pending.get_future().add_done_callback(lambda _: moments.append(time.perf_counter()))
        time.sleep(1.0 if ctx.rank else 0.5)
        before = time.perf_counter()
        pending.wait()
        return moments[0], before, time.perf_counter()

    for arrived, before, after in run_virtual(body, 2):
        assert 0.001 < arrived < 0.4
        assert before in (pytest.approx(0.5, rel=1e-3), pytest.approx(1.0, rel=1e-3))
        assert after - before < 1e-4


def test_torchs_own_ddp_runs_unchanged() -> None:
    def body(ctx: RankContext, wrapped: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        data = torch.randn(12, 8)
        if wrapped:
            mine = data[ctx.rank * 4 : ctx.rank * 4 + 4]
            train = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0005)
        else:
            mine, train = data, model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            train(mine).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    (want,) = run_virtual(body, 1, False)
    for seed in ANY_ORDER:
        for got in run_virtual(body, 3, True, seed=seed):
            torch.testing.assert_close(got, want)


def test_receive_from_any_rank_takes_every_order() -> None:
    def body(ctx: RankContext) -> list:
        if ctx.rank:
            dist.send(torch.tensor([ctx.rank]), 0)
            return []
        buffers = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        for buffer in buffers:
            dist.recv(buffer)
        return [b.item() for b in buffers]

    seen = {tuple(run_virtual(body, 3, seed=seed)[0]) for seed in range(12)}
    assert seen == {(1, 2), (2, 1)}


# -- strictness ------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", ANY_ORDER)
@pytest.mark.parametrize("world_size", [2, 3, 16])
def test_send_first_ring_always_deadlocks(seed: int | None, world_size: int) -> None:
    def body(ctx: RankContext) -> None:
        dist.send(torch.ones(1), (ctx.rank + 1) % ctx.world_size)
        dist.recv(torch.ones(1), (ctx.rank - 1) % ctx.world_size)

    found = failure_of(body, world_size, seed=seed)
    assert found.kind == "hang"
    assert f"rank {world_size - 1} waits in send of 1 float32 element to rank 0" in found.message
    assert "test_virtual.py" in found.line
    assert "dist.send" in found.line


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_reused_buffer_and_early_read_are_always_corrupt(seed: int) -> None:
    def body(ctx: RankContext) -> list:
        x = torch.ones(2) * (1 + ctx.rank)
        if ctx.rank == 0:
            handle = dist.isend(x, 1)
            x.fill_(7.0)
            handle.wait()
        else:
            dist.recv(x, 0)
        y = torch.ones(2)
        handle = dist.all_reduce(y, async_op=True)
        early = y.clone()
        handle.wait()
        return [x.tolist(), early.tolist(), y.tolist()]

    results = run_virtual(body, 2, seed=seed)
    assert results[1] == [[7.0, 7.0], [1.0, 1.0], [2.0, 2.0]]
    assert results.logs[0].events[0].overwritten


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
def test_buffers_of_a_delivered_message_are_let_go(seed: int | None) -> None:
    """A peer that has not run since the delivery does not keep the receiver's buffer alive."""

    def body(ctx: RankContext) -> int:
        peer = 1 - ctx.rank
        with PeakMemory() as memory:
            for _ in range(3):
                buffer = torch.empty(1000)
                handle = dist.isend(torch.ones(1000), peer)
                dist.recv(buffer, peer)
                handle.wait()
                del buffer, handle
        return memory.peak

    assert [*run_virtual(body, 2, seed=seed)] == [8000, 8000]


def test_two_messages_never_arrive_in_one_buffer() -> None:
    def body(ctx: RankContext, wait: bool, width: int) -> list[float]:
        buffer = torch.zeros(4)
        if ctx.rank:
            dist.send(torch.full((2,), float(ctx.rank)), 0)
            return []
        first = dist.irecv(buffer[:2], 1)
        if wait:
            first.wait()
        second = dist.irecv(buffer[width : width + 2], 2)
        for handle in [second] if wait else [first, second]:
            handle.wait()
        return buffer.tolist()

    assert run_virtual(body, 3, False, 2)[0] == [1, 1, 2, 2]
    assert run_virtual(body, 3, True, 0)[0] == [2, 2, 0, 0]
    assert run_virtual(body, 3, True, 1)[0] == [1, 2, 2, 0]
    for width in (0, 1):
        with pytest.raises(RankFailure) as caught:
            run_virtual(body, 3, False, width)
        assert caught.value.cause == "two-in-one-buffer"
        assert caught.value.rank == 0


def test_handle_that_is_not_awaited_is_reported() -> None:
    def body(ctx: RankContext) -> None:
        if ctx.rank == 1:
            dist.isend(torch.ones(3), 0)
        else:
            dist.recv(torch.ones(3), 1)

    found = failure_of(body, 2, seed=3)
    assert found.cause == "never-waited"
    assert found.rank == 1
    assert "dist.isend" in found.line


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            lambda r: dist.all_reduce(torch.ones(3)) if r == 0 else dist.barrier(),
            "rank 0 calls all",
        ),
        (lambda r: dist.all_reduce(torch.ones(3 + r)), "rank 1 calls all_reduce of 4"),
        (lambda r: dist.broadcast(torch.ones(3), r), "with root 1"),
        (
            lambda r: dist.send(torch.ones(3), 1) if r == 0 else dist.recv(torch.ones(4), 0),
            "rank 0 sends 3 float32 elements to rank 1, which receives 4",
        ),
        (
            lambda r: dist.all_reduce(torch.ones(1), dist.ReduceOp.SUM if r else dist.ReduceOp.MAX),
            "reduce with different operators",
        ),
        (
            lambda r: dist.all_to_all(
                [torch.ones(2), torch.ones(2)], [torch.ones(2), torch.ones(2 + r)]
            ),
            "gives rank 1 3 float32 elements, which expects 2",
        ),
    ],
)
def test_mismatches_are_named(wrong, words: str) -> None:
    def body(ctx: RankContext) -> None:
        wrong(ctx.rank)

    for seed in ANY_ORDER:
        found = failure_of(body, 2, seed=seed)
        assert found.kind == "mismatch"
        assert words in found.message


def test_the_seed_repeats_the_interleaving() -> None:
    def body(ctx: RankContext) -> list:
        if ctx.rank:
            dist.send(torch.tensor([ctx.rank]), 0)
            return []
        buffers = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
        for buffer in buffers:
            dist.recv(buffer)
        assert [b.item() for b in buffers] != [3, 2, 1], "an order that breaks it"
        return []

    found = failure_of(body, 4, seed=0, seeds=60)
    assert "an order that breaks it" in found.message
    assert found.interleaving
    assert "not in every order of the ranks" in found.message
    again = failure_of(body, 4, seed=found.interleaving)
    assert found.message.startswith(again.message)


def test_same_seed_same_trace() -> None:
    def body(ctx: RankContext) -> None:
        for step in range(4):
            dist.all_reduce(torch.ones(step + 1))
            handle = dist.isend(torch.ones(5), (ctx.rank + 1) % ctx.world_size)
            dist.recv(torch.ones(5), (ctx.rank - 1) % ctx.world_size)
            handle.wait()

    for seed in ANY_ORDER:
        first, second = (run_virtual(body, 5, seed=seed, learner_files=HERE) for _ in "ab")
        assert [vars(e) for log in first.logs for e in log.events] == [
            vars(e) for log in second.logs for e in log.events
        ]
        assert first.clocks == second.clocks


def test_lost_and_slow_ranks_and_links() -> None:
    def body(ctx: RankContext) -> None:
        time.sleep(0.1)
        for _ in range(5):
            dist.all_reduce(torch.ones(1000))

    found = failure_of(body, 3, lose=(1, 3))
    assert found.rank == 1
    assert "lost at its communication 3" in found.message
    usual = run_virtual(body, 3).clock
    assert run_virtual(body, 3, slow_ranks={2: 3.0}).clock == pytest.approx(usual + 0.2, rel=1e-3)
    assert run_virtual(body, 3, slow_links={2: 10.0}).clock > usual + 1e-3


@pytest.mark.parametrize("seed", ANY_ORDER)
def test_survivors_of_a_lost_rank_see_a_broken_connection(seed: int | None) -> None:
    def body(ctx: RankContext) -> list:
        said = []
        for peer in (1, 2) if ctx.rank == 0 else ():
            x = torch.zeros(1)
            try:
                dist.recv(x, src=peer)
                dist.send(x, dst=peer)
                said.append(float(x))
            except RuntimeError as error:
                said.append(str(error))
        if ctx.rank:
            x = torch.ones(1) * ctx.rank
            dist.send(x, dst=0)
            dist.recv(x, src=0)
        return said

    broken = "Connection closed by peer: rank 1 is lost"
    for when in (1, 2):
        found = run_virtual(body, 3, seed=seed, lose=(1, when), survivable=True)
        assert list(found) == [[broken, 2.0], None, []]
    assert failure_of(body, 3, seed=seed, lose=(1, 1)).rank == 1


# -- failures --------------------------------------------------------------------------------------
def test_exceptions_and_deaths_name_the_rank() -> None:
    def raises(ctx: RankContext) -> None:
        if ctx.rank == 2:
            raise ValueError("no")
        dist.barrier()

    found = failure_of(raises)
    assert (found.kind, found.rank) == ("exception", 2)
    assert "rank 2 raised ValueError: no" in found.message

    def leaves(ctx: RankContext) -> None:
        if ctx.rank == 1:
            os._exit(3)
        dist.barrier()

    found = failure_of(leaves)
    assert (found.kind, found.rank) == ("crash", 1)
    assert "exit status 3" in found.message

    def exits(ctx: RankContext) -> None:
        if ctx.rank == 0:
            sys.exit(4)
        dist.barrier()

    assert "left the program with sys.exit(4)" in failure_of(exits).message


def test_endless_loop_ends_with_the_time_limit() -> None:
    def body(ctx: RankContext) -> None:
        while ctx.rank == 1:
            pass
        dist.barrier()

    found = failure_of(body, 3, timeout=1)
    assert found.kind == "hang"
    assert (found.cause, found.rank) == ("endless-loop", 1)
    assert "rank 1 is in a loop that does not end   at test_virtual.py" in found.message


@pytest.mark.skipif(sys.platform != "linux", reason="only there a thread learns its own time")
def test_each_interleaving_has_its_own_limit() -> None:
    """Six runs of half a second take longer than one may, and all together may take longer."""

    def used() -> float:  # Python's clocks are virtual there
        return resource.getrusage(resource.RUSAGE_THREAD).ru_utime

    def works(ctx: RankContext) -> None:
        end = used() + 0.25
        while used() < end:
            pass
        dist.barrier()

    options = {"seed": 1, "seeds": 3, "timeout": 30, "each": 2}
    assert len(run_worlds(works, (2, 2), **options)) == 2
    with pytest.raises(RankFailure, match="no result after 2 s"):
        run_worlds(works, (9,), **options)
    with pytest.raises(RankFailure, match="no result after 1 s"):
        run_worlds(works, (2, 2), **options | {"timeout": 1})
    with pytest.raises(RankFailure, match="no result after 3 s"):  # all of them, none alone
        run_worlds(works, (2, 2, 2), **options | {"timeout": 3})


def test_a_rank_that_is_done_after_the_limit_is_late() -> None:
    """While its end is told: there is no result that lacks it."""

    def body(ctx: RankContext) -> int:
        os.kill(os.getpid(), TIME_IS_UP)
        threading.Event().wait(0.1)  # in this world's own time, not in the rank's
        return ctx.rank

    assert failure_of(body, 1).kind == "hang"


def test_foreign_threads_and_cuda_are_refused_in_one_line() -> None:
    def body(ctx: RankContext) -> list:
        said = []

        def communicate() -> None:
            try:
                dist.barrier()
            except RuntimeError as error:
                said.append(str(error))

        thread = threading.Thread(target=communicate)
        thread.start()
        thread.join()
        try:
            torch.ones(1, device="cuda")
        except RuntimeError as error:
            said.append(str(error))
        return said

    threads, cuda = run_virtual(body, 1)[0]
    assert "from their main thread only" in threads
    assert "can't use this machine's GPU" in cuda


def test_several_worlds_in_one_child() -> None:
    def body(ctx: RankContext) -> float:
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    assert [r[0] for r in run_worlds(body, (3, 1, 5), seed=1, seeds=2)] == [3.0, 1.0, 5.0]


@pytest.mark.skipif(not tells_of_processes(), reason="no /proc that lists children")
def test_nothing_is_left_running() -> None:
    def body(ctx: RankContext) -> int:
        return os.getpid()

    def forks(ctx: RankContext) -> int:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            time.sleep(1000)
        return pid

    def dies(ctx: RankContext) -> None:
        forks(ctx)
        os._exit(1)

    reap_children()
    before = children()  # what other tests have orphaned on purpose
    pids = [*run_virtual(body, 2), *run_virtual(forks, 2)]
    failure_of(dies, 2)
    reap_children()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert children() <= before


def test_bad_counts() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        run_virtual(lambda ctx: None, 0)
    with pytest.raises(ValueError, match="give a seed"):
        run_virtual(lambda ctx: None, 2, seeds=5)
    with pytest.raises(ValueError, match="did you mean laptop"):
        run_virtual(lambda ctx: None, 2, cluster="labtop")
