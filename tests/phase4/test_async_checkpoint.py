"""Checks of exercise 4.3: the snapshot, and the writer beside training."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grading import exercise, expect_equal, fail, trace
from distlab.host.program_clock import until
from tests.phase4.checkpoints import difference, store_in
from tests.phase4.disk import full_for, without_waiting

PATIENCE = 2.0  # seconds (of the rank's own time): then a disk that nobody frees gives up waiting


class Gate:
    """The disk: whoever flushes waits until it is open."""

    def __init__(self) -> None:
        self.open, self.gave_up = threading.Event(), False
        os.fsync = os.fdatasync = self._flush

    def _flush(self, file) -> None:
        if not until(self.open.is_set, PATIENCE):
            self.gave_up = True
            self.open.set()

    def open_after(self, seconds: float) -> None:
        """Open when so much of this rank's own time has passed."""

        def wait() -> None:
            until(self.open.is_set, seconds)
            self.open.set()

        threading.Thread(target=wait, daemon=True).start()

    def open_once_timed(self, seconds: float) -> None:
        """Open so long after this thread first asks what time it is, as whoever times a wait does.

        So the wait lies between its two looks at the clock, however busy the machine is. A save
        that waits for nothing has returned by then: the rank's own time leaves out what it waits
        for a processor.
        """
        real, timing = time.perf_counter, threading.current_thread()

        def perf_counter() -> float:
            now = real()
            if threading.current_thread() is timing and time.perf_counter is perf_counter:
                time.perf_counter = real
                self.open_after(seconds)
            return now

        time.perf_counter = perf_counter


def tensors_of(seed: int) -> dict:
    """Every kind of tensor that training has."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(40, 30, generator=draw)
    return {
        "weight": weight,
        "tied": weight,
        "column": torch.randn(9, 9, generator=draw)[:, 3],
        "transposed": torch.randn(5, 4, generator=draw).t(),
        "half": torch.randn(17, generator=draw).bfloat16(),
        "step": torch.tensor(3.0),
        "empty": torch.empty(0, 2),
        "tokens": torch.arange(6),
    }


def every_tensor(tree) -> list[Tensor]:
    """All tensors of a tree."""
    if isinstance(tree, Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree
    nested = [every_tensor(v) for v in values if isinstance(v, (dict, list, tuple, Tensor))]
    return [tensor for found in nested for tensor in found]


def equal(got: list[Tensor], want: list[Tensor]) -> bool:
    """Whether they are the same to the last bit."""
    return not difference(got, want)


def fill(tree, number: float) -> None:
    for tensor in every_tensor(tree):
        tensor.fill_(number)


def deep_state(seed: int) -> dict:
    """A state with tensors at several depths, and what is no tensor."""
    return {"a": tensors_of(seed), "b": [{0: (tensors_of(seed + 1), "text", None)}], "c": [1]}


def model_of(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, before the first step."""
    draw, model = torch.Generator().manual_seed(seed), nn.Linear(20, 30)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=draw)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def groups() -> int:
    """How many process groups there are."""
    return len(dist.distributed_c10d._world.pg_map)


# -- the snapshot ---------------------------------------------------------------------------------
@exercise("4.3", "virtual cuda")
def test_snapshot_is_a_copy(impl, run, seed):
    """Equal values, shapes and ties, on the CPU, and no memory or list in common with the state."""

    def body(ctx):
        state = deep_state(seed)
        state["a"] = {name: tensor.to(ctx.device) for name, tensor in state["a"].items()}
        state["a"]["tied"] = state["a"]["weight"]
        taken = impl.Snapshot().take(state)
        fill(state, 99)
        state["c"].append(2)
        got = every_tensor(taken)
        facts = [taken["c"], taken["b"][0][0][1:], type(taken["b"][0][0]).__name__]
        tied = taken["a"]["tied"].data_ptr() == taken["a"]["weight"].data_ptr()
        parameter = impl.Snapshot().take({"p": nn.Parameter(torch.ones(3, device=ctx.device))})["p"]
        devices = [t.device.type for t in got]
        return [t.detach().cpu() for t in got], facts, tied, devices, parameter.grad_fn is None

    [[got, facts, tied, devices, free]] = run(body, 1, process_group=False)
    same = equal(got, every_tensor(deep_state(seed)))
    expect_equal(same, True, what="the snapshot after the state has changed", cause="moment")
    expect_equal(facts, [[1], ("text", None), "tuple"], what="what is no tensor", cause="moment")
    expect_equal(tied, True, what="tied weights are copied once", cause="untied")
    on_cpu = devices == ["cpu"] * len(devices)
    expect_equal(on_cpu, True, what="the snapshot is on the CPU", cause="device")
    what = "a parameter's copy has no graph that leads back to it"
    expect_equal(free, True, what=what, cause="graph-kept")


