"""System calls that ranks never need and through which kernels were broken.
They are refused inside."""

from __future__ import annotations

import errno
import os
import tempfile

REFUSED = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp"),
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "move_mount", "fsopen"),
    *("fsconfig", "fsmount", "fspick", "open_tree", "mount_setattr"),
    *("bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter"),
    *("io_uring_register", "keyctl", "add_key", "request_key"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load"),
    *("open_by_handle_at", "name_to_handle_at", "quotactl", "swapon", "swapoff", "reboot"),
    *("shmget", "shmat", "semget", "msgget", "mq_open"),  # the objects that they make outlive a run
    *("acct", "syslog", "personality", "vhangup", "lookup_dcookie", "nfsservctl", "sethostname"),
    *("setdomainname", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex"),
)
CLONE_NEW = tuple(1 << bit for bit in (7, 17, 25, 26, 27, 28, 29, 30))  # namespaces of each kind
TIOCSTI = 0x5412  # types into a terminal
FAMILIES = (1, 2, 10, 16)  # of sockets: UNIX, IPv4, IPv6, netlink; others know no namespaces


def open_filter() -> int | None:
    """A file with the filter, as bubblewrap takes it; None without pyseccomp or its library."""
    try:
        import pyseccomp as seccomp
    except (ImportError, OSError, RuntimeError):
        return None
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    for name in REFUSED:
        _refuse(seccomp, rules, errno.EPERM, name)
    _refuse(seccomp, rules, errno.ENOSYS, "clone3")  # its flags lie in memory: callers fall back
    for flag in CLONE_NEW:
        argument = seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag)
        _refuse(seccomp, rules, errno.EPERM, "clone", argument)
    argument = seccomp.Arg(1, seccomp.MASKED_EQ, 0xFFFFFFFF, TIOCSTI)
    _refuse(seccomp, rules, errno.EPERM, "ioctl", argument)
    for family in set(range(max(FAMILIES))) - set(FAMILIES):
        argument = seccomp.Arg(0, seccomp.EQ, family)
        _refuse(seccomp, rules, errno.EAFNOSUPPORT, "socket", argument)
    argument = seccomp.Arg(0, seccomp.GT, max(FAMILIES))
    _refuse(seccomp, rules, errno.EAFNOSUPPORT, "socket", argument)
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.flush()
        fd = os.dup(file.fileno())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _refuse(seccomp: object, rules: object, number: int, name: str, *arguments: object) -> None:
    """Leave out what this kernel's table does not have."""
    try:
        rules.add_rule(seccomp.ERRNO(number), name, *arguments)  # type: ignore[attr-defined]
    except (OSError, ValueError):
        return
