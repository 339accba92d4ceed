"""A deadlock is pronounced only when nothing can still arrive, and then at once."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.ranks import RankContext, RankFailure, run_ranks
from distlab.ranks import proof as rank_proof

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def asleep(pid: int) -> None:
    """Return when the main thread of ``pid`` has slept for a while."""
    seen = 0
    while seen < 20:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        seen = seen + 1 if state == "S" else 0
        time.sleep(0.005)


def stop_for(pid: int, seconds: float) -> None:
    """Stop a process now; another process lets it go on later."""
    os.kill(pid, signal.SIGSTOP)
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)


def receives(source: int) -> str:
    """What a receive from ``source`` ended with."""
    try:
        dist.recv(torch.zeros(1), source)
    except RuntimeError:
        return "broken"
    return "arrived"


def release(ranks: tuple[int, ...]) -> None:
    for rank in ranks:
        dist.send(torch.zeros(1), rank)


@LINUX
@pytest.mark.parametrize("stopped", [0, 1], ids=["who hears of it", "who waits for that one"])
def test_a_closed_connection_is_news(stopped: int) -> None:
    """Rank 2 closes; rank 0 waits for it, rank 1 for rank 0. Somebody is slow to hear of it."""

    def body(ctx: RankContext) -> str:
        pids = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
        dist.all_gather(pids, torch.tensor([os.getpid()]))
        if ctx.rank == 2:
            asleep(int(pids[0]))
            asleep(int(pids[1]))
            stop_for(int(pids[stopped]), 0.7)
            dist.destroy_process_group()
            return "closed"
        if ctx.rank == 1:
            return receives(0)
        found = receives(2)
        release((1,))
        return found

    assert list(run_ranks(body, 3)) == ["broken", "arrived", "closed"]


@LINUX
def test_a_rank_that_was_killed_is_no_deadlock() -> None:
    """Rank 0 kills rank 1, which waits for it, and waits for rank 1: that is a crash."""

    def body(ctx: RankContext) -> None:
        pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(pids, torch.tensor([os.getpid()]))
        if ctx.rank == 0:
            asleep(int(pids[1]))
            os.kill(int(pids[1]), signal.SIGKILL)
        dist.recv(torch.zeros(1), 1 - ctx.rank)

    with pytest.raises(RankFailure, match="rank 1 was killed by signal 9") as caught:
        run_ranks(body, 2)
    assert caught.value.kind == "crash"


def test_a_wait_that_failed_is_over(tmp_path: Path) -> None:
    """Rank 0 has learnt that its partner is gone; what it does about it takes a while."""
    heard = tmp_path / "heard"

    def body(ctx: RankContext) -> str:
        dist.barrier()  # all are connected
        if ctx.rank == 2:
            dist.destroy_process_group()
            return "closed"
        if ctx.rank == 1:
            while not heard.exists():
                time.sleep(0.01)
            return receives(0)
        found = receives(2)
        heard.touch()
        time.sleep(0.7)
        release((1,))
        return found

    assert list(run_ranks(body, 3)) == ["broken", "arrived", "closed"]


def test_another_thread_can_go_on() -> None:
    """Rank 0 waits for rank 1, and rank 1 for what a thread of rank 0 sends a little later."""

    def body(ctx: RankContext) -> str:
        if ctx.rank == 1:
            found = receives(0)
            release((0,))
            return found

        def later() -> None:
            time.sleep(0.7)
            release((1,))

        thread = threading.Thread(target=later)
        thread.start()
        found = receives(1)
        thread.join()
        return found

    assert list(run_ranks(body, 2)) == ["arrived", "arrived"]


def test_a_thread_may_outlive_the_body() -> None:
    """Rank 0 has returned; a thread of it sends what rank 1 waits for."""

    def body(ctx: RankContext) -> str:
        if ctx.rank == 1:
            return receives(0)

        def later() -> None:
            time.sleep(0.7)
            release((1,))

        threading.Thread(target=later).start()
        return "returned"

    assert list(run_ranks(body, 2)) == ["returned", "arrived"]


@pytest.mark.parametrize("how", ["wait", "group"])
def test_a_wait_with_a_limit_of_its_own_ends(how: str) -> None:
    """A wait that gives up is no deadlock: the program goes on."""

    def body(ctx: RankContext) -> str:
        limit = timedelta(seconds=0.7)
        group = dist.new_group(timeout=limit) if how == "group" else None
        if ctx.rank == 1:
            return receives(0)
        try:
            work = dist.irecv(torch.zeros(1), 1, group=group)
            work.wait(*([limit] if how == "wait" else []))
            return "arrived"
        except RuntimeError:
            return "gave up"
        finally:
            if how == "group":  # a wait that gives up closes the connections of its group
                release((1,))
            else:
                dist.destroy_process_group()

    assert run_ranks(body, 2)[0] == "gave up"


def test_groups_of_the_same_ranks_are_told_apart() -> None:
    """Two threads, each with a group of its own: in which order they communicate is no matter."""

    def body(ctx: RankContext) -> list[float]:
        other = dist.new_group([0, 1])
        sums = [torch.ones(3), torch.ones(5)]
        calls = [lambda: dist.all_reduce(sums[0]), lambda: dist.all_reduce(sums[1], group=other)]
        first, second = calls if ctx.rank else reversed(calls)
        thread = threading.Thread(target=first)
        thread.start()
        while thread.is_alive() and not ctx.ledger.events:
            time.sleep(0.001)
        second()
        thread.join()
        return [s.sum().item() for s in sums]

    assert list(run_ranks(body, 2)) == [[6.0, 10.0]] * 2


@pytest.mark.parametrize("idle", ["no thread", "a thread in a queue"])
def test_a_real_deadlock_is_still_proved(idle: str) -> None:
    """Also beside a thread that waits for work without an end."""

    def body(ctx: RankContext) -> None:
        if idle != "no thread":
            threading.Thread(target=threading.Lock().acquire if ctx.rank else forever).start()
        dist.recv(torch.zeros(1), 1 - ctx.rank)

    def forever() -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    with pytest.raises(RankFailure, match="deadlock: every rank that has not returned"):
        run_ranks(body, 2, timeout=60)


@LINUX
def test_sockets_of_the_grader_do_not_matter() -> None:
    """A notebook's kernel, say, has sockets with unread bytes, and ranks inherit them."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as unconnected:
        with socket.create_connection(server.getsockname()) as caller:
            other, _ = server.accept()
            other.sendall(b"unread")
            other.close()
            with pytest.raises(RankFailure, match="deadlock: every rank that has not returned"):
                run_ranks(lambda ctx: dist.recv(torch.zeros(1), 1 - ctx.rank), 2, timeout=5)
            assert caller.recv(9) == b"unread"
        assert unconnected.fileno() > 0


def test_what_a_rank_has_forked_is_no_part_of_it() -> None:
    """A worker has the rank's pipe and patches, and a lock that may be held: it says nothing."""

    def body(ctx: RankContext) -> None:
        if os.fork() == 0:
            threading.Thread(target=time.sleep, args=(600,)).start()
            time.sleep(600)
        time.sleep(0.3)
        dist.recv(torch.zeros(1), 1 - ctx.rank)

    with pytest.raises(RankFailure, match="deadlock: every rank that has not returned"):
        run_ranks(body, 2, timeout=5)


def test_without_proc_a_closed_group_leaves_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system tells nothing, a group that was destroyed may have news on its way."""
    monkeypatch.setattr(rank_proof, "PROC", Path("/nonexistent"))

    def body(ctx: RankContext, leave: bool) -> str:
        dist.barrier()  # a group that goes while the other rank still connects is another failure
        if ctx.rank == 1:
            time.sleep(0.2)
            if leave:
                dist.destroy_process_group()
            return "closed"
        return receives(1)

    assert list(run_ranks(body, 2, True)) == ["broken", "closed"]
    with pytest.raises(RankFailure, match="deadlock"):
        run_ranks(body, 2, False, timeout=60)