@exercise("4.3", "virtual")
def test_snapshot_memory_is_used_again(impl, run, seed):
    """The second copy takes the first one's memory; a tensor of another shape gets its own."""

    def body(ctx):
        snapshot, state = impl.Snapshot(), {"a": tensors_of(seed), "grows": torch.ones(3)}
        first = {t.data_ptr() for t in every_tensor(snapshot.take(state)["a"]) if t.numel()}
        state["grows"] = torch.ones(5)
        fill(state, 2)
        taken = snapshot.take(state)
        second = {t.data_ptr() for t in every_tensor(taken["a"]) if t.numel()}
        reused = first == second  # the addresses
        return reused, [t.detach().cpu() for t in every_tensor(taken)]

    [[reused, got]] = run(body, 1, process_group=False)
    state = {"a": tensors_of(seed), "grows": torch.ones(5)}
    fill(state, 2)
    same = equal(got, every_tensor(state))
    expect_equal(same, True, what="the second snapshot equals the state", cause="moment")
    expect_equal(reused, True, what="its memory is the first one's", cause="new-memory")


# -- the writer -----------------------------------------------------------------------------------
@exercise("4.3", "gloo")
def test_file_holds_the_moment_of_the_call(impl, run, seed, folder):
    """The disk is slow, training goes on and changes everything in place: the file doesn't."""

    def body(ctx):
        gate = Gate()
        model, optimizer = model_of(seed)

        def train() -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 20)).sum().backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)  # training talks, too, while the writers do
            optimizer.step()

        train()
        store = store_in(impl, folder)
        with contextlib.closing(impl.AsyncCheckpointer(store)) as checkpointer:
            mine, counts = tensors_of(seed + ctx.rank), [1]
            shared = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            shared["counts"] = counts
            checkpointer.save(5, shared, mine, metadata={"loss": 0.5})
            waited = gate.gave_up or bool(store.steps())
            for _ in range(3):
                train()
            fill(mine, 77)
            counts.append(2)
            gate.open.set()
            path = checkpointer.wait()
        error_type = impl.module("fault_tolerance").CheckpointError
        try:
            saved = store.load()
        except error_type as error:  # hashed at one moment, written at another
            return waited, str(error), [], [], None, None
        trees = saved.shared, saved.own(ctx.rank)
        got = [[t.clone() for t in every_tensor(tree)] for tree in trees]  # some are views
        facts = [saved.step, saved.metadata, str(Path(path).parent)]
        return waited, "", *got, saved.shared["counts"], facts

    want = every_tensor(after_a_step(seed, 2))
    results = run(body, 2, ledger=False)
    for rank, (waited, problem, shared, own, counts, facts) in enumerate(results):
        shared = problem or (equal(shared, want) and counts == [1])
        own = problem or equal(own, [*tensors_of(seed + rank).values()])
        expect_equal(waited, False, what="save waited for the disk", rank=rank, cause="synchronous")
        what = "shared state as it was when save was called"
        expect_equal(shared, True, what=what, rank=rank, cause="moment")
        what = "the rank's own state as it was when save was called"
        expect_equal(own, True, what=what, rank=rank, cause="moment")
        where = [5, {"loss": 0.5}, str(folder)]
        expect_equal(facts, where, what="step, metadata, folder", rank=rank)


def after_a_step(seed: int, world_size: int) -> dict:
    """What the ranks of the check above share after their first step of training."""
    model, optimizer = model_of(seed)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0 * world_size)  # of each rank's sum over two rows of ones
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@exercise("4.3", "gloo")
def test_one_save_at_a_time(impl, run, seed, folder):
    """A second save waits for the first, and says how long; both checkpoints are right."""

    def body(ctx, root):
        gate, store = Gate(), store_in(impl, root)
        state = {"w": torch.zeros(1000)}
        checkpointer = impl.AsyncCheckpointer(store)
        returned = [checkpointer.save(1, state, state)]
        fill(state, 1)
        begun = time.monotonic()
        gate.open_once_timed(0.3)
        returned.append(checkpointer.save(2, state, state))
        took = time.monotonic() - begun
        there = store.steps()
        if 1 not in there:  # two writers at once: what they leave depends on chance
            return there, [], [], returned, took
        fill(state, 2)
        checkpointer.wait()
        stalls = list(checkpointer.stalls)
        checkpointer.close()
        found = [float(store.load(s).own(ctx.rank)["w"].unique()) for s in (1, 2)]
        return there, found, stalls, returned, took

    for world_size in (1, 2):
        results = run(body, world_size, folder / str(world_size), ledger=False)
        for rank, (there, found, stalls, returned, took) in enumerate(results):
            what = "complete when the second save returns"
            expect_equal(there[:1], [1], what=what, rank=rank, cause="overtaken")
            expect_equal(
                found, [0.0, 1.0], what="values in the two files", rank=rank, cause="moment"
            )
            same, stall = stalls == returned, returned[1]
            expect_equal(same, True, what="stalls are what save returned", rank=rank, cause="stall")
            if not 0.3 <= stall <= took:
                message = (
                    f"the second save took {took:.3f} s on rank {rank}, its stall is {stall:.3f}"
                )
                fail(f"{message}: waiting for the first one counts", cause="stall", rank=rank)


