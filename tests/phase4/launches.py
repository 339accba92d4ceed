"""The launcher's processes: new ones, or the agent and its ranks as forks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from distlab.course.catalogue import root
from solutions.phase4_production.trainer_config import Config
from tests.forked_agents import Child, processes_of, start
from tests.phase4.image_runs import fields_of

# stands for Python in the launcher: writes down its process id, its command line and environment
PYTHON = """#!/bin/sh
case $2 in *.preflight) exec {python} "$@" ;; esac
printf '%s\\0' "$$" "$@" > {folder}/command
env -0 > {folder}/environment
"""


@contextlib.contextmanager
def new(command: list[str], out: Path, **environ: str) -> Iterator[subprocess.Popen]:
    """A new process, of which nothing is left afterwards."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with open(out, "ab") as output:
        process = subprocess.Popen(
            command,
            cwd=root(),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": path, **environ},
            start_new_session=True,
        )
    with ended(process, out):
        yield process


@contextlib.contextmanager
def ended(process: Child | subprocess.Popen, out: Path) -> Iterator[None]:
    """At the end nothing is left that prints there."""
    try:
        yield
    finally:
        for pid in {*processes_of(out), process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def becomes(arguments: list[str], folder: Path, **environ: str) -> tuple[list[str], dict[str, str]]:
    """What ``launch_training.sh`` becomes in the end: its command and environment."""
    folder.mkdir(exist_ok=True)
    python = folder / "python"
    python.write_text(PYTHON.format(python=sys.executable, folder=folder))
    python.chmod(0o755)
    command = ["./launch_training.sh", *arguments]
    with new(command, folder / "said", LAUNCH_PYTHON=str(python), **environ) as launcher:
        assert launcher.wait(60) == 0, (folder / "said").read_text()
    pid, *words = (folder / "command").read_text().split("\0")[:-1]
    assert int(pid) == launcher.pid, "signals for the launcher are the agent's"
    lines = (folder / "environment").read_text().split("\0")[:-1]
    return [sys.executable, *words], dict(line.split("=", 1) for line in lines)


@contextlib.contextmanager
def launched(
    config: Config, out: Path, folder: Path, ranks: int, **environ: str
) -> Iterator[Child]:
    """``launch_training.sh`` with its agent, and ``ranks`` ranks over all restarts, in forks."""
    command, given = becomes(fields_of(config), folder, **environ)
    process = start(command, out, given, ranks)
    with ended(process, out):
        yield process


def said_in(out: Path) -> list[str]:
    """What a run printed, without its devices and torch 2.8's lines about groups."""
    lines = out.read_text().splitlines()
    return [line for line in lines if not re.match(r"\[Gloo\]|\w+: \d+ ranks? on the CPU", line)]


def wait_for(condition: Callable[[], bool], seconds: float = 150.0) -> None:
    """Return when ``condition()`` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
