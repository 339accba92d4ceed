# Exercises 4.5: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase4.py 4.5
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states.
"""Noticing that a rank hangs or has failed: heartbeats, and a watchdog that ends the job.

torchrun's agent notices only processes that end. Unless a program sets timers for it (torch 2.15:
``TORCHELASTIC_ENABLE_FILE_TIMER``), it does not know whether a running worker makes progress. So
every rank has a watchdog. If a rank hangs or fails, all ranks end, and a report names the rank to
blame. Then the agent starts all of them again.

*Heartbeat.* The main thread of every rank counts the points that it passes (step 7, backward; step
7, optimizer …). A second thread writes the newest count to a shared folder and reads the others'
counts. A collective stops all ranks, so all hearts stop when one rank hangs. The rank that passed
the fewest points is to blame. Only the reader's clock counts.

Messages: none. Heartbeats are files: each rank reads W small ones per interval. Invariant: only the
main thread counts, so a rank that hangs counts no more.

Source: Jiang et al. 2024 (MegaScale, arXiv 2402.15627), section 4.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

EXIT_HUNG = 70  # a watchdog ended the job
EXIT_PREEMPTED = 75  # saved, and to be started again (EX_TEMPFAIL)


def pid_space() -> str:
    """The host's name, and a mark for hosts and containers of equal name: process ids differ there.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not on Linux
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A rank's news of itself: how many points it has passed, and which one was the last.

    ``status``: ``running``, ``done`` or ``failed`` (``note`` says why).
    """

    attempt: str
    host: str
    pid: int
    count: int = 0
    step: int = -1
    place: str = "start"
    status: str = "running"
    note: str = ""


class Heartbeat:
    """This rank's beats, and those of all ranks of ``attempt``, as files in a shared ``folder``.

    Raises ValueError for a rank outside 0 … world_size-1.
    """

    def __init__(self, folder: str | Path, rank: int, world_size: int, attempt: str = "") -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in 0 … {world_size - 1}")
        self.folder, self.rank, self.world_size = Path(folder), rank, world_size
        self.folder.mkdir(parents=True, exist_ok=True)
        self.latest = Beat(attempt=attempt, host=pid_space(), pid=os.getpid())

    def beat(self, step: int, place: str) -> None:
        """The main thread begins ``place`` of ``step``. Every rank passes the same points.

        The count goes up by one. Nothing is written: ``publish`` does.
        """
        # Step 1: one assignment, so that the publishing thread finds the old or the new one
        raise NotImplementedError("exercise 4.5")

    def end(self, status: str, note: str = "") -> None:
        """This rank is ``done`` or has ``failed``: published at once."""
        self.latest = replace(self.latest, status=status, note=note)
        self.publish()

    def publish(self) -> None:
        """Write the latest beat where the others read it.

        A reader finds, at any moment, the beat before or this one, whole. That holds if the process
        is killed meanwhile, and if two threads publish at once. No other file is left.
        """
        # Step 2: write aside and rename: no rank reads half a beat
        raise NotImplementedError("exercise 4.5")

    def read(self) -> list[Beat | None]:
        """Each rank's latest published beat, by rank; None before its first in this attempt."""
        # Step 3: a file that an earlier attempt has left is no rank's beat
        raise NotImplementedError("exercise 4.5")


