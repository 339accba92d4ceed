"""A control group for all processes of a sandbox together, where this user may make one.

Many processes together can exceed a limit that the kernel sets for each process (``Limits.hold``).
Root may make groups, and so may a user with a session of systemd's. Anybody else's sandbox has no
group.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

from .limits import Limits

PATIENCE = 2.0  # seconds until the kernel has let go of processes that were killed
MOUNTS = Path("/proc/self/mountinfo")
OWN = Path("/proc/self/cgroup")
_numbers = itertools.count()


class Group:
    """One new group in each hierarchy that limits something; ``entrances``: files to join it by."""

    def __init__(self, limits: Limits) -> None:
        self.folders: list[Path] = []
        name = f"distlab-{os.getpid()}-{next(_numbers)}"
        for above, settings in _places(limits):
            _remove_old(above)
            folder = above / name
            with contextlib.suppress(OSError):
                folder.mkdir()
                self.folders.append(folder)
                for setting, value in settings.items():
                    if (folder / setting).exists():
                        (folder / setting).write_text(str(value))

    @property
    def entrances(self) -> list[str]:
        """A process that writes 0 to these files is in the group."""
        return [str(folder / "cgroup.procs") for folder in self.folders]

    @property
    def limits_memory(self) -> bool:
        """Whether the kernel limits the memory of all processes together."""
        limits = ("memory.max", "memory.limit_in_bytes")
        return any((folder / name).exists() for folder in self.folders for name in limits)

    def remove(self) -> None:
        """Wait until no process runs in the group any more."""
        end = time.monotonic() + PATIENCE
        for folder in self.folders:
            while folder.exists() and time.monotonic() < end:
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.01)
        self.folders = []


def _remove_old(above: Path) -> None:
    """Remove the groups of graders that were killed."""
    for folder in above.glob("distlab-*-*"):
        if not Path("/proc", folder.name.split("-")[1]).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _places(limits: Limits) -> list[tuple[Path, dict[str, int]]]:
    """Groups in which a new one can be made, with the limits for it there."""
    memory, processes = limits.memory_bytes, {"pids.max": limits.processes}
    old = {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory}
    wanted = {
        "memory": old,
        "pids": processes,
        "": {"memory.max": memory, "memory.swap.max": 0} | processes,
    }
    mounts, found = _mounts(), []
    for line in _lines(OWN):
        _, names, path = line.split(":", 2)
        for controller in names.split(","):
            if controller not in wanted or controller not in mounts:
                continue
            mount = mounts[controller]
            own = mount / path.lstrip("/")
            above = own if own.is_dir() else mount
            if not controller:  # the second version: a group with processes has none inside
                above = above.parent if above != mount else mount
                ready = " ".join(_lines(above / "cgroup.subtree_control")).split()
                if not {"memory", "pids"} & {*ready}:
                    continue
            if os.access(above, os.W_OK):
                found.append((above, wanted[controller]))
    return found


def _mounts() -> dict[str, Path]:
    """The folder of each controller's hierarchy; the second version's has no name."""
    found = {}
    for line in _lines(MOUNTS):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        mount = Path(before.split()[4])
        if kind == "cgroup2":
            found[""] = mount
        elif kind == "cgroup":
            found |= dict.fromkeys({"memory", "pids"} & {*options.split(",")}, mount)
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
