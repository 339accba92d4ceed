"""Checks of exercise 4.3: the snapshot, and the writer beside training."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import tempfile
import threading
import time
import weakref
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
    """The disk: a thread that flushes waits until it is open."""

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
        """Open so many seconds after this thread first asks for the time, as a thread does that
        times a wait.

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
        "double": torch.randn(2, 3, generator=draw, dtype=torch.float64),
        "scalar": torch.randn((), generator=draw).half(),
        "mask": torch.tensor([True, False]),
        "tokens": torch.arange(1 << 53, (1 << 53) + 6),
        "also empty": torch.empty(0, 2, dtype=torch.int64),
        "block": weight[:, :4],
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
    """A state with tensors at several depths, and with values that are no tensors."""
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
@exercise(
    "4.3",
    "virtual cuda",
    asserts="all-copied new-containers nothing-depends same-kind unchanged dtype layout parameters",
)
def test_snapshot_is_a_copy(impl, run, seed):
    """Equal values, shapes and ties, on the CPU, and no memory or list in common with the state."""

    def body(ctx):
        state = deep_state(seed)
        state["a"] = {name: tensor.to(ctx.device) for name, tensor in state["a"].items()}
        state["a"]["tied"] = state["a"]["weight"]
        draw = torch.ones(2, 3)
        state["bits"] = [draw, draw.view(torch.int32)]  # one piece of memory, two meanings
        one = torch.ones(1, device=ctx.device)
        state["ones"] = [one, one]
        taken = impl.Snapshot().take(state)
        bits = [[str(t.dtype), t.flatten().tolist()] for t in taken.pop("bits")]
        ones = [t.data_ptr() for t in taken.pop("ones")]
        del state["bits"], state["ones"]
        changed = ctx.device.type == "cpu" and difference(state, deep_state(seed))
        fill(state, 99)
        state["c"].append(2)
        got = every_tensor(taken)
        facts = [taken["c"], taken["b"][0][0][1:], type(taken["b"][0][0]).__name__]
        tied = taken["a"]["tied"].data_ptr() == taken["a"]["weight"].data_ptr()
        tied = tied and ones[0] == ones[1]
        parameter = impl.Snapshot().take({"p": nn.Parameter(torch.ones(3, device=ctx.device))})["p"]
        devices = [t.device.type for t in got]
        free = parameter.grad_fn is None
        return [t.detach().cpu() for t in got], facts, tied, devices, free, bits, changed

    [[got, facts, tied, devices, free, bits, changed]] = run(body, 1, process_group=False)
    want = [["torch.float32", [1.0] * 6], ["torch.int32", [0x3F800000] * 6]]
    expect_equal(bits, want, what="two tensors of other dtypes in one memory", cause="moment")
    expect_equal(changed or "", "", what="the state, by taking a snapshot", cause="changed")
    same = equal(got, every_tensor(deep_state(seed)))
    expect_equal(same, True, what="the snapshot after the state has changed", cause="moment")
    expect_equal(facts, [[1], ("text", None), "tuple"], what="what is no tensor", cause="moment")
    expect_equal(tied, True, what="tied weights are copied once", cause="untied")
    on_cpu = devices == ["cpu"] * len(devices)
    expect_equal(on_cpu, True, what="the snapshot is on the CPU", cause="device")
    what = "a parameter's copy has no graph that leads back to it"
    expect_equal(free, True, what=what, cause="graph-kept")


