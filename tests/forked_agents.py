"""torchrun's agents and their ranks, forked from the tests' process, which has imported torch.

A launcher's new processes spend 2 to 3 seconds of the processor each on imports. Here an agent is
a fork that runs its module's ``main()``, and so is each of its ranks: a child of the agent, which
waits, made before the agent had threads, until the agent would start a new interpreter. What the
agent does with its ranks (sessions, signals, statuses, restarts) is torchrun's own. A test with
new interpreters stands beside each of those that use this.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch._dynamo  # optimizers import it
import torch._subclasses.fake_tensor  # the plan of a run profiles a step with it
import torch.distributed.run
import torch.utils.tensorboard  # noqa: F401 (a sink imports it)
from torch.distributed import distributed_c10d
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from distlab.course.catalogue import root
from tests import forked_commands
from tests.at_exit import sitecustomize as at_exit

FORK = multiprocessing.get_context("fork")


class Child:
    """A forked process, as ``subprocess.Popen`` describes one."""

    def __init__(self, process: BaseProcess) -> None:
        self.process, self.pid = process, process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.process), timeout or 0.0)
            time.sleep(0.02)
        return status

    def kill(self) -> None:
        self.process.kill()


def start(
    command: Sequence[str], output: Path, environ: Mapping[str, str], ranks: int = 0
) -> Child:
    """A process that does what ``command`` (Python, ``-m`` …) does in the repository's folder.

    It prints to the end of the file ``output``. ``ranks``: how many an agent may start, over all
    restarts.
    """
    return _fork(_program, list(command), str(output), dict(environ), ranks)


def processes_of(out: Path) -> list[int]:
    """All processes that print there: an agent, its ranks, and what they forked."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            if os.readlink(entry) == str(out):
                found.append(int(entry.parent.parent.name))
    return found


def ranks_of(agent: int, out: Path) -> list[int]:
    """The processes that an agent, new or forked, has started; not those that wait."""
    listing = Path(f"/proc/{agent}/task/{agent}/children")
    children = listing.read_text().split() if listing.exists() else []
    at_work = processes_of(out)
    return [pid for pid in map(int, children) if pid in at_work]


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Python 3.12 warns of forks beside threads; nothing here has used one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _fork(target: object, *arguments: object) -> Child:
    process = FORK.Process(target=target, args=arguments)  # type: ignore[arg-type]
    with _without_warnings():
        process.start()
    return Child(process)


def _program(command: list[str], output: str, environ: dict[str, str], ranks: int) -> None:
    """The life of the first process."""
    with open(os.devnull, "ab") as nowhere:
        _print_to(nowhere.fileno())
    if ranks:
        Waiting(ranks).take_the_place_of_new_interpreters()
    with open(output, "ab") as file:
        _print_to(file.fileno())
    _become(command, environ)


def _print_to(descriptor: int) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(descriptor, number)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115


class Waiting:
    """Children that wait until there is a rank for them; they end with their parent."""

    def __init__(self, count: int) -> None:
        pipes = [os.pipe() for _ in range(count)]
        self.pipes = [writing for _, writing in pipes]
        self.children = [_fork(self._wait, reading) for reading, _ in pipes]
        for reading, _ in pipes:
            os.close(reading)

    def _wait(self, reading: int) -> None:
        for writing in self.pipes:
            os.close(writing)
        with open(reading, encoding="utf-8") as pipe:
            told = pipe.read()  # until the agent closes its end, or ends
        if told:
            command, environ, numbers = json.loads(told)
            for number, path in numbers.items():
                os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), int(number))
            _become(command, environ)

    def take_the_place_of_new_interpreters(self) -> None:
        """Of those that torchrun starts in this process."""

        def popen(handler: SubprocessHandler, args: Sequence[str], env: dict[str, str]) -> Child:
            own = (getattr(handler, name) for name in ("_stdout", "_stderr"))
            ours = (f"/proc/{os.getpid()}/fd/{number}" for number in (1, 2))
            files = [mine.name if mine else agents for mine, agents in zip(own, ours, strict=True)]
            with open(self.pipes.pop(0), "w", encoding="utf-8") as pipe:
                json.dump([list(args), env, dict(zip("12", files, strict=True))], pipe)
            return self.children.pop(0)

        SubprocessHandler._popen = popen  # type: ignore[assignment]
        # the name of each step of the meeting costs a look at all frames, here those of pytest too
        dynamic_rendezvous.get_method_name = lambda depth=2: "agent"


def _become(command: list[str], environ: Mapping[str, str]) -> None:
    """Be the process of ``command`` to its end."""
    os.setsid()
    words = command[2:] if command[1] == "-u" else command[1:]
    watched = "RANK" in environ and environ.get("THREADS_AT_EXIT")
    watch = at_exit.Watch()
    if watched:
        watch.start(distributed_c10d)
    status = forked_commands.become(words, dict(environ), str(root()))
    if watched:
        watch.write(watched)
    os._exit(status)
