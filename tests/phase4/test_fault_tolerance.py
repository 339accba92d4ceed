"""Checks of exercise 4.15: what all ranks save together, and which checkpoint they load."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from distlab.grading import (
    exercise,
    expect_equal,
    expect_refused,
    fail,
    refusal,
    trace,
)
from tests.phase4.checkpoints import difference, every_kind, fresh, loaded, save
from tests.phase4.disk import slow, without_waiting


# -- what is saved --------------------------------------------------------------------------------
@exercise("4.15", "virtual gloo cuda")
def test_what_was_saved_is_loaded(impl, run, seed, folder, cases):
    """Shared and own state of every rank, every dtype and shape, ties, types of keys, metadata."""

    def body(ctx):
        without_waiting()
        root = fresh(folder, ctx.device)
        store = impl.CheckpointStore(root)
        shared, own = every_kind(seed), every_kind(seed, ctx.rank + 1)
        on_device = {"here": torch.arange(4.0, device=ctx.device)}
        path = store.save(7, shared | {"device": on_device}, own, metadata={"model": "mlp"})
        saved = impl.CheckpointStore(root, keep=1).load()
        model = saved.shared["model"]
        owns = [saved.own(r) for r in range(ctx.world_size)]
        moved = store.load(map_location="meta").shared["model"]["half"]
        own_moved = store.load(map_location="meta").own(0)["model"]["half"]
        device = saved.shared.pop("device")["here"]
        return {
            "facts": [saved.step, saved.world_size, saved.metadata, Path(path).parent == root],
            "shared": saved.shared,
            "own": owns,
            "tied": model["embedding"].data_ptr() == model["head"].data_ptr(),
            "devices": [device.device.type, moved.device.type, own_moved.device.type],
            "steps": store.steps(),
        }

    for world_size in cases(3, 1, 2, 4):
        for rank, got in enumerate(run(body, world_size)):
            want = [7, world_size, {"model": "mlp"}, True]
            expect_equal(got["facts"], want, what="step, world size, metadata, folder", rank=rank)
            owns = [every_kind(seed, r + 1) for r in range(world_size)]
            unlike = {
                "shared": difference(got["shared"], every_kind(seed)),
                "own": next(filter(None, map(difference, got["own"], owns)), ""),
            }
            for part, where in unlike.items():
                if where:
                    fail(f"{part} state, rank {rank}: {where}", cause=f"{part}-state")
            expect_equal(got["tied"], True, what="tied weights are one tensor", cause="untied")
            want = ["cpu", "meta", "meta"]
            expect_equal(got["devices"], want, what="devices of what is loaded", cause="device")
            expect_equal(got["steps"], [7], what="steps()", rank=rank)


@exercise("4.15", "gloo")
def test_files_are_safe_and_written_once(impl, run, seed, folder):
    """Safetensors, JSON and text, nothing that could run code; each path is written by one rank."""

    def body(ctx):
        written = []

        def note(event, arguments):
            if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
                path, mode, flags = arguments
                writes = flags & (os.O_WRONLY | os.O_RDWR)
                if os.fspath(path).startswith(str(folder)) and writes:
                    written.append(os.fspath(path))

        sys.addaudithook(note)
        store = impl.CheckpointStore(folder)
        kinds = every_kind(seed)
        with ctx.region("save"):
            store.save(1, kinds | {"big": torch.zeros(250_000)}, {"rank": ctx.rank})
        return written

    results = run(body, 3)
    opened = [path for written in results for path in written]
    twice = sorted({Path(path).name for path in opened if opened.count(path) > 1})
    if twice:
        fail(f"{', '.join(twice)}: opened for writing more than once", cause="written-twice")
    files = [path for path in folder.glob("*/*") if path.is_file()]
    kinds = {path.suffix for path in files}
    if ".safetensors" not in kinds:
        fail(f"no safetensors file was written: {sorted(p.name for p in files)}", cause="format")
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif not path.read_bytes().isascii():
            fail(f"{path.name} is neither safetensors nor text", cause="format")
    for log in results.logs:
        log.select(region="save").sent_at_most(1 << 16, "hashes and names, no tensors")


@exercise("4.15", "virtual")
def test_what_can_not_be_saved_is_refused_by_all(impl, run, seed, folder):
    """An object in one rank's state: one sentence on every rank, nothing changed, nobody hangs."""

    def body(ctx):
        without_waiting()
        root = fresh(folder)
        store = impl.CheckpointStore(root)
        save(store, 1, ctx.rank)
        bad = {"fine": 1, "deep": [{"here": object()}]} if ctx.rank == 1 else {"fine": 1}
        try:
            store.save(2, {"shared": 2}, bad)
            message = "!it was accepted"
        except impl.CheckpointError as error:
            message = str(error)
        names = sorted(os.listdir(root)) if ctx.rank == 0 else []
        return message, names, loaded(store)

    results = run(body, 3)
    for rank, (message, names, found) in enumerate(results):
        if message.startswith("!"):
            fail(f"an object was saved, rank {rank}", cause="accepted", rank=rank)
        if "rank 1" not in message or "here" not in message or "\n" in message:
            fail(f"the message should name rank 1 and the path: {message}", cause="unclear")
        expect_equal(found, [1, 1, [1, 2, 3], []], what="still loaded", rank=rank)
        if len(names) > 1:
            fail(f"files of the failed save are left: {names}", cause="leftovers", rank=0)


