"""Checks of exercise 4.15: the state that all ranks save together, and the
checkpoint that they load."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from distlab.grading import (
    exercise,
    expect_equal,
    expect_refusals,
    fail,
    refusal,
    trace,
)
from tests.phase4.checkpoints import difference, every_kind, fresh, loaded, save
from tests.phase4.damages import bit
from tests.phase4.disk import slow, without_waiting


# -- what is saved --------------------------------------------------------------------------------
@exercise(
    "4.15",
    "virtual gloo cuda",
    asserts="saved loaded map-location ties dtype layout parameters unchanged same-folder",
)
def test_what_was_saved_is_loaded(impl, run, seed, folder, cases):
    """Shared and own state of every rank, every dtype and shape, ties, types of keys, metadata."""

    def body(ctx):
        without_waiting()
        root = fresh(folder, ctx.device)
        store = impl.CheckpointStore(root)
        shared, own = every_kind(seed), every_kind(seed, ctx.rank + 1)
        on_device = {"here": torch.arange(4.0, device=ctx.device)}
        path = store.save(7, shared | {"device": on_device}, own, metadata={"model": "mlp"})
        changed = difference(shared, every_kind(seed)) or difference(
            own, every_kind(seed, ctx.rank + 1)
        )
        empty = store.save(8, shared)
        newest = store.load()
        few = [newest.step, newest.metadata, newest.own(0), Path(empty) == newest.folder]
        saved = impl.CheckpointStore(root, keep=1).load(7)
        model = saved.shared["model"]
        owns = [saved.own(r) for r in range(ctx.world_size)]
        moved = store.load(7, map_location="meta").shared["model"]["half"]
        own_moved = store.load(7, map_location="meta").own(0)["model"]["half"]
        device = saved.shared.pop("device")["here"]
        return {
            "facts": [saved.step, saved.world_size, saved.metadata, Path(path).parent == root],
            "shared": saved.shared,
            "own": owns,
            "tied": model["embedding"].data_ptr() == model["head"].data_ptr(),
            "devices": [device.device.type, moved.device.type, own_moved.device.type],
            "steps": store.steps(),
            "path": str(path),
            "changed": changed,
            "few": few,
            "readable": [isinstance(saved.skipped, tuple), saved.skipped],
        }

    for world_size in cases(3, 1, 2, 4):
        results = run(body, world_size)
        for rank, got in enumerate(results):
            want = [7, world_size, {"model": "mlp"}, True]
            expect_equal(got["changed"], "", what="what was saved, afterwards", cause="changed")
            what = "step, metadata, own(0), folder of a save without own and metadata"
            expect_equal(got["few"], [8, {}, {}, True], what=what, rank=rank, cause="defaults")
            path = results[0]["path"]
            expect_equal(got["path"], path, what="the folder", rank=rank, cause="other-folder")
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
            expect_equal(got["steps"], [7, 8], what="steps()", rank=rank)
            expect_equal(got["readable"], [True, ()], what="skipped", rank=rank, cause="skipped")


@exercise("4.15", "gloo", asserts="written-once hashed-once format bytes cost resources")
def test_files_are_safe_and_written_once(impl, run, seed, folder):
    """Safetensors, JSON and text, nothing that could run code; each path is written by one rank."""

    def body(ctx):
        written, hashed = [], []

        def note(event, arguments):
            if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
                path, mode, flags = arguments
                writes = flags & (os.O_WRONLY | os.O_RDWR)
                if os.fspath(path).startswith(str(folder)):
                    (written if writes else hashed).append(os.fspath(path))

        sys.addaudithook(note)
        store = impl.CheckpointStore(folder)
        kinds = every_kind(seed)
        big = {"big": torch.zeros(250_000)}
        with ctx.region("save"):
            store.save(1, kinds | big, {"rank": ctx.rank} | big)
        hashed.clear()
        with ctx.region("load"):
            saved = store.load()
            read = [path for path in hashed if path.endswith(".safetensors")]
            saved.own(ctx.rank)
        before, after = held(), []
        for step in range(2, 6):
            store.save(step, big, big)
            store.load()
            gc.collect()
            after.append(held())
        return written, read, before, after

    def held():
        files = (os.path.realpath(f"/dev/fd/{number}") for number in os.listdir("/dev/fd"))
        return sum(name.startswith(str(folder)) for name in files), threading.active_count()

    results = run(body, 3)
    read = [Path(path).name for _, paths, *_ in results for path in paths]
    twice = sorted({name for name in read if read.count(name) > 1})
    expect_equal(twice, [], what="files that load hashed more than once", cause="hashed-twice")
    for rank, (_, _, before, after) in enumerate(results):
        for number, now in enumerate(after, 2):
            what = f"open files of the store, and threads, after save and load number {number}"
            expect_equal(now, before, what=what, rank=rank, cause="left-open")
    opened = [path for written, *_ in results for path in written]
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
        for region in ("save", "load"):
            log.select(region=region).sent_at_most(1 << 16, "hashes and names, no tensors")


@exercise(
    "4.15", "virtual", asserts="fails-together previous-stay gone-after-error alone again life"
)
def test_what_can_not_be_saved_is_refused_by_all(impl, run, seed, folder):
    """An object in one rank's state: an error on every rank, nothing changed, and no rank hangs."""
    places = [0, 1, 2, "metadata"]

    def body(ctx):
        without_waiting()
        root = fresh(folder)
        store = impl.CheckpointStore(root, keep=1)
        save(store, 1, ctx.rank)
        out, rmtree, slow = [], shutil.rmtree, [2]

        def late(*args, **kwargs):
            time.sleep(1.0 if dist.get_rank() == slow[0] else 0.0)
            return rmtree(*args, **kwargs)

        shutil.rmtree = late
        for bad in places:
            own = {"deep": [{"here" * 20_000: object()}]} if ctx.rank == bad else {"fine": 1}
            metadata = {"no": object()} if bad == "metadata" else {}
            slow[0] = 2 if bad else 0  # who is late to delete
            try:
                with ctx.region("refused"):
                    store.save(2, {"shared": 2}, own, metadata=metadata)
                kind = "accepted"
            except Exception as error:
                kind = "" if isinstance(error, impl.CheckpointError) else type(error).__name__
            left = [name for name in os.listdir(root) if "step-00000002" in name]  # at once
            again = save(store, 1, ctx.rank)  # at once: who deletes late would delete this one
            dist.barrier()
            out.append((kind, again, left, len(os.listdir(root)), loaded(store)))
            dist.barrier()
        problem, steps = save(store, 3, ctx.rank), store.steps()
        dist.barrier()
        shutil.rmtree = rmtree
        return out, problem, steps

    def alone(ctx):
        root = fresh(folder)
        try:
            impl.CheckpointStore(root).save(1, {"no": object()}, {})
        except Exception as error:
            return [type(error).__name__, *os.listdir(root)]
        return os.listdir(root)

    results = run(body, 3)
    for rank, (out, problem, steps) in enumerate(results):
        for bad, (kind, again, left, names, found) in zip(places, out, strict=True):
            what = f"rank {bad} gave an object to save"
            what = "metadata that are no JSON" if bad == "metadata" else what
            if kind:
                message = f"{what}: expected a CheckpointError on rank {rank}, it was {kind}"
                fail(message, cause="accepted" if kind == "accepted" else "error-type", rank=rank)
            expect_equal(found, [1, 1, [1, 2, 3], []], what=f"{what}: still loaded", rank=rank)
            expect_equal(again, "", what=f"{what}: the next save", rank=rank, cause="stuck")
            if left or names > 1:
                message = f"{what}: rank {rank} has the error, files of the failed save are left"
                fail(message, cause="leftovers", rank=rank)
        expect_equal(problem, "", what="the save after three that failed", rank=rank, cause="stuck")
        expect_equal(steps, [3], what="steps() after it, keep=1", rank=rank, cause="stuck")
    left = run(alone, 1)[0]
    if left != ["CheckpointError"]:
        text = f"one process gave an object to save: expected only a CheckpointError, got {left}"
        fail(text, cause="leftovers", rank=0)
    for log in results.logs:
        what = "errors, too, travel as short texts"
        log.select(region="refused").sent_at_most(len(places) << 16, what)


