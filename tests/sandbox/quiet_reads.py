"""A submission that looks for answers, for other people's files, and for a way out.

The tests write this text into a submission, with ``PLACES`` filled in: where the course is, and
what the tests have put outside for it to find. A probe returns what it got; it returns nothing or
raises OSError, ImportError, ValueError or LookupError where nothing is to be had.
"""

from __future__ import annotations

import ctypes
import gc
import glob
import importlib
import linecache
import os
import struct
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

PLACES: dict[str, Any] = {}
PROBES: dict[str, Callable[[], object]] = {}
LIBC = ctypes.CDLL(None, use_errno=True)
JUDGES = ("global_gradients", "own_gradients", "wrong_divisor", "check_average")


def probe(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def add(function: Callable[[], object]) -> Callable[[], object]:
        PROBES[name] = function
        return function

    return add


def read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(64)


def call(number: int, *args: object) -> int:
    """A system call by its number on x86-64; OSError where it is refused."""
    if os.uname().machine != "x86_64":
        raise OSError("the numbers are those of x86-64")
    result: int = LIBC.syscall(number, *args)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def processes() -> list[int]:
    return [
        int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()
    ]


def first(try_one: Callable[[Any], object], every: Any) -> object:
    """What the first of them gives that gives anything."""
    for each in every:
        try:
            got = try_one(each)
        except OSError:
            continue
        if got:
            return each, got
    return None


# -- answers --------------------------------------------------------------------------------------
@probe("solution's file")
def _() -> object:
    return read(PLACES["root"] + "/solutions/phase1_data_parallel/trainer.py")


@probe("check's file")
def _() -> object:
    return read(PLACES["root"] + "/tests/phase1/test_trainer_averaging.py")


@probe("wrong implementations")
def _() -> object:
    return os.listdir(PLACES["root"] + "/tests/mutants")


@probe("git's objects")
def _() -> object:
    return os.listdir(PLACES["root"]), read(PLACES["root"] + "/.git")


@probe("git's program")
def _() -> object:
    command = [
        "git",
        "-C",
        PLACES["root"],
        "show",
        "HEAD:solutions/phase1_data_parallel/trainer.py",
    ]
    return subprocess.run(command, capture_output=True, check=False).stdout


@probe("references")
def _() -> object:
    return os.listdir(PLACES["root"] + "/references")


@probe("import of the solution")
def _() -> object:
    return importlib.import_module("solutions.phase1_data_parallel.trainer")


@probe("import of the check")
def _() -> object:
    return importlib.import_module("tests.phase1.test_trainer_averaging")


@probe("import through the toolkit")
def _() -> object:
    from distlab.course.catalogue import load_course
    from distlab.grading.implementation import solution

    return solution(load_course().phase(1), "trainer")


@probe("path by path object")
def _() -> object:
    from distlab.course.catalogue import root

    return [*root().glob("solutions/*/*.py"), *root().glob("tests/phase*/test_*.py")]


@probe("loaded modules")
def _() -> object:
    return [
        name
        for name in sys.modules
        if name.startswith(("solutions.phase1_data_parallel.", "tests."))
    ]


@probe("objects in memory")
def _() -> object:
    gc.unfreeze()
    functions = [o for o in gc.get_objects() if isinstance(o, types.FunctionType)]
    return [f.__name__ for f in functions if f.__name__ in JUDGES and f.__module__ != __name__]


@probe("frames of the callers")
def _() -> object:
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        found = [name for name in JUDGES if name in {**frame.f_globals, **frame.f_locals}]
        if found and frame.f_globals.get("__name__") != __name__:
            return found
        frame = frame.f_back
    return None


@probe("lines that Python has kept")
def _() -> object:
    return [name for name in linecache.cache if "/solutions/" in name or "/tests/phase" in name]


@probe("compiled files")
def _() -> object:
    place = PLACES["root"]
    found = glob.glob(place + "/solutions/**/*.pyc", recursive=True)
    return found + glob.glob(place + "/tests/**/*.pyc", recursive=True)


@probe("the toolkit's own folder")
def _() -> object:
    return os.listdir(PLACES["root"] + "/.distlab")


@probe("whole file tree")
def _() -> object:
    wanted, skipped = (
        {"test_trainer_averaging.py", "solutions"},
        {"proc", "sys", "usr", "site-packages"},
    )
    for folder, folders, files in os.walk("/"):
        folders[:] = [name for name in folders if name not in skipped]
        if wanted & {*folders, *files}:
            return folder
    return None


@probe("other mount points")
def _() -> object:
    with open("/proc/self/mountinfo") as file:
        points = [line.split()[4] for line in file]
    return [p for p in points if os.path.exists(p + "/solutions/phase1_data_parallel")]


@probe("roots of other processes")
def _() -> object:
    names = [f"/proc/{pid}/{way}" for pid in processes() for way in ("root", "cwd")]
    return first(lambda name: os.listdir(name + PLACES["root"] + "/solutions"), names)


@probe("file by its handle")
def _() -> object:
    handle = ctypes.create_string_buffer(struct.pack("Ii", 120, 0) + bytes(120))
    mount = ctypes.c_int()
    call(303, -100, b"/usr", handle, ctypes.byref(mount), 0)
    at = os.open("/usr", os.O_RDONLY)
    return call(304, at, handle, os.O_RDONLY)


# -- files of others ------------------------------------------------------------------------------
@probe("file outside")
def _() -> object:
    return read(PLACES["outside"] + "/canary")


@probe("neighbour's submission")
def _() -> object:
    return read(PLACES["neighbour"] + "/trainer.py")


@probe("passwords")
def _() -> object:
    return read("/etc/shadow")


@probe("homes")
def _() -> object:
    return first(read, glob.glob("/root/.[!.]*") + glob.glob("/home/*/.[!.]*"))


@probe("block devices")
def _() -> object:
    return first(read, [*glob.glob("/dev/[sv]d*"), "/dev/mem", "/dev/kmem"])


@probe("kernel's log")
def _() -> object:
    return call(103, 3, ctypes.create_string_buffer(99), 99)


@probe("shared memory of the system")
def _() -> object:
    return read("/dev/shm/" + PLACES["name"])


@probe("shared memory of System V")
def _() -> object:
    return LIBC.shmget(PLACES["key"], 0, 0) >= 0
