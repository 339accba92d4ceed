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


@exercise("4.15", "virtual")
def test_damaged_checkpoints_are_passed_over(impl, run, seed, folder):
    """Any file torn, rotten or gone: all ranks take the one before, and hear which and why."""

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
                message = f"{what}: skipped should name {newest} and why, it is {found[3]}"
                fail(message, cause="skipped-silently", rank=rank)


@exercise("4.15", "virtual")
def test_nothing_and_nothing_intact_are_different(impl, run, seed, folder):
    """Never finished: None, a new run. Finished and all damaged: an error, not a silent restart."""

    def body(ctx):
        without_waiting()
        store = impl.CheckpointStore(fresh(folder) / "deeper")
        never = loaded(store)
        path = Path(store.save(3, {"shared": 3}, {"own": 3}))
        dist.barrier()
        if ctx.rank == 0:
            for file in path.glob("*.safetensors"):
                bit(file)
        dist.barrier()
        return never, loaded(store), path.name

    for rank, (never, damaged, name) in enumerate(run(body, 2)):
        expect_equal(never, None, what="load of an empty folder", rank=rank, cause="not-none")
        if damaged is None or damaged[0] != "CheckpointError" or name not in damaged[1]:
            message = f"all checkpoints are damaged: expected CheckpointError with {name}, got "
            fail(message + f"{damaged}", cause="silent-restart", rank=rank)


# -- a full disk ----------------------------------------------------------------------------------
FULL = [(0, 0), (2, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]  # rank, flushes that still work


def expect_failed_together(results, before: list, full: int) -> None:
    """All ranks of a failed save have one message that names the rank, and what was before."""
    for rank, (problem, found, names, again) in enumerate(results):
        what = f"the disk is full on rank {full}"
        if not problem:
            fail(f"{what}: save returned on rank {rank} as if all was well", cause="one-sided")
        if not problem.startswith("CheckpointError") or f"rank {full}" not in problem:
            message = f"{what}: expected a CheckpointError that says so, rank {rank} got {problem}"
            fail(message, cause="unclear", rank=rank)
        expect_equal(problem, results[0][0], what="the message", rank=rank, cause="unclear")
        expect_equal(found, before, what=f"{what}: loaded", rank=rank, cause="previous-lost")
        if len(names) > 1:
            message = f"{what}: {names} are left, and take the room of the next save"
            fail(message, cause="leftovers", rank=0)
        expect_equal(again, "", what="the next save, with room again", rank=rank, cause="stuck")


@exercise("4.15", "virtual")
def test_full_disk(impl, run, seed, folder):
    """No space on one rank at any flush: one error on all ranks, and nothing that was is lost."""

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


@exercise("4.15", "gloo")
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