@exercise("4.15", "virtual", asserts="refusals")
def test_refusals(impl, run, seed, folder):
    """Numbers that make no sense, a step or rank that isn't there: ValueError on every rank."""

    def body(ctx):
        without_waiting()
        store = impl.CheckpointStore(fresh(folder))
        with ctx.region("numbers"):
            refused = [
                refusal(impl.CheckpointStore, folder, keep=0),
                refusal(impl.CheckpointStore, folder, keep_best=-1),
                refusal(store.save, -3, {}),
                refusal(store.save, 10**8, {}),
            ]
        empty = refusal(store.load, 0)
        save(store, 12_345_678, 0)
        save(store, 0, 0)
        save(store, 5, 0)
        saved = store.load()
        missing = [refusal(store.load, 77), refusal(store.load, 2_345_678)]
        missing += [refusal(saved.own, 2), refusal(saved.own, -1)]
        return [*refused, empty, *missing], saved.step, store.load(5).step, store.load(0).step

    calls = ["keep=0", "keep_best=-1", "save(-3)", "save(10**8)"]
    calls += ["load(0) of an empty folder", "load(77), which was never saved"]
    calls += ["load(2345678), where 12345678 was saved", "own(2) of 2 ranks", "own(-1)"]
    results = run(body, 2)
    for rank, (refusals, *steps) in enumerate(results):
        expect_refusals(refusals, calls, rank=rank)
        results.logs[rank].select(region="numbers").sent_at_most(0, "refused before it is sent")
        what = "saved 0, then 5: steps of load(), load(5), load(0)"
        expect_equal(steps, [5, 5, 0], what=what, rank=rank, cause="not-this-step")


