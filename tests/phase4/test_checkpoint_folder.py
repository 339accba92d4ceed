"""Checks of exercise 4.1: which checkpoints of a folder count, are damaged, and are kept."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import random
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

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
    (1, 1, [(1, 0.5), (2, 0.7), (3, 0.9)], [3]),  # the best of all is the last
    (1, 1, [(1, math.inf), (2, 5.0), (3, -math.inf), (4, None)], [1, 4]),
    (1, 2, [(1, -math.inf), (2, -5e300), (3, None)], [2, 3]),
    (2, 0, [(step, None) for step in range(100, 112)], [110, 111]),
]
FOREIGN = [  # what begin must not touch
    "notes",
    "model.partial",
    "best-000001-step-00000003",
    "000001-step-00000003.old",
    "000001-step-00000003.partial.partial",
    "000001-step-00000003.PARTIAL",
    "1-step-3",
]
NAME = re.compile(r"(\d{6})-step-(\d{8})")
FILES = {f"{letter}.bin": 1000 + 7 * k for k, letter in enumerate("abcde")}  # bytes of each


def add(files: Any, step: int, **more: Any) -> str:
    """Save a checkpoint of FILES as one process; its name."""
    name = files.begin(step)
    entries = {}
    for file in [*FILES][1:] + [*FILES][:1]:
        size = FILES[file]
        content = random.Random(f"{step} {file}").randbytes(size)
        (files.path / f"{name}.partial" / file).write_bytes(content)
        entries[file] = {"bytes": size, "sha256": hashlib.sha256(content).hexdigest()}
    files.finish(name, {"step": step, "score": None, "files": entries} | more)
    return name


def outcome(call: Callable[..., Any], *args: Any) -> Any:
    """The call's return value, or the kind of error that it raises."""
    try:
        return call(*args)
    except (OSError, ValueError) as error:
        return "ValueError" if isinstance(error, ValueError) else "OSError"


@exercise("4.1", "virtual", asserts="newest last-kept best-kept no-score life")
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


