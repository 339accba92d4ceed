"""run_ranks: results, or one clear failure that names rank, line and cause; nothing left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import forked_commands
import pytest
import torch
import torch.distributed as dist

from distlab.course.catalogue import load_course
from distlab.grading.run import run_session
from distlab.grading.session import Request
from distlab.host.processes import descendants, is_ending
from distlab.host.system import tells_of_processes
from distlab.ranks import RankContext, RankFailure, fork_problem, run_ranks
from distlab.virtual import reap_children, run_virtual

HERE = (__file__,)
ROOT = str(Path(__file__).resolve().parents[2])


def failure_of(body, world_size: int = 4, timeout: float = 20.0, **options) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        run_ranks(body, world_size, timeout=timeout, learner_files=HERE, **options)
    return caught.value


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_back_in_rank_order(world_size: int) -> None:
    def body(ctx: RankContext, offset: int) -> dict:
        total = torch.tensor([float(ctx.rank + offset)])
        dist.all_reduce(total)
        return {"rank": ctx.rank, "total": total, "env": os.environ["RANK"]}

    results = run_ranks(body, world_size, 10)
    want = float(sum(range(10, 10 + world_size)))
    assert [r["rank"] for r in results] == list(range(world_size))
    assert all(r["total"].item() == want for r in results)
    assert [r["env"] for r in results] == [str(r) for r in range(world_size)]


def test_exception_names_rank_and_line() -> None:
    def body(ctx: RankContext) -> None:
        if ctx.rank == 1:
            raise ValueError("boom")
        dist.barrier()

    failure = failure_of(body)
    assert (failure.kind, failure.rank) == ("exception", 1)
    assert "rank 1 raised ValueError: boom" in failure.message
    assert 'raise ValueError("boom")' in failure.line


def test_who_broke_the_connection_is_named_though_slow_to_tell() -> None:
    def body(ctx: RankContext) -> None:
        if ctx.rank == 1:
            dist.destroy_process_group()
            time.sleep(0.7)
            raise ValueError("boom")
        dist.recv(torch.ones(1), 1)

    failure = failure_of(body, 2)
    assert (failure.rank, failure.message) == (1, "rank 1 raised ValueError: boom")


def test_a_broken_connection_is_all_there_is_to_tell() -> None:
    def body(ctx: RankContext) -> None:
        dist.barrier()  # a group that goes while another rank still connects is another failure
        if ctx.rank == 1:
            dist.destroy_process_group()
        else:
            dist.recv(torch.ones(1), 1 if ctx.rank == 0 else 0)

    failure = failure_of(body, 3)
    assert (failure.kind, failure.rank) == ("exception", 0)


def test_a_cut_graph_is_a_cause_of_its_own() -> None:
    def body(ctx: RankContext) -> None:
        x = torch.ones(2, requires_grad=True)
        whole = [torch.empty(2) for _ in range(ctx.world_size)]
        dist.all_gather(whole, x.detach())  # records nothing
        torch.cat(whole).sum().backward()

    failure = failure_of(body)
    assert (failure.kind, failure.cause) == ("exception", "graph-cut")


def test_death_by_signal_is_named() -> None:
    def body(ctx: RankContext) -> None:
        if ctx.rank == 2:
            os.kill(os.getpid(), 9)
        dist.all_reduce(torch.ones(3))

    failure = failure_of(body)
    assert (failure.kind, failure.rank) == ("crash", 2)
    assert "SIGKILL" in failure.message


@pytest.mark.parametrize("how", ["sys.exit", "os._exit"])
def test_leaving_is_a_crash(how: str) -> None:
    def body(ctx: RankContext) -> None:
        if ctx.rank == 0:
            sys.exit(3) if how == "sys.exit" else os._exit(3)
        dist.barrier()

    failure = failure_of(body)
    assert (failure.kind, failure.rank) == ("crash", 0)
    assert "3" in failure.message


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("length", [1, 50_000])
def test_send_first_ring_is_a_proven_deadlock(world_size: int, length: int) -> None:
    def body(ctx: RankContext) -> None:
        buffer = torch.zeros(length)
        dist.send(buffer, (ctx.rank + 1) % ctx.world_size)
        dist.recv(buffer, (ctx.rank - 1) % ctx.world_size)

    begun = time.monotonic()
    failure = failure_of(body, world_size, timeout=60)
    assert time.monotonic() - begun < 30  # known from the reports, not from the time-out
    assert failure.kind == "hang"
    for rank in range(world_size):
        to = (rank + 1) % world_size
        assert f"rank {rank} waits in send of {length} float32 element" in failure.message
        assert f"to rank {to}" in failure.message
    assert "dist.send(buffer" in failure.line


def test_collective_of_one_rank_names_who_never_came() -> None:
    def body(ctx: RankContext) -> None:
        if ctx.rank == 0:
            dist.all_reduce(torch.ones(3))

    failure = failure_of(body, timeout=60)
    assert failure.kind == "hang"
    assert "ranks 1, 2 and 3 never came to this all_reduce" in failure.message


def test_endless_loop_ends_with_the_time_limit() -> None:
    def body(ctx: RankContext) -> None:
        while ctx.rank == 1:
            pass
        dist.barrier()

    failure = failure_of(body, 3, timeout=0.5)
    assert failure.kind == "hang"
    assert failure.cause == "endless-loop"
    assert failure.rank == 1
    assert failure.line.endswith("while ctx.rank == 1:")
    assert "rank 1 is in a loop that does not end   at test_ranks.py" in failure.message
    assert "rank 0 waits in barrier" in failure.message
    assert "rank 1 never came to this barrier" in failure.message


def test_a_mismatch_is_named_where_the_grader_was_busy() -> None:
    """The grader stands still until gloo has ended the ranks, and reads then what they reported."""
    grader = os.getpid()

    def body(ctx: RankContext) -> None:
        if ctx.rank == 0:
            wake = f"sleep 2; kill -CONT {grader}"
            subprocess.Popen(["/bin/sh", "-c", wake], start_new_session=True)
            os.kill(grader, signal.SIGSTOP)
        dist.all_reduce(torch.ones(3, dtype=torch.float64 if ctx.rank == 1 else torch.float32))

    assert failure_of(body, 3).kind == "mismatch"


@pytest.mark.parametrize("wrong", ["operator", "size", "dtype", "root"])
def test_mismatched_collectives_are_named_at_once(wrong: str) -> None:
    def body(ctx: RankContext) -> None:
        odd = ctx.rank == 1
        if wrong == "operator" and odd:
            dist.broadcast(torch.ones(3), 0)
        elif wrong == "root":
            dist.broadcast(torch.ones(3), 1 if odd else 0)
        else:
            length = 4 if wrong == "size" and odd else 3
            dtype = torch.float64 if wrong == "dtype" and odd else torch.float32
            dist.all_reduce(torch.ones(length, dtype=dtype))
        time.sleep(0.3)

    failure = failure_of(body, 3)
    assert failure.kind == "mismatch"
    assert "rank 1 calls" in failure.message


def test_point_to_point_between_some_ranks_is_no_mismatch() -> None:
    def body(ctx: RankContext) -> float:
        value = torch.tensor([float(ctx.rank)])
        if ctx.rank == 0:
            dist.send(value, 1)
        elif ctx.rank == 1:
            dist.recv(value, 0)
        dist.all_reduce(value)
        return value.item()

    assert list(run_ranks(body, 3)) == [2.0, 2.0, 2.0]


def test_output_is_captured_per_rank_and_bounded() -> None:
    def body(ctx: RankContext) -> None:
        print(f"hello from {ctx.rank}")
        os.write(2, b"to stderr\n")
        for _ in range(20_000):
            print("x" * 99)

    results = run_ranks(body, 2, process_group=False)
    for rank, text in enumerate(results.output):
        assert text.startswith(f"hello from {rank}\nto stderr\n")
        assert len(text) < 200_000


@pytest.mark.skipif(not tells_of_processes(), reason="no /proc that lists children")
def test_nothing_is_left_running() -> None:
    def forks(ctx: RankContext) -> list[int]:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            time.sleep(1000)
        return [os.getpid(), pid]

    def hangs(ctx: RankContext) -> None:
        forks(ctx)
        time.sleep(1000)

    def children() -> set[str]:
        reap_children()  # of virtual runs before
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    before = children()  # other tests may have started something that lives longer
    pids = [pid for pair in run_ranks(forks, 2, process_group=False) for pid in pair]
    failure_of(hangs, 2, timeout=0.5, process_group=False)
    end = time.monotonic() + 5  # what was killed ends at once, on a busy machine a little later
    while time.monotonic() < end:
        left = children() - before
        if not left and not [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
            return
        time.sleep(0.05)
    raise AssertionError(f"still there: {left} of {pids}")


@pytest.mark.skipif(not tells_of_processes(), reason="no /proc that lists children")
@pytest.mark.parametrize(
    ("number", "start"),
    [(2, subprocess.Popen), (15, forked_commands.Popen), (9, forked_commands.Popen)],
)
def test_interrupt_and_kill_leave_nothing(
    number: int, start: type[subprocess.Popen], tmp_path: Path
) -> None:
    script = tmp_path / "interrupted_run.py"
    script.write_text(
        "import signal, time\nfrom distlab.ranks import run_ranks\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # none in background jobs
        "def body(ctx):\n"
        f"    open({str(tmp_path)!r} + f'/up{{ctx.rank}}', 'w')\n    time.sleep(1000)\n"
        "run_ranks(body, 3, timeout=900)\n"
    )
    environment = os.environ | {"PYTHONPATH": ROOT}
    command = [sys.executable, str(script)]
    process = start(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(list(tmp_path.glob("up*"))) == 3)
        ranks = descendants(process.pid)
        assert len(ranks) == 3
        process.send_signal(number)
        assert process.wait(timeout=20) == -number
        wait_for(lambda: all(map(is_ending, ranks)))
    finally:
        process.kill()


def wait_for(condition) -> None:
    end = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < end, "still not so after 180 s"
        time.sleep(0.05)


def test_two_runs_side_by_side() -> None:
    code = (
        "import torch, torch.distributed as dist\nfrom distlab.ranks import run_ranks\n"
        "def body(ctx):\n    x = torch.ones(3)\n    dist.all_reduce(x)\n    return x.sum().item()\n"
        "for _ in range(3): assert list(run_ranks(body, 3)) == [9.0] * 3\n"
    )
    both = [
        forked_commands.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": ROOT})
        for _ in range(2)
    ]
    assert [p.wait(timeout=120) for p in both] == [0, 0]


def test_results_are_plain_data_only() -> None:
    def body(ctx: RankContext) -> object:
        return RankContext(0, 1, torch.device("cpu"), 0)

    failure = failure_of(body, 1, process_group=False)
    assert "tensors, numbers, strings" in failure.message


def test_where_fork_is_unsafe_ranks_are_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlab.ranks.parent.fork_problem", lambda device: "a test says so")

    def body(ctx: RankContext, factor: int) -> float:
        value = torch.tensor([float(ctx.rank + 1)])
        dist.all_reduce(value)
        return value.item() * factor

    with pytest.warns(UserWarning, match="a test says so"):
        results = run_ranks(body, 2, 10, timeout=120)
    assert list(results) == [30.0, 30.0]
    lines = {event.line.rpartition(":")[0] for log in results.logs for event in log.events}
    assert lines == {__file__}  # what carries functions keeps the names of their files


def test_spawned_ranks_find_what_checks_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of a check's file go to the new process by name; it has another path."""
    monkeypatch.setattr("distlab.ranks.parent.fork_problem", lambda device: "a test says so")
    phase = load_course().phases[0]
    request = Request(exercises=("1.6",), checks=("test_evaluation_is_exact",), trusted=True)
    report = run_session(phase, request, keyword="gloo")
    assert [c.verdict for e in report.exercises for c in e.checks] == ["pass"], report