# -- groups ---------------------------------------------------------------------------------------
@exercise("4.15", "virtual", asserts="group rank-0s newest kept loaded same-folder not-looked-at")
def test_groups_save_each_for_itself(impl, run, seed, folder):
    """Ranks 1 and 2, then 3 and 1, save; the other ranks do something else, or save elsewhere."""
    saves = [(7, 0.0), (9, 0.9), (8, -0.5), (4, None)]  # keep=1, keep_best=2: 7, 9 and 4 stay

    def body(ctx):
        without_waiting()
        root, rank = fresh(folder), ctx.rank
        groups = [dist.new_group([1, 2]), dist.new_group([0, 3]), dist.new_group([3, 1])]
        out = {}
        for number, group in enumerate(groups):
            if rank not in dist.get_process_group_ranks(group):
                continue
            members = dist.get_process_group_ranks(group)
            if number == 1:
                dist.all_reduce(torch.ones(3), group=group)  # what the others do
            store = impl.CheckpointStore(root / str(number), keep=1, keep_best=2, group=group)
            me = dist.get_rank(group)
            for step, score in saves if number != 1 else saves[1:2]:
                tree = {"shared": 10 * step + rank} if me == 0 else {"shared": object()}
                metadata = {"from": rank} if me == 0 else {"from": object()}
                score = score if me == 0 else object()
                of_step = step if me == 0 else step + 50
                path = store.save(
                    of_step, tree, {"own": 100 * step + rank}, score=score, metadata=metadata
                )
            saved = store.load()
            got = [*loaded(store), saved.world_size, saved.metadata["from"], store.steps()]
            got += [Path(path) == saved.folder]
            dist.barrier(group)
            if me == 0:
                bit(saved.folder / "shared.safetensors")
            dist.barrier(group)
            out[number] = [members, got, loaded(store)[0]]
        alone = impl.CheckpointStore(root / "2", group=groups[2]) if rank in (3, 1) else None
        return out, alone and alone.load(7).shared["shared"]

    for rank, (out, seventh) in enumerate(run(body, 4, seeds=1)):
        for number, (members, got, damaged) in out.items():
            last, steps = (4, [4, 7, 9]) if number != 1 else (9, [9])
            own = [100 * last + member for member in members]
            found = [last, 10 * last + members[0], own, []]
            want = [*found, len(members), members[0], steps, True]
            what = f"group {members}: step, shared, own states, skipped, world size, metadata, "
            what += "steps(), whether save returned the folder of what is loaded"
            expect_equal(got[:8], want, what=what, rank=rank, cause="group")
            want = 9 if number != 1 else "CheckpointError"
            what = f"group {members}, the newest damaged: the step loaded, or the error"
            expect_equal(damaged, want, what=what, rank=rank, cause="damage-unseen")
        if rank in (3, 1):
            want = 70 + out[2][0][0]
            expect_equal(seventh, want, what="load(7) of group [3, 1]", rank=rank, cause="group")


# -- together -------------------------------------------------------------------------------------
@exercise("4.15", "virtual gloo", asserts="readable-at-once saved kept")
def test_nobody_goes_on_before_rank_0_has_finished(impl, run, seed, folder):
    """Rank 0's disk is slower: as soon as save has returned, every rank can read the checkpoint."""

    def body(ctx):
        slow(lambda: 0.02 if dist.get_rank() == 0 else 0.005)
        store = impl.CheckpointStore(fresh(folder), keep=1)
        out = []
        for step in (1, 2):
            problem = save(store, step, ctx.rank)
            out.append(problem or store.steps())
        return out

    for rank, got in [*enumerate(run(body, 3)), *enumerate(run(body, 1))]:
        for problem in got:
            if isinstance(problem, str):
                message = f"save failed on rank {rank}: {problem}; does one rank alone make, rename"
                fail(f"{message} and delete what is everybody's?", cause="not-saved", rank=rank)
        want = [[1], [2]]
        what = "steps() at once after save, keep=1"
        expect_equal(got, want, what=what, rank=rank, cause="too-early")


@exercise("4.15", "virtual gloo", asserts="same-on-all")
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