@exercise(
    "4.1",
    "virtual",
    asserts="new-folder clears foreign old-stays manifest steps unfinished looks-anew last-kept "
    "life output",
)
def test_from_begin_to_finish(impl, run, seed, folder):
    """The folder before, between and after begin and finish; the files that begin clears away."""

    def body(ctx):
        without_waiting()
        root = fresh(folder) / "runs" / "mine"
        files, reader = impl.CheckpointFolder(str(root)), impl.CheckpointFolder(root)
        seen = {"not there": [reader.steps(), root.exists()]}
        root.mkdir(parents=True)
        for name in FOREIGN:
            (root / name).mkdir()
            (root / name / "COMPLETE").write_text("x")
        (root / "readme").write_text("x")
        left = files.begin(5)
        (root / f"{left}.partial" / "half").write_text("x")
        first = files.begin(5)  # the one before was left
        seen["aside"] = [first, os.listdir(root / f"{first}.partial"), reader.steps()]
        seen["left"] = sorted({*os.listdir(root)} - {*FOREIGN, "readme"})
        (root / f"{first}.partial" / "f").write_bytes(b"abc")
        entry = {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}
        manifest = {"step": 5, "score": math.nan, "files": {"f": entry}, "words": ["ä", None, 0.1]}
        files.finish(first, manifest)
        seen["manifest"] = json.dumps(outcome(reader.manifest, first), sort_keys=True)
        seen["finished"] = [reader.steps(), reader.problem(first, 0), reader.names() == [first]]
        second = files.begin(5)
        seen["second"] = [second, reader.steps(), reader.problem(first, 0)]
        os.rename(root / f"{second}.partial", root / second)
        seen["without marker"] = [
            impl.UNFINISHED in (reader.problem(second, 0) or ""),
            outcome(reader.manifest, second),
            impl.UNFINISHED in (reader.problem("000077-step-00000001") or ""),
            reader.steps(),
        ]
        third = add(files, 3)
        seen["third"] = [third, reader.steps(), sorted(reader.names()) == [first, third]]
        outcome(shutil.copy, root / first / "manifest.json", root / third / "manifest.json")
        seen["exchanged"] = [outcome(reader.manifest, third), reader.steps()]
        seen["foreign"] = sorted(name for name in os.listdir(root) if name[0] not in "0123456789")
        seen["foreign"] += [n for n in FOREIGN if (root / n / "COMPLETE").is_file()]
        os.unlink(root / first / "f")
        files.begin(9)  # both are finished, and damaged
        found = outcome(lambda: len(os.listdir(root / third)))
        seen["damaged"] = [sorted(reader.names()) == [first, third], found]
        ninth = add(files, 9)
        files.prune(2, 0)
        seen["pruned"] = sorted(reader.names()) == [third, ninth]
        return seen, json.dumps(manifest, sort_keys=True)

    [[seen, text]] = run(body, 1)
    first, second, third = seen["aside"][0], seen["second"][0], seen["third"][0]
    what = "after another begin(5): steps(), problem() of the first"
    expect_equal(seen["second"][1:], [[5], None], what=what, cause="old-touched")
    for name, step in ((first, 5), (second, 5), (third, 3)):
        if not isinstance(name, str) or not NAME.fullmatch(name) or int(name[-8:]) != step:
            fail(f"begin({step}) returned {name!r}, not the name of a checkpoint", cause="name")
    if not first < second:
        fail(f"begin(5) made {second} after {first} was finished: no new number", cause="name")
    expect = {
        "not there": ([[], False], "steps() of a folder that isn't there, and whether it is now"),
        "aside": ([first, [], []], "after begin: name, what lies in the folder aside, steps()"),
        "manifest": (text, "manifest() after finish"),
        "finished": ([[5], None, True], "after finish: steps(), problem(), whether names() has it"),
        "third": ([third, [3, 5], True], "after step 3, too: steps(), names() are both"),
        "exchanged": (["ValueError", [5]], "with the manifest of another one: manifest(), steps()"),
    }
    what = "after begin: whether two finished, damaged ones are there; files of the second"
    expect_equal(seen["damaged"], [True, len(FILES) + 2], what=what, cause="old-touched")
    what = "whether prune(2, 0) leaves the last two, of which one is damaged"
    expect_equal(seen["pruned"], True, what=what, cause="kept")
    left, want = seen["left"], [f"{first}.partial"]
    expect_equal(left, want, what="what the second begin(5) left", cause="leftovers")
    for key, (want, what) in expect.items():
        cause = "manifest" if key == "manifest" else "begin-to-finish"
        expect_equal(seen[key], want, what=what, cause=cause)
    found, kind, absent, steps = seen["without marker"]
    expect_equal(
        [found, kind in ("ValueError", "OSError"), absent, steps],
        [True, True, True, [5]],
        what="no marker: UNFINISHED in problem(), manifest() raises, the same of no name, steps()",
        cause="unfinished",
    )
    want = sorted({*FOREIGN, "readme"} - {n for n in FOREIGN if n[0].isdigit()}) + FOREIGN
    expect_equal(seen["foreign"], want, what="what is no checkpoint", cause="foreign-touched")


@exercise("4.1", "gloo", asserts="closed refusals")
def test_a_closed_folder_is_not_an_empty_one(impl, run, seed, folder):
    """No permission to read: an error of load and of steps, and no silent restart."""

    def body(ctx):
        store = impl.module("fault_tolerance").CheckpointStore(folder / "closed")
        problem = save(store, 1, ctx.rank)
        os.chmod(folder, 0o755)
        os.chmod(store.folder, 0)
        answer, told = os.pipe()

        def as_nobody() -> None:
            if os.geteuid() == 0:
                os.setuid(65534)  # no permission hinders root
            steps = outcome(impl.CheckpointFolder(store.folder).steps)
            os.write(told, json.dumps([loaded(store), steps]).encode())

        in_child(as_nobody)
        os.close(told)
        os.chmod(store.folder, 0o700)
        return problem, os.read(answer, 1 << 12).decode(), loaded(store)

    [[problem, closed, opened]] = run(body, 1, process_group=False)
    expect_equal(problem, "", what="save")
    expect_equal(opened, [1, 1, [1], []], what="load, with permission again")
    found, steps = json.loads(closed or "[null, null]")
    if not found or found[0] != "CheckpointError":
        message = "load of a folder that may not be read: expected a CheckpointError"
        fail(f"{message}, got {found}", cause="silent-restart", rank=0)
    what = "steps() of a folder that may not be read"
    expect_equal(steps, "OSError", what=what, cause="silent-restart")


