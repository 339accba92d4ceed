"""Checks of exercise 4.15: damaged checkpoints, and disks that are full."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from distlab.grading import exercise, expect_equal, fail
from tests.phase4.checkpoints import fresh, loaded, save
from tests.phase4.damages import DAMAGES, bit
from tests.phase4.disk import full_for, without_waiting

# -- damage ---------------------------------------------------------------------------------------


@exercise("4.15", "virtual", asserts="passed-over skipped same-on-all")
def test_damaged_checkpoints_are_passed_over(impl, run, seed, folder):
    """Any file torn, rotten or gone: all ranks take the checkpoint before, and hear which
    one is skipped and why."""

    def body(ctx):
        without_waiting()
        good = fresh(folder)
        store = impl.CheckpointStore(good)
        save(store, 1, ctx.rank)
        newest = Path(store.save(2, {"shared": 2, "w": torch.ones(99)}, {"own": 2 + ctx.rank}))
        out = []
        for name in sorted(os.listdir(newest)):
            for what, damage in DAMAGES.items():
                root = good.with_name(f"{good.name}-damaged")
                if ctx.rank == 0:
                    shutil.copytree(good, root)
                    damage(root / newest.name / name)
                dist.barrier()
                out.append([f"{name}: {what}", newest.name, loaded(impl.CheckpointStore(root))])
                dist.barrier()
                if ctx.rank == 0:
                    shutil.rmtree(root)
        return out

    for rank, results in enumerate(run(body, 2)):
        for what, newest, found in results:
            if found is None or found[:3] != [1, 1, [1, 2]]:
                taken = "nothing" if found is None else f"{found[:3]}"
                message = f"{what}: rank {rank} loaded {taken}, the intact one is step 1"
                fail(message, cause="damage-unseen", rank=rank)
            if len(found[3]) != 1 or newest not in found[3][0]:
                message = f"{what}: skipped should have one text, which names {newest} and says why"
                fail(f"{message}; it has {found[3]}", cause="skipped-silently", rank=rank)


@exercise("4.15", "virtual", asserts="none-finished all-damaged of-step skipped passed-over")
def test_nothing_and_nothing_intact_are_different(impl, run, seed, folder):
    """Never finished: None, a new run. Finished and all damaged: an error, not a silent restart."""

    def body(ctx):
        without_waiting()
        root = fresh(folder) / "deeper"
        store = impl.CheckpointStore(root)
        never = loaded(store)
        names = [Path(store.save(3, {"shared": n}, {"own": n})).name for n in (3, 4)]
        good, out = root.with_name("good"), {}

        def after(what, call, *damages):
            """The result of ``call`` when files of the checkpoints are gone or damaged."""
            dist.barrier()
            if ctx.rank == 0:
                for damage, path in damages:
                    damage(root / path)
            dist.barrier()
            out[what] = call()
            dist.barrier()
            if ctx.rank == 0:
                shutil.rmtree(root)
                shutil.copytree(good, root)
            dist.barrier()

        def of_step():
            try:
                saved = store.load(3)
                return [saved.shared["shared"], [names[1] in text for text in saved.skipped]]
            except Exception as error:
                return type(error).__name__

        dist.barrier()
        if ctx.rank == 0:
            shutil.copytree(root, good)
        files = sorted(os.listdir(root / names[0]))
        dist.barrier()
        tensors = [file for file in files if file.endswith(".safetensors")]
        rotten = [[(bit, f"{name}/{file}") for file in tensors] for name in names]
        marker = "COMPLETE" if "COMPLETE" in files else "manifest"
        gone = [[(Path.unlink, f"{name}/{marker}")] for name in names]
        after("both damaged", lambda: loaded(store), *rotten[0], *rotten[1])
        after("both unfinished", lambda: loaded(store), *gone[0], *gone[1])
        after("damaged, unfinished", lambda: loaded(store), *rotten[0], *gone[1])
        after("unfinished, damaged", lambda: loaded(store), *gone[0], *rotten[1])
        after("unfinished", lambda: loaded(store), *gone[1])
        after("of step 3, one damaged", of_step, *rotten[1])
        after("of step 3, both damaged", of_step, *rotten[0], *rotten[1])
        after("of step 3, unfinished", of_step, *gone[0], *gone[1])
        return never, out, names

    for rank, (never, out, names) in enumerate(run(body, 2)):
        expect_equal(never, None, what="load of an empty folder", rank=rank, cause="not-none")
        for what in ("both damaged", "damaged, unfinished", "unfinished, damaged"):
            found = out[what]
            if found is None or found[0] != "CheckpointError":
                message = f"checkpoints were {what}: expected a CheckpointError, got {found}"
                fail(message, cause="silent-restart", rank=rank)
        found = out["both unfinished"]
        expect_equal(found, None, what="both were never finished", rank=rank, cause="not-none")
        found = out["unfinished"]
        if found is None or found[:3] != [3, 3, [3, 3]]:
            message = f"the newest is unfinished: expected the one before, got {found}"
            fail(message, cause="not-the-newest", rank=rank)
        if len(found[3]) != 1 or names[1] not in str(found[3][0]):
            message = f"skipped should name {names[1]}, which is unfinished; it is {found[3]}"
            fail(message, cause="skipped-silently", rank=rank)
        wants = {
            "one damaged": [3, [True]],
            "both damaged": "ValueError",
            "unfinished": "ValueError",
        }
        for what, want in wants.items():
            found = out[f"of step 3, {what}"]
            said = f"load(3), {what}: the error, or what is loaded, and if skipped has the other"
            expect_equal(found, want, what=said, rank=rank, cause="not-this-step")


@exercise("4.15", "virtual", asserts="passed-over group")
def test_a_single_process_looks_at_all_files(impl, run, seed, folder):
    """Without a process group, too, any rotten file is noticed."""

    def body(ctx):
        without_waiting()
        root, out = fresh(folder), {}
        store = impl.CheckpointStore(root)
        save(store, 1, 0)
        newest = Path(store.save(2, {"shared": 2}, {"own": 2}))
        for file in sorted(newest.glob("*.safetensors")):
            content = file.read_bytes()
            bit(file)
            out[file.name] = loaded(store)
            file.write_bytes(content)
        return out, loaded(store)

    [[out, good]] = run(body, 1, process_group=False)
    expect_equal(good, [2, 2, [2], []], what="load of what is intact", rank=0, cause="not-intact")
    for name, found in out.items():
        taken = found and found[:3]
        what = f"one bit of {name} differs: loaded"
        expect_equal(taken, [1, 1, [1]], what=what, rank=0, cause="damage-unseen")


@exercise("4.15", "virtual", asserts="same-on-all alone read-together")
def test_one_rank_can_not_read(impl, run, seed, folder):
    """One rank may not see the folder, or can't take the tensors: an error on
    all, and no rank hangs."""

    def body(ctx):
        without_waiting()
        root, out = fresh(folder), []
        store = impl.CheckpointStore(root)
        save(store, 1, ctx.rank)
        for ill in range(3):
            try:
                store.load(map_location="cpu" if ctx.rank != ill else "cuda:99")  # isn't there
                out.append("loaded")
            except Exception as error:
                out.append(type(error).__name__)
            dist.barrier()

        def closed(real):
            def call(path=".", *args, **kwargs):
                if str(path) == str(root) and dist.get_rank() == 0:
                    raise PermissionError(13, "Permission denied")
                return real(path, *args, **kwargs)

            return call

        kept = os.listdir, os.scandir
        if ctx.rank == 0:
            os.listdir, os.scandir = closed(os.listdir), closed(os.scandir)
        dist.barrier()
        found = loaded(store)
        dist.barrier()
        if ctx.rank == 0:
            os.listdir, os.scandir = kept
        dist.barrier()
        return out, found and found[0], loaded(store)

    for rank, (out, closed, found) in enumerate(run(body, 3)):
        for ill, kind in enumerate(out):
            what = f"rank {ill} can't take the tensors: rank {rank}"
            expect_equal(kind, "CheckpointError", what=what, rank=rank, cause="one-sided")
        what = f"rank 0 may not read the folder: rank {rank}"
        expect_equal(closed, "CheckpointError", what=what, rank=rank, cause="silent-restart")
        expect_equal(found, [1, 1, [1, 2, 3], []], what="load afterwards", rank=rank, cause="stuck")


# -- a full disk ----------------------------------------------------------------------------------
FULL = [(0, 0), (2, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]  # rank, flushes that still work


def expect_failed_together(results, before: list, full: int) -> None:
    """All ranks of a failed save raise, and have the state before it."""
    for rank, (problem, found, names, again) in enumerate(results):
        what = f"the disk is full on rank {full}"
        if not problem:
            fail(f"{what}: save returned on rank {rank} as if all was well", cause="one-sided")
        if not problem.startswith("CheckpointError"):
            message = f"{what}: expected a CheckpointError, rank {rank} got {problem}"
            fail(message, cause="error-type", rank=rank)
        expect_equal(found, before, what=f"{what}: loaded", rank=rank, cause="previous-lost")
        if len(names) > 1:
            message = f"{what}: {names} are left, and take the room of the next save"
            fail(message, cause="leftovers", rank=0)
        expect_equal(again, "", what="the next save, with room again", rank=rank, cause="stuck")


@exercise("4.15", "virtual", asserts="fails-together previous-stay gone-after-error again alone")
def test_full_disk(impl, run, seed, folder):
    """No space on one rank at any flush: one error on all ranks, and no
    earlier checkpoint is lost."""

    def body(ctx):
        out = []
        for full, spared in FULL:
            without_waiting()
            root = fresh(folder)
            store = impl.CheckpointStore(root, keep=1)
            save(store, 1, ctx.rank)
            dist.barrier()
            seen = []
            full_for(lambda: dist.get_rank() == full and (seen.append(0), len(seen) > spared)[1])
            problem = save(store, 2, ctx.rank)
            dist.barrier()
            without_waiting()
            names = sorted(os.listdir(root)) if ctx.rank == 0 else []
            found = loaded(store)
            out.append([problem, found, names, save(store, 3, ctx.rank)])
        return out

    results = run(body, 3)
    for number, (full, _) in enumerate(FULL):
        expect_failed_together([r[number] for r in results], [1, 1, [1, 2, 3], []], full)


@exercise("4.15", "virtual", asserts="old-can-not-go fails-together")
def test_old_ones_can_not_be_deleted(impl, run, seed, folder):
    """No permission to delete: an error on all ranks, and the new checkpoint is there."""

    def body(ctx):
        without_waiting()
        store = impl.CheckpointStore(fresh(folder), keep=1)
        save(store, 1, ctx.rank)
        dist.barrier()
        kept, deleted = (os.unlink, os.remove), []

        def once_denied(*args, **kwargs):
            deleted.append(args)
            if len(deleted) == 1:
                raise PermissionError(13, "Permission denied")
            return kept[0](*args, **kwargs)

        if ctx.rank == 0:
            os.unlink = os.remove = once_denied
        dist.barrier()
        problem = save(store, 2, ctx.rank)
        dist.barrier()
        if ctx.rank == 0:
            os.unlink, os.remove = kept
        dist.barrier()
        return problem.partition(":")[0], loaded(store), save(store, 3, ctx.rank), store.steps()

    for rank, (kind, found, problem, steps) in enumerate(run(body, 2)):
        what = "the old checkpoint can't be deleted"
        expect_equal(kind, "CheckpointError", what=what, rank=rank, cause="one-sided")
        expect_equal(found and found[:2], [2, 2], what=f"{what}: loaded", rank=rank, cause="lost")
        expect_equal([problem, steps], ["", [3]], what=f"{what}; later", rank=rank, cause="stuck")


@exercise("4.15", "gloo", asserts="fails-together previous-stay gone-after-error")
def test_full_disk_in_real_processes(impl, run, seed, folder):
    """One rank may write no more than 20 kB to a file: the same, on real ranks."""

    def body(ctx):
        store = impl.CheckpointStore(folder)
        problem = save(store, 1, ctx.rank)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if ctx.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            store.save(2, {"shared": 2}, {"own": torch.zeros(1_000_000)})
        except Exception as error:
            problem += f"{type(error).__name__}: {error}"
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        names = sorted(os.listdir(folder)) if ctx.rank == 0 else []
        dist.barrier()
        found = loaded(store)
        return problem, found, names, save(store, 3, ctx.rank)

    expect_failed_together(run(body, 3), [1, 1, [1, 2, 3], []], 1)
