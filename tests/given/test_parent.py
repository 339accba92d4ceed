"""Ranks end with the process that started them: the kernel sees to it, or they look."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distlab.course.catalogue import root
from given import parent as given_parent

PROGRAMS = [
    "solutions.phase1_data_parallel.trainer",
    "solutions.phase1_data_parallel.collectives",
    "solutions.phase2_advanced.train_gpt",
    "solutions.phase3_multi_node.allreduce_choice",
    "solutions.phase3_multi_node.hierarchical_allreduce",
    "solutions.phase3_multi_node.train_mesh",
    "solutions.phase3_multi_node.train_two_nodes",
    "solutions.phase4_production.imagenet_trainer",
    "solutions.phase4_production.train_elastic",
]
# starts a child that prints its process id when it is safe, and waits for the test
PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
input()
"""
CHILD = """
import os, time
from given import parent
if {without_kernel}:
    parent._kernel_tells = lambda: False
parent.end_with_parent()
print(os.getpid(), flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not collected does not."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(found.stdout.strip()) and not found.stdout.startswith("Z")


@contextlib.contextmanager
def running(*command: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process, which is ended at the end."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=root(),
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def has_death_signal() -> bool:
    """Whether this kernel has what Linux has; asked in a process of its own, which it binds."""
    code = "from given import parent; print(parent._kernel_tells())"
    with running("-c", code) as process:
        return process.communicate()[0] == "True\n"


@pytest.mark.parametrize("without_kernel", [False, True], ids=["kernel", "looking"])
def test_a_child_ends_when_its_parent_is_killed(without_kernel: bool) -> None:
    if not without_kernel and not has_death_signal():
        pytest.skip("needs prctl(PR_SET_PDEATHSIG), which Linux has")
    with running("-c", PARENT, CHILD.format(without_kernel=without_kernel)) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert is_running(child)
            process.kill()
            process.wait()
            end = time.monotonic() + 60
            while is_running(child):
                assert time.monotonic() < end, "it lives on"
                time.sleep(0.02)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("agent", ["dead", "alive", "of another namespace"])
def test_an_agent_that_died_before_is_found(agent: str) -> None:
    """The process between them (a profiler, say) lives; only a dead agent counts."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    pid = os.getpid() if agent == "alive" else ended.pid
    place = "elsewhere" if agent == "of another namespace" else given_parent._namespace()
    code = "from given import parent; parent.end_with_parent(); print('goes on')"
    with running("-c", code, **{given_parent.AGENT: f"{pid} {place}"}) as process:
        said = process.communicate()[0]
    if agent == "dead":
        assert (said, process.returncode) == ("", -signal.SIGKILL)
    else:
        assert (said, process.returncode) == ("goes on\n", 0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_asks_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it reads its command line or joins."""

    class Asked(BaseException):
        pass

    def ask() -> None:
        raise Asked

    module = importlib.import_module(name)
    monkeypatch.setattr(module, "end_with_parent", ask)
    monkeypatch.setattr(sys, "argv", [name, "--no-such-option"])
    with pytest.raises(Asked):
        module.main()


def test_no_program_is_forgotten() -> None:
    """Whatever joins a group when it is run asks."""
    found = {
        ".".join(path.relative_to(root()).with_suffix("").parts)
        for path in Path(root(), "solutions").rglob("*.py")
        if "__main__" in (text := path.read_text(encoding="utf-8")) and "dist." in text
    }
    assert found == set(PROGRAMS)