@exercise("4.3", "virtual", asserts="used-again given-back life resources")
def test_snapshot_memory_is_used_again(impl, run, seed):
    """The second copy takes the first one's memory; a tensor of another shape gets its own."""

    def body(ctx):
        snapshot, state = impl.Snapshot(), {"a": tensors_of(seed), "grows": torch.ones(3)}
        state |= {"bits": torch.ones(4), 1: torch.ones(6), "1": torch.ones(6)}
        first = {t.data_ptr() for t in every_tensor(snapshot.take(state)["a"]) if t.numel()}
        state["grows"] = torch.ones(5)
        fill(state, 2)
        state["bits"] = torch.full((4,), 7, dtype=torch.int32)  # as many bytes, another dtype
        state[1].fill_(3)
        taken = snapshot.take(state | {"gone": torch.ones(1000)})
        gone = weakref.ref(taken.pop("gone"))
        del taken
        taken = snapshot.take(state)
        gc.collect()
        gone = gone() is None
        second = {t.data_ptr() for t in every_tensor(taken["a"]) if t.numel()}
        reused = first == second  # the addresses
        return reused, [t.detach().cpu() for t in every_tensor(taken)], gone

    [[reused, got, gone]] = run(body, 1, process_group=False)
    what = "memory of a tensor that the next state hasn't is given back"
    expect_equal(gone, True, what=what, cause="memory-kept")
    state = {"a": tensors_of(seed), "grows": torch.ones(5)}
    fill(state, 2)
    state |= {"bits": torch.full((4,), 7, dtype=torch.int32)}
    state |= {1: torch.full((6,), 3.0), "1": torch.full((6,), 2.0)}
    same = equal(got, every_tensor(state))
    expect_equal(same, True, what="the second snapshot equals the state", cause="moment")
    expect_equal(reused, True, what="its memory is the first one's", cause="new-memory")


# -- the writer -----------------------------------------------------------------------------------
@exercise("4.3", "gloo", asserts="written-later moment no-waiting own-group cost")
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
            metadata = {"loss": 0.5, "more": [1]}
            checkpointer.save(5, shared, mine, metadata=metadata)
            metadata["more"].append(2)
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
        where = [5, {"loss": 0.5, "more": [1]}, str(folder)]
        expect_equal(facts, where, what="step, metadata, folder", rank=rank, cause="moment")


def after_a_step(seed: int, world_size: int) -> dict:
    """The state that the ranks of the check above share after their first step of training."""
    model, optimizer = model_of(seed)
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0 * world_size)  # of each rank's sum over two rows of ones
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@exercise("4.3", "gloo", asserts="one-at-a-time stalls moment no-waiting")
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


@exercise(
    "4.3",
    "gloo",
    asserts="writers-error nothing-begun last-folder can-not-copy given-up alone refusals life",
)
def test_errors_of_the_writer_are_raised(impl, run, seed, folder):
    """One rank fails: the next call raises the error on every rank, once; later calls work."""

    def body(ctx):
        without_waiting()
        store, out = store_in(impl, folder), []

        def attempt(call, *args) -> None:
            try:
                got = call(*args)
                out.append("" if isinstance(got, float) else f"{got and Path(got).name[-8:]}")
            except Exception as error:
                out.append(type(error).__name__)

        checkpointer = impl.AsyncCheckpointer(store)
        attempt(checkpointer.wait)
        for then in (checkpointer.wait, lambda: checkpointer.save(9, {"w": torch.ones(3)})):
            attempt(checkpointer.save, 1, {"w": torch.ones(3)})
            attempt(checkpointer.wait)
            full_for(lambda: ctx.rank == 1)
            attempt(checkpointer.save, 2, {"w": torch.ones(3)}, {"own": 1})
            attempt(then)
            without_waiting()
            attempt(checkpointer.wait)
        nowhere = torch.ones(3, device="meta")  # it has no values to copy
        attempt(checkpointer.save, 4, {"w": torch.ones(3)}, {"own": nowhere if ctx.rank else 1})
        attempt(checkpointer.wait)
        steps = store.steps()
        full_for(lambda: ctx.rank == 1)
        attempt(checkpointer.save, 3, {"w": torch.ones(3)})
        before = groups()
        attempt(checkpointer.close)
        gone = before - groups()
        attempt(checkpointer.close)
        without_waiting()
        try:
            with impl.AsyncCheckpointer(store) as again:
                again.save(6, {"w": torch.ones(3)})
                again.wait()
                full_for(lambda: ctx.rank == 1)
                again.save(7, {"w": torch.ones(3)})
            out.append("")
        except Exception as error:
            out.append(type(error).__name__)
        without_waiting()
        return out, steps, gone, store.steps()

    calls = ["wait before any save"]
    for then in ("wait", "save"):
        calls += ["save 1", "wait", "save 2, a disk is full", then, "wait after that"]
    calls += ["save 4, which a rank can't copy", "wait", "save 3, a disk is full", "close"]
    calls += ["close once more", "the end of a with block whose save failed"]
    error, one = "CheckpointError", "00000001"
    want = ["None", "", one, "", error, one, "", one, "", error, one]
    want += ["", error, "", error, None, error]
    for rank, (out, steps, gone, later) in enumerate(run(body, 2, ledger=False)):
        for number, (call, wanted, got) in enumerate(zip(calls, want, out, strict=True)):
            if wanted is None and "Error" not in got:
                continue  # what the second close returns
            if got != wanted:
                cause = "error-lost" if error in (wanted, got) else "last-folder"
                said = "an error of the writer, which is raised once, at the call after the save"
                message = f"rank {rank}, call {number}, {call}: expected {wanted or 'no error'!r}, "
                fail(f"{message}got {got!r} ({said})", cause=cause, rank=rank)
        expect_equal(steps, [1], what="steps on the disk", rank=rank, cause="previous-lost")
        what = "groups that close gave back, when the save had failed"
        expect_equal(gone, 1, what=what, rank=rank, cause="left-over")
        expect_equal(later, [1, 6], what="steps in the end", rank=rank, cause="previous-lost")