def test_what_goes_wrong_before_a_spawned_rank_begins_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distlab.ranks.parent.fork_problem", lambda device: "a test says so")
    lost = ModuleType("nowhere_to_be_found")
    lost.body = lambda ctx: None  # type: ignore[attr-defined]
    lost.body.__module__, lost.body.__qualname__ = lost.__name__, "body"
    monkeypatch.setitem(sys.modules, lost.__name__, lost)
    with pytest.warns(UserWarning, match="a test says so"):
        failure = failure_of(lost.body, 1, process_group=False)
    assert failure.kind == "crash"
    assert "No module named 'nowhere_to_be_found'" in failure.reports[0].output


def test_setting_up_is_not_the_bodys_time() -> None:
    """A context of CUDA, or the import of torch in a new process, takes seconds."""
    slow = run_ranks(lambda ctx: 7, 2, timeout=0.5, enter=lambda rank: time.sleep(1))
    assert list(slow) == [7, 7]


def test_tensors_of_a_gpu_come_back_where_there_is_none() -> None:
    def body(ctx: RankContext) -> torch.Tensor:
        torch.serialization.location_tag = lambda storage: "cuda:0"
        return torch.arange(3)

    (value,) = run_ranks(body, 1, process_group=False)
    assert value.tolist() == [0, 1, 2]
    assert value.device.type == "cpu"


