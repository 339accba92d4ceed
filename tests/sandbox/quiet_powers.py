"""A submission that writes where it must not, and asks for privileges.

Written as ``quiet_reads`` is. What would do harm where nothing stops it only asks whether it could.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import resource
import stat
import subprocess
import time
from collections.abc import Callable
from typing import Any

PLACES: dict[str, Any] = {}
PROBES: dict[str, Callable[[], object]] = {}
LIBC = ctypes.CDLL(None, use_errno=True)


def probe(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def add(function: Callable[[], object]) -> Callable[[], object]:
        PROBES[name] = function
        return function

    return add


def call(number: int, *args: object) -> int:
    """A system call by its number on x86-64; OSError where it is refused."""
    if os.uname().machine != "x86_64":
        raise OSError("the numbers are those of x86-64")
    result: int = LIBC.syscall(number, *args)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def written(folder: str) -> object:
    """A new file in the folder."""
    path = os.path.join(folder, PLACES["name"])
    with open(path, "x") as file:
        file.write("x")
    os.unlink(path)
    return path


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


# -- writing --------------------------------------------------------------------------------------
@probe("course's folder")
def _() -> object:
    return written(PLACES["root"])


@probe("toolkit's folder")
def _() -> object:
    return written(PLACES["root"] + "/distlab/grading")


@probe("toolkit's file")
def _() -> object:
    return os.open(PLACES["root"] + "/distlab/grading/verdicts.py", os.O_RDWR)


@probe("installed torch")
def _() -> object:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return os.open(found.origin, os.O_RDWR)


@probe("own submission")
def _() -> object:
    return written(os.path.dirname(os.path.abspath(__file__)))


@probe("own file")
def _() -> object:
    return os.open(__file__, os.O_RDWR)


@probe("own file's mode")
def _() -> object:
    os.chmod(__file__, stat.S_ISUID | 0o777)
    return "changed"


@probe("neighbour's submission")
def _() -> object:
    return written(PLACES["neighbour"])


@probe("folder outside")
def _() -> object:
    return written(PLACES["outside"])


@probe("system's folders")
def _() -> object:
    return first(written, ["/", "/usr", "/etc", "/bin", "/lib", "/dev", "/run", "/var", "/var/tmp"])


@probe("hard link to a file of the course")
def _() -> object:
    os.link(PLACES["root"] + "/course.toml", "/tmp/linked")
    return "linked"


@probe("rename of the own file")
def _() -> object:
    os.rename(__file__, __file__ + ".old")
    return "renamed"


@probe("kernel's settings")
def _() -> object:
    names = ("kernel/core_pattern", "kernel/hostname", "vm/drop_caches", "kernel/sysrq")
    return first(lambda name: os.open(f"/proc/sys/{name}", os.O_WRONLY), names)


@probe("sysrq")
def _() -> object:
    return os.open("/proc/sysrq-trigger", os.O_WRONLY)


@probe("/sys")
def _() -> object:
    return first(lambda name: written(f"/sys/{name}"), ["fs/cgroup", "fs/cgroup/memory", "kernel"])


@probe("own cgroup")
def _() -> object:
    return first(os.mkdir, ["/sys/fs/cgroup/taken", "/sys/fs/cgroup/pids/taken"])


@probe("out-of-memory score of the parent")
def _() -> object:
    with open(f"/proc/{os.getppid()}/oom_score_adj", "w") as file:
        file.write("1000")
    return "changed"


# -- privileges -----------------------------------------------------------------------------------
@probe("capabilities")
def _() -> object:
    with open("/proc/self/status") as file:
        held = dict(line.split(":", 1) for line in file)
    return [n for n in ("CapEff", "CapPrm", "CapInh", "CapAmb") if int(held[n], 16)]


@probe("new privileges")
def _() -> object:
    with open("/proc/self/status") as file:
        return "NoNewPrivs:\t0" in file.read()


@probe("root's id")
def _() -> object:
    os.setuid(0)
    return f"user {os.getuid()}"


@probe("groups")
def _() -> object:
    os.setgroups([0])
    return os.getgroups()


@probe("setuid programs")
def _() -> object:
    def root(program: str) -> bool:
        mode = os.stat(program).st_mode
        if not mode & stat.S_ISUID:
            return False
        shown = subprocess.run([program, "root", "-c", "id -u"], capture_output=True, timeout=5)
        return shown.stdout.strip() == b"0"

    return first(root, ["/usr/bin/su", "/bin/su"])


@probe("mount")
def _() -> object:
    return LIBC.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0


@probe("unmount")
def _() -> object:
    return LIBC.umount2(b"/tmp", 2) == 0 or LIBC.umount2(b"/proc/sys", 2) == 0


@probe("new user namespace")
def _() -> object:
    return LIBC.unshare(0x10000000) == 0


@probe("new mount namespace")
def _() -> object:
    return LIBC.unshare(0x20000) == 0


@probe("clone into a user namespace")
def _() -> object:
    pid = call(56, 0x10000000 | 17, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    return os.waitpid(pid, 0)


@probe("namespaces of the first process")
def _() -> object:
    def joined(kind: str) -> bool:
        return LIBC.setns(os.open(f"/proc/1/ns/{kind}", os.O_RDONLY), 0) == 0

    return first(joined, ["mnt", "net", "user"])


@probe("another root")
def _() -> object:
    os.chroot("/tmp")
    return "changed"


@probe("pivot_root")
def _() -> object:
    return call(155, b"/tmp", b"/tmp") == 0


@probe("device node")
def _() -> object:
    os.mknod("/tmp/disk", stat.S_IFBLK | 0o600, os.makedev(254, 0))
    return os.open("/tmp/disk", os.O_RDONLY)


@probe("priority")
def _() -> object:
    return os.nice(-5) < 0


@probe("real-time scheduling")
def _() -> object:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    return "first"


@probe("higher limits")
def _() -> object:
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most + 1 if most > 0 else most))
    return resource.getrlimit(resource.RLIMIT_NPROC)


@probe("host's name")
def _() -> object:
    return call(170, b"taken", 5) == 0


@probe("host's clock")
def _() -> object:
    return call(227, 0, ctypes.byref((ctypes.c_long * 2)(int(time.time()), 0))) == 0


@probe("terminal")
def _() -> object:
    return os.open("/dev/tty", os.O_RDWR)


@probe("console")
def _() -> object:
    return first(lambda name: os.open(name, os.O_RDWR), ["/dev/console", "/dev/pts/0", "/dev/kmsg"])


CALLS = {
    "bpf": (321, 0, bytes(72), 72),
    "perf_event_open": (298, bytes(120), 0, -1, -1, 0),
    "io_uring_setup": (425, 1, bytes(120)),
    "add_key": (248, b"user", b"course", b"x", 1, -3),
    "keyctl": (250, 0, -3, 1),
    "userfaultfd": (323, 1),
    "kexec_load": (246, 0, 0, None, 0),
    "swapon": (167, b"/tmp", 0),
    "acct": (163, b"/tmp"),
}
for _name, _arguments in CALLS.items():
    PROBES[_name] = lambda arguments=_arguments: call(*arguments) >= 0  # type: ignore[misc]