@exercise("4.3", "gloo", asserts="closed-at-the-end own-group given-up resources life")
def test_nothing_is_left_behind(impl, run, seed, folder):
    """At the end of a with block the last save is on the disk, and no thread is left; twice."""

    def body(ctx):
        without_waiting()
        store, before = store_in(impl, folder), [threading.active_count(), groups()]
        found = []
        for step in (1, 2):
            try:
                with impl.AsyncCheckpointer(store) as checkpointer:
                    own_groups = groups() - before[1]
                    checkpointer.save(step, {"w": torch.ones(300_000)})
                    raise KeyError("training failed")
            except KeyError:
                found.append(store.steps())
        return found, own_groups, before, [threading.active_count(), groups()]

    for rank, (found, own_groups, before, after) in enumerate(run(body, 2, ledger=False)):
        what = "steps after the with blocks"
        expect_equal(found, [[1], [1, 2]], what=what, rank=rank, cause="not-waited")
        what = "process groups made for the writers: training talks in the others"
        expect_equal(own_groups, 1, what=what, rank=rank, cause="shared-group")
        clean = after == before
        expect_equal(clean, True, what="threads and groups as before", rank=rank, cause="left-over")


@exercise("4.3", "gloo", asserts="group own-group store-stays only-own")
def test_ranks_of_a_group_save_for_themselves(impl, run, seed, folder):
    """Ranks 1 and 2 of 3 save, and rank 0 elsewhere; they talk in the store's group, too."""

    def body(ctx):
        without_waiting()
        groups = dist.new_group([2, 1]), dist.new_group([0])
        group = groups[ctx.rank == 0]
        store = store_in(impl, folder / f"group {ctx.rank == 0}", group=group)
        me, numbers = dist.get_rank(group), []
        with impl.AsyncCheckpointer(store) as checkpointer:
            for step in (1, 2, 3):
                # nobody looks at the shared state of other ranks: a tensor that has no values
                shared = {"w": torch.full((99,), float(step), device="meta" if me else "cpu")}
                checkpointer.save(step, shared, {"own": ctx.rank * step}, score=1.0 * step)
                number = torch.tensor(1.0 * ctx.rank)
                dist.all_reduce(number, group=group)
                numbers.append(number.item())
        same = store.group is group
        saved = store.load()
        own = [saved.own(r)["own"] for r in range(saved.world_size)]
        return numbers, same, [saved.step, own, saved.shared["w"].unique().tolist()], store.steps()

    for rank, got in enumerate(run(body, 3, ledger=False)):
        members = [1, 2] if rank else [0]
        numbers, same, found, steps = got
        what = f"sums of training, in the store's group {members}"
        expect_equal(numbers, [1.0 * sum(members)] * 3, what=what, rank=rank, cause="mixed-up")
        expect_equal(same, True, what="the caller's store keeps its group", cause="store-changed")
        what = f"group {members}: step, own states, shared value"
        want = [3, [3 * member for member in members], [3.0]]
        expect_equal(found, want, what=what, rank=rank, cause="group")
        expect_equal(steps, [1, 2, 3], what="steps()", rank=rank, cause="group")


@exercise("4.3", "gloo", asserts="as-save alone-no-group")
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