@pytest.mark.skipif(not tells_of_processes(), reason="no /proc that names threads")
def test_threads_of_autograd_are_noticed() -> None:
    """What a backward starts where there is a GPU, or the first one is that of a fake tensor."""
    assert fork_problem() == ""
    named, end = threading.Event(), threading.Event()

    def like_autograds() -> None:
        comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        comm.write_text("pt_autograd_0", encoding="utf-8")
        named.set()
        end.wait()

    thread = threading.Thread(target=like_autograds)
    thread.start()
    named.wait()
    problem = fork_problem()
    end.set()
    thread.join()
    assert "autograd has threads" in problem


def test_blank_is_told_apart() -> None:
    def body(ctx: RankContext) -> None:
        raise NotImplementedError("exercise 1.4")

    assert failure_of(body, 2, process_group=False).kind == "blank"


def test_ranks_start_from_different_random_states() -> None:
    def body(ctx: RankContext) -> torch.Tensor:
        return torch.rand(4)

    first, again = (run_ranks(body, 3, process_group=False, seed=5) for _ in range(2))
    assert not torch.equal(first[0], first[1])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("tier", [run_ranks, run_virtual])
def test_a_seed_keeps_no_stack(
    tier: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(ctx: RankContext) -> float:
        torch.manual_seed(3)
        return torch.rand(1).item()

    want = body(RankContext(0, 1, torch.device("cpu"), 0))
    monkeypatch.setattr(traceback, "format_stack", lambda: pytest.fail("a stack was formatted"))
    assert [*tier(body, 2)] == [want, want]


def test_world_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        run_ranks(lambda ctx: None, 0)


@pytest.mark.parametrize("run", [run_ranks, run_virtual])
def test_views_of_one_memory_as_several_dtypes_come_back(run: Callable[..., list[Any]]) -> None:
    """As safetensors loads a file; torch writes no such tensors together."""

    def body(ctx: RankContext) -> list[torch.Tensor]:
        memory = torch.arange(16, dtype=torch.uint8)
        return [memory[:8].view(torch.int32), memory[8:]]

    ((numbers, small),) = run(body, 1)
    assert numbers.view(torch.uint8).tolist() == list(range(8))
    assert small.tolist() == list(range(8, 16))


def test_communication_that_was_only_recorded_is_found() -> None:
    """The kernel's count of a rank's connections is not the rank's to make."""

    def body(ctx: RankContext, invented: int) -> None:
        dist.all_reduce(torch.ones(100))
        if invented and ctx.rank == 1:
            data = [torch.ones(invented)]
            ctx.ledger.end(ctx.ledger.begin("all_reduce", dist.group.WORLD, data, None, {}))

    run_ranks(body, 2, 0)
    with pytest.raises(RankFailure) as caught:
        run_ranks(body, 2, 1000)
    assert caught.value.cause == "invented-communication"
    assert caught.value.rank == 1


@pytest.mark.parametrize("tier", [run_ranks, run_virtual])
def test_a_result_that_is_no_plain_data_is_named(tier: Callable[..., object]) -> None:
    with pytest.raises(RankFailure) as caught:
        tier(lambda ctx: {"part": [slice(1, 2), torch.ones(3)]}, 2)
    assert caught.value.message.splitlines()[0].endswith("tuples and dicts only: not slice")
