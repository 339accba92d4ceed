"""Checks of exercise 4.1: which checkpoints of a folder count, are damaged, and are kept."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from pathlib import Path

from distlab.grading import exercise, expect_equal, fail, trace
from tests.phase4.checkpoints import fresh, loaded, save
from tests.phase4.damages import DAMAGES
from tests.phase4.disk import in_child, without_waiting

KEPT = [
    # keep, keep_best, (step, score) in the order of saving, steps that remain
    (3, 1, [(1, None), (2, None), (3, None), (4, None), (5, None)], [3, 4, 5]),
    (1, 1, [(1, 0.5), (2, 0.9), (3, 0.7), (4, 0.8)], [2, 4]),
    (2, 2, [(1, 0.5), (2, 0.9), (3, 0.7), (4, 0.1), (5, 0.2)], [2, 3, 4, 5]),
    (1, 1, [(1, 0.5), (2, 0.5), (3, 0.1)], [2, 3]),
    (1, 1, [(1, math.nan), (2, -3.0), (3, math.nan), (4, None)], [2, 4]),
    (1, 0, [(1, 9.0), (2, 1.0)], [2]),
    (1, 2, [(1, None), (2, None), (3, 0.5)], [3]),
    (2, 1, [(100, None), (120, None), (140, None), (110, None)], [110, 140]),
    (2, 0, [(1, None), (2, None), (2, None), (3, None)], [2, 3]),
]


@exercise("4.1", "virtual")
def test_which_are_kept(impl, run, seed, folder):
    """The last that were saved and the best; also after going back, and a step saved twice."""
    runs = [(keep, best, saves) for keep, best, saves, _ in KEPT]

    def body(ctx):
        without_waiting()
        out = []
        for keep, best, saves in runs:
            root = fresh(folder)
            (root / "notes").mkdir(parents=True)
            store = impl.module("fault_tolerance").CheckpointStore(root, keep=keep, keep_best=best)
            for number, (step, score) in enumerate(saves):
                store.save(step, {"shared": number}, {"own": 0}, score=score)
            newest, notes = store.load(), (root / "notes").is_dir()
            out.append([store.steps(), newest.step, newest.shared["shared"], notes])
        return out

    [results] = run(body, 1)
    for (keep, best, saves, want), (steps, newest, number, notes) in zip(
        KEPT, results, strict=True
    ):
        what = f"keep={keep}, keep_best={best}, saved (step, score): {saves}"
        expect_equal(steps, want, what=f"{what}: steps()", cause="kept")
        last = [saves[-1][0], len(saves) - 1]
        expect_equal([newest, number], last, what=f"{what}: loaded", cause="not-the-newest")
        expect_equal(notes, True, what="a folder that is no checkpoint is left alone")


@exercise("4.1", "gloo")
def test_a_closed_folder_is_not_an_empty_one(impl, run, seed, folder):
    """No permission to read: an error that says so, and no silent restart."""

    def body(ctx):
        store = impl.module("fault_tolerance").CheckpointStore(folder / "closed")
        problem = save(store, 1, ctx.rank)
        os.chmod(folder, 0o755)
        os.chmod(store.folder, 0)
        answer, told = os.pipe()

        def as_nobody() -> None:
            if os.geteuid() == 0:
                os.setuid(65534)  # no permission hinders root
            os.write(told, repr(loaded(store)).encode())

        in_child(as_nobody)
        os.close(told)
        os.chmod(store.folder, 0o700)
        return problem, os.read(answer, 1 << 12).decode(), loaded(store)

    [[problem, closed, opened]] = run(body, 1, process_group=False)
    expect_equal(problem, "", what="save")
    expect_equal(opened, [1, 1, [1], []], what="load, with permission again")
    if "CheckpointError" not in closed or "ermission" not in closed:
        message = "load of a folder that may not be read: expected a CheckpointError that says so, "
        fail(f"{message}got {closed}", cause="silent-restart", rank=0)


@exercise("4.1", "virtual")
def test_any_damage_is_found(impl, run, seed, folder):
    """Any file torn, rotten or gone: one process that looks at all files says so, and says why."""

    def body(ctx):
        without_waiting()
        good = fresh(folder)
        newest = Path(
            impl.module("fault_tolerance").CheckpointStore(good).save(1, {"shared": 1}, {"own": 1})
        )
        shares = [impl.CheckpointFolder(good).problem(newest.name, s, 2) for s in (0, 1)]
        out = []
        for name in sorted(os.listdir(newest)):
            for what, damage in DAMAGES.items():
                root = good.with_name(f"{good.name}-damaged")
                shutil.copytree(good, root)
                damage(root / newest.name / name)
                files = impl.CheckpointFolder(root)
                problems = [files.problem(newest.name, s, 2) for s in (0, 1)]
                out.append([f"{name}: {what}", problems, files.steps()])
                shutil.rmtree(root)
        return shares, out, impl.CheckpointFolder(good).steps()

    [[intact, damaged, steps]] = run(body, 1)
    expect_equal(intact, [None, None], what="problems of an intact checkpoint", cause="not-intact")
    expect_equal(steps, [1], what="steps() of an intact checkpoint", cause="not-intact")
    for what, problems, seen in damaged:
        if problems == [None, None]:
            fail(f"{what}: nothing was noticed", cause="damage-unseen")
        if "bit" not in what:
            expect_equal(seen, [], what=f"{what}: steps()", cause="damage-unseen")


@trace("4.1")
def trace_folder(impl):
    """Every rank finishes saves in a folder of its own, and deletes older ones."""

    def body(ctx):
        with tempfile.TemporaryDirectory() as name:
            files = impl.CheckpointFolder(name)
            ctx.start_picture()
            for step in range(4):
                with ctx.span("begin", str(step)):
                    made = files.begin(step)
                with ctx.span("write", str(step)):
                    time.sleep(0.01)
                with ctx.span("finish", str(step)):
                    files.finish(made, {"step": step, "score": None, "files": {}})
                with ctx.span("prune", str(step)):
                    files.prune(1, 0)

    return body