class Watchdog:
    """Ends this process, with a report, when any rank of the job hangs or has failed.

    ``with Watchdog(heartbeat, timeout=60): train()``. Every ``interval`` seconds (default: 1, or an
    eighth of ``timeout``) it publishes this rank's beat and reads all beats, W small files. A rank
    counts as hung if it reports no progress for ``timeout`` seconds (so that must be longer than
    the longest way between two points), or if it does not begin to beat. To blame are all ranks
    that passed the fewest points and are not done; a rank that never began has passed none. A rank
    that has failed is to blame, and no other. Then every rank writes the stacks of its threads. One
    of them writes the report (``report-ATTEMPT.txt`` in the heartbeat's folder, and on standard
    error). It kills ranks to blame that are processes of its own host, and no other process (a
    stopped one would not follow SIGTERM). All end with status EXIT_HUNG. The report's first line
    names the ranks to blame, each as "rank 3", and no other. Then come each rank's step and point
    (of a stopped rank, up to ``interval`` seconds old), and the stacks of those to blame, or a
    failed rank's error.

    A folder that can't be written to for a moment ends neither the process nor the watching. A
    process that was stopped (a laptop's lid) blames no rank for that time: it has seen nothing.

    If the block is left normally, or by ``sys.exit`` with 0 or EXIT_PREEMPTED, this rank is done,
    and no rank waits for its beats. After any other exception it has failed, the report names the
    error, and the others end. The exception goes on either way. No thread is left.
    """

    def __init__(self, heartbeat: Heartbeat, timeout: float, interval: float | None = None) -> None:
        if timeout <= 0:
            raise ValueError(f"timeout must be positive, got {timeout}")
        self.heartbeat, self.timeout = heartbeat, timeout
        self.interval = min(timeout / 8, 1.0) if interval is None else interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self.heartbeat.publish()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Step 4: stop watching before the others stop beating. The rank that failed tells and
        #         reports it itself, because its agent ends the others as soon as it is gone
        raise NotImplementedError("exercise 4.5")

    def _watch(self) -> None:
        """Publish, read, judge; until the block is left."""
        # Step 5: this thread publishes the main thread's last beat: it never beats itself
        # Step 6: a beat is new if it differs from the one before. Note when, by this rank's clock.
        #         A process that was stopped has seen nothing and begins anew
        raise NotImplementedError("exercise 4.5")

    def _judge(self, beats: Sequence[Beat | None], silent: dict[int, float]) -> None:
        """End the process if a rank failed, or one that is not done is silent for too long."""
        # Step 7: a failed rank first: a rank that waits for it in vain does not hang by itself
        # Step 8: the ranks with the fewest points are to blame; one that never began has none
        raise NotImplementedError("exercise 4.5")

    def _end(self, what: str, blamed: list[int], silent: dict[int, float]) -> None:
        """Stacks, report, and the end of this process."""
        # Step 9: every rank that can writes its stacks. One writes the report, the others wait for
        #         it: the agent ends all ranks when one is gone
        # Step 10: os._exit, because the main thread will never come to an exception
        raise NotImplementedError("exercise 4.5")

    def _write_stack(self) -> None:
        """The stacks of all threads of this process, in a file."""
        # Step 11: faulthandler writes the stacks of all threads, wherever they wait
        raise NotImplementedError("exercise 4.5")

    def _stack_file(self, rank: int) -> Path:
        return self.heartbeat.folder / f"stack{rank}-{self.heartbeat.latest.attempt}.txt"

    def _report(self, what: str, blamed: list[int], silent: dict[int, float]) -> None:
        """Return when the report is written, by this rank if it is the first to come."""
        # Step 12: only one can make the file with O_EXCL; it waits for stacks that others write
        # Step 13: a process that is stopped by SIGSTOP or holds the interpreter's lock is killed
        raise NotImplementedError("exercise 4.5")

    def _text(
        self, what: str, blamed: list[int], silent: dict[int, float], beats: Sequence[Beat | None]
    ) -> str:
        """The report: ``what`` happened, every rank's point and since when, stacks of the blamed.
        """
        lines = [what]
        for rank, beat in enumerate(beats):
            where = f"rank {rank}{' (this one)' if rank in blamed else ''}: "
            if beat is None:
                lines.append(where + "has not begun")
                continue
            ago = f", {silent[rank]:.1f} s ago" if rank in silent else ""
            where += f"step {beat.step}, {beat.place} (point {beat.count}){ago}, {beat.status}"
            lines.append(f"{where}, process {beat.pid} on {beat.host.partition(' ')[0]}")
        for rank in blamed:
            beat, file = beats[rank], self._stack_file(rank)
            stack = beat.note if beat else ""
            if not stack and file.exists():
                stack = file.read_text(encoding="utf-8")
            lines.append(f"\nstack of rank {rank}:\n{stack or 'none: it does not answer'}")
        return "\n".join(lines) + "\n"