@exercise("4.15", "virtual")
def test_refusals(impl, run, seed, folder):
    """Numbers that make no sense, a step or rank that isn't there: ValueError that names them."""

    def body(ctx):
        without_waiting()
        store = impl.CheckpointStore(fresh(folder))
        save(store, 5, 0)
        return [
            refusal(impl.CheckpointStore, folder, keep=0),
            refusal(impl.CheckpointStore, folder, keep_best=-1),
            refusal(store.save, -3, {}),
            refusal(store.load, 77),
            refusal(store.load().own, 3),
        ]

    calls = [
        ("keep=0", [0]),
        ("keep_best=-1", [-1]),
        ("save(-3)", [-3]),
        ("load(77), which was never saved", [77]),
        ("own(3) of a single rank", [3, 1]),
    ]
    expect_refused(run(body, 1, process_group=False), calls)


# -- together -------------------------------------------------------------------------------------
@exercise("4.15", "virtual gloo")
def test_nobody_goes_on_before_rank_0_has_finished(impl, run, seed, folder):
    """Rank 0's disk is slower: what save has returned from can be read by every rank at once."""

    def body(ctx):
        slow(lambda: 0.02 if dist.get_rank() == 0 else 0.005)
        store = impl.CheckpointStore(fresh(folder), keep=1)
        out = []
        for step in (1, 2):
            problem = save(store, step, ctx.rank)
            out.append(problem or store.steps())
        return out

    for rank, got in enumerate(run(body, 3)):
        for problem in got:
            if isinstance(problem, str):
                message = f"save failed on rank {rank}: {problem}; does one rank alone make, rename"
                fail(f"{message} and delete what is everybody's?", cause="not-saved", rank=rank)
        want = [[1], [2]]
        what = "steps() at once after save, keep=1"
        expect_equal(got, want, what=what, rank=rank, cause="too-early")


@exercise("4.15", "virtual gloo")
def test_all_ranks_load_the_same(impl, run, seed, folder):
    """A checkpoint that appears while ranks begin to load is taken by all of them or by none."""

    def body(ctx):
        without_waiting()
        root = fresh(folder)
        store = impl.CheckpointStore(root)
        save(store, 1, ctx.rank)
        newer = store.save(2, {"shared": 2}, {"own": 2 + ctx.rank})
        dist.barrier()
        hidden = folder / f"{root.name}-hidden"
        if ctx.rank == 0:
            os.rename(newer, hidden)
        dist.barrier()
        if ctx.rank == 1:
            time.sleep(0.1)
            os.rename(hidden, newer)
        return loaded(store)

    results = run(body, 3)
    for rank, got in enumerate(results):
        if got is None or got[0] not in (1, 2):
            fail(f"rank {rank} found {got}", cause="not-loaded", rank=rank)
        if got != results[0]:
            fail(
                f"rank 0 loaded step {results[0][0]}, rank {rank} step {got[0]}: if each looks for "
                "itself, they train on different weights",
                cause="disagree",
                rank=rank,
            )


@trace("4.15")
def trace_save(impl):
    """Four ranks save 20 MB each, two times, and load."""

    def body(ctx):
        root = Path(tempfile.gettempdir()) / f"distlab-trace-{os.getppid()}"  # the ranks' parent
        store = impl.CheckpointStore(root, keep=1)
        state = {"w": torch.ones(5_000_000)}
        for step in (1, 2):
            if step == 2:
                ctx.start_picture()
            with ctx.span("save", str(step)):
                store.save(step, state, state)
        with ctx.span("load"):
            store.load()
        dist.barrier()
        if ctx.rank == 0:
            shutil.rmtree(root)

    return body