@exercise("4.1", "virtual", asserts="usable sizes-only share unfinished looks-anew steps manifest")
def test_any_damage_is_found(impl, run, seed, folder):
    """Any file torn, rotten or gone is a problem: to every rank that looks,
    or to the file's owner."""
    damages = DAMAGES | {"it is no text": lambda path: path.write_bytes(b"\xff\xfe" * 40)}
    shares = [(None, 1), (0, 2), (1, 2), (0, 1), (6, 7)]

    def body(ctx):
        without_waiting()
        root = fresh(folder)
        files = impl.CheckpointFolder(root)
        other, name = add(files, 2), add(files, 1)
        copy = root.with_name(f"{root.name}-copy")
        shutil.copytree(root / name, copy)

        def look():
            problems = [files.problem(name, *share) for share in shares]
            found = [p if p is None or not isinstance(p, str) else bool(p) for p in problems]
            unfinished = [impl.UNFINISHED in p for p in problems if isinstance(p, str)]
            kind = outcome(files.manifest, name)
            return found, unfinished, kind if isinstance(kind, str) else "", files.steps()

        out = {"intact": look()}
        for file in sorted(os.listdir(copy)):
            for what, damage in damages.items():
                damage(root / name / file)
                out[f"{file}: {what}"] = look()
                shutil.rmtree(root / name)
                shutil.copytree(copy, root / name)
        out["intact again"] = look()
        return out, files.problem(other, 0)

    [[out, other]] = run(body, 1)
    expect_equal(other, None, what="the problem of an intact checkpoint", cause="not-intact")
    for what, (found, unfinished, kind, steps) in out.items():
        file, _, how = what.partition(": ")
        number = [*FILES].index(file) if file in FILES else 0
        if not how:
            want, cause = [None] * len(shares), "not-intact"
        elif file in FILES and "bit" in how:
            hashed = [False, number % 2 == 0, number % 2 == 1, True, False]
            want, cause = [h or None for h in hashed], "damage-unseen"
        elif file in (*FILES, "manifest.json", "COMPLETE"):
            want, cause = [True] * len(shares), "damage-unseen"
        else:
            continue  # a file of the learner's own
        said = "whether problem() says one: without a share, shares 0 and 1 of 2, 0 of 1, 6 of 7"
        if found != want and cause == "damage-unseen" and found[1:3] != want[1:3]:
            cause = "damage-unseen" if True not in found else "share"
        elif found != want and how:
            cause = "share" if True in found else "damage-unseen"
        expect_equal(found, want, what=f"{what}: {said}", cause=cause)
        marker_gone = file == "COMPLETE" and "gone" in how
        expect_equal(
            {*unfinished} - {marker_gone},
            set(),
            what=f"{what}: UNFINISHED said where the marker is there, or not said where it's gone",
            cause="unfinished",
        )
        want = [1, 2] if True not in want or ("bit" in how and file in FILES) else [2]
        expect_equal(steps, want, what=f"{what}: steps()", cause="steps")
        if file in ("manifest.json", "COMPLETE") and not kind:
            fail(f"{what}: manifest() returned one", cause="damage-unseen", rank=0)


@exercise("4.1", "virtual", asserts="resources parents")
def test_nothing_stays_open(impl, run, seed, folder):
    """Twenty saves leave no file open and no thread behind, and only the kept ones on the disk."""

    def body(ctx):
        without_waiting()
        root = fresh(folder) / "two" / "new" / "levels"
        files = impl.CheckpointFolder(root)

        def held():
            return len(os.listdir("/dev/fd")), threading.active_count()

        add(files, 0)
        gc.collect()
        gc.disable()
        before = held()
        for step in range(20):
            name = add(files, step)
            files.problem(name, 0)
            files.steps()
            files.prune(1, 0)
        after = held()
        gc.enable()
        return before, after, [os.listdir(root) == [name], sorted(os.listdir(root / name))]

    [[before, after, [kept, names]]] = run(body, 1)
    expect_equal(after, before, what="open files and threads after 20 saves", cause="left-open")
    expect_equal(kept, True, what="only the newest is left, keep=1", cause="leftovers")
    want = sorted([*FILES, "manifest.json", "COMPLETE"])
    expect_equal(names, want, what="the files of a checkpoint", cause="leftovers")


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