@exercise("4.3", "gloo")
def test_errors_of_the_writer_are_raised(impl, run, seed, folder):
    """One rank's disk is full: the next call raises it on every rank, once; then all is well."""

    def body(ctx):
        without_waiting()
        store, out = store_in(impl, folder), []

        def attempt(call, *args) -> None:
            try:
                call(*args)
                out.append("")
            except Exception as error:
                out.append(f"{type(error).__name__}: {error}")

        checkpointer = impl.AsyncCheckpointer(store)
        for then in (checkpointer.wait, lambda: checkpointer.save(9, {"w": torch.ones(3)})):
            attempt(checkpointer.save, 1, {"w": torch.ones(3)})
            attempt(checkpointer.wait)
            full_for(lambda: ctx.rank == 1)
            attempt(checkpointer.save, 2, {"w": torch.ones(3)}, {"own": 1})
            attempt(then)
            without_waiting()
            attempt(checkpointer.wait)
        steps = store.steps()
        full_for(lambda: ctx.rank == 1)
        attempt(checkpointer.save, 3, {"w": torch.ones(3)})
        attempt(checkpointer.close)
        return out, steps

    for rank, (out, steps) in enumerate(run(body, 2, ledger=False)):
        heard = [number for number, text in enumerate(out) if text]
        if heard != [3, 8, 11]:
            message = f"rank {rank}: the writer fails at calls 2, 7 and 10, whose error was raised "
            fail(
                f"{message}at {heard}, not at the calls that follow", cause="error-lost", rank=rank
            )
        for number in heard:
            if not out[number].startswith("CheckpointError") or "rank 1" not in out[number]:
                fail(f"not the writer's own error: {out[number]}", cause="unclear", rank=rank)
        expect_equal(steps, [1], what="steps on the disk", rank=rank, cause="previous-lost")


@exercise("4.3", "gloo")
def test_nothing_is_left_behind(impl, run, seed, folder):
    """At the end of a with block the last save is on the disk, and no thread is left."""

    def body(ctx):
        without_waiting()
        store, before = store_in(impl, folder), [threading.active_count(), groups()]
        try:
            with impl.AsyncCheckpointer(store) as checkpointer:
                own_groups = groups() - before[1]
                checkpointer.save(1, {"w": torch.ones(300_000)})
                raise KeyError("training failed")
        except KeyError:
            steps = store.steps()
        return steps, own_groups, before, [threading.active_count(), groups()]

    for rank, (steps, own_groups, before, after) in enumerate(run(body, 2, ledger=False)):
        what = "process groups made for the writers: training talks in the others"
        expect_equal(own_groups, 1, what=what, rank=rank, cause="shared-group")
        expect_equal(steps, [1], what="steps after the with block", rank=rank, cause="not-waited")
        clean = after == before
        expect_equal(clean, True, what="threads and groups as before", rank=rank, cause="left-over")


@exercise("4.3", "gloo")
def test_a_single_process_needs_no_process_group(impl, run, seed, folder):
    """Saved with scores where nobody has called init_process_group: the best one is kept."""

    def body(ctx):
        without_waiting()
        store = store_in(impl, folder, keep=1, keep_best=1)
        with impl.AsyncCheckpointer(store) as checkpointer:
            for step, score in enumerate((0.9, 0.1, 0.5), start=1):
                checkpointer.save(step, {"w": torch.ones(3)}, score=score)
        return store.steps()

    [steps] = run(body, 1, process_group=False)
    what = "steps of scores 0.9, 0.1 and 0.5 that are kept: the last one and the best"
    expect_equal(steps, [1, 3], what=what, rank=0, cause="score-lost")


@trace("4.3")
def trace_async(impl):
    """Steps of training, a save of 20 MB beside them, and a second one."""

    def body(ctx):
        root = Path(tempfile.gettempdir()) / f"distlab-trace-{os.getppid()}"  # the ranks' parent
        state = {"w": torch.ones(5_000_000)}
        with impl.AsyncCheckpointer(store_in(impl, root, keep=1)) as checkpointer:
            for step in range(6):
                if step % 3 == 0:
                    with ctx.span("save", str(step)):
                        checkpointer.save(step, state)
                with ctx.span("train"):
                    (torch.ones(300, 300) @ torch.ones(300, 300)).sum()
        dist.barrier()
        if ctx.rank == 0:
            shutil.rmtree(root)

    return body
