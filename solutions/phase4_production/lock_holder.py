"""The holder of a checkpoint folder's lock: a process of a host, and whether it still lives."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from datetime import datetime, timezone

from .watchdog import pid_space


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The holder of a lock: a process (``started`` tells it from a later one of the same id)."""

    token: str
    host: str
    pid: int
    started: str
    job: str  # of SLURM; empty: none
    since: str

    def __str__(self) -> str:
        job = f", SLURM job {self.job.rpartition(' ')[2]}" if self.job else ""
        return f"process {self.pid} on {self.host.partition(' ')[0]}{job}, since {self.since}"


def me() -> Holder:
    """This process, with a token that no process had."""
    return Holder(
        token=uuid.uuid4().hex,
        host=pid_space(),
        pid=os.getpid(),
        started=start_of(os.getpid()),
        job=slurm_job(),
        since=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
    )


def slurm_job() -> str:
    """This job's cluster and number; empty outside SLURM."""
    number = os.environ.get("SLURM_JOB_ID")
    return f"{os.environ.get('SLURM_CLUSTER_NAME', '')} {number}" if number else ""


def start_of(pid: int) -> str:
    """When a process began, in ticks since the boot; empty if it is gone or unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(") ")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]  # a zombie is dead, too


def is_alive(holder: Holder) -> bool:
    """Whether the holder, a process of this host and container, still runs."""
    if holder.started:
        return start_of(holder.pid) == holder.started
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
