"""What this machine can run with torch: versions, backends, forks, ranks, GPUs that compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..course.catalogue import has_solutions
from ..host import gpus, nvml
from ..host.gpu_trial import Trial, trial
from ..ranks import RankContext, RankFailure, fork_problem, run_ranks
from ..reference import gpu_record
from ..virtual import run_virtual
from .machine import Finding, least, numbers, requirements

NEWEST_TRIED = (2, 15)
NCCL2 = (2, 15)  # from this version on "nccl" is nccl2; the older one has another name
TRIAL_LIMIT = 20.0  # seconds for two ranks that add two numbers
CUDA_BUILD = "python -m pip install --force-reinstall torch torchvision (builds for CUDA)"


def findings() -> Iterator[Finding]:
    """All findings that need torch, one after the other."""
    yield version()
    yield backends()
    yield forks()
    yield ranks("virtual ranks", run_virtual)
    yield ranks("gloo ranks", run_ranks)
    found = nvml.driver()
    yield build(bool(found.gpus))
    yield nccl(bool(found.gpus))
    if found.gpus:
        yield compute(len(found.gpus), trial())
    if has_solutions():  # a hand-out has nothing to run there
        yield record()


def version() -> Finding:
    """torch's version, and whether it is supported."""
    oldest = least(requirements()["torch"])
    here = numbers(torch.__version__)
    said = f"{torch.__version__}; supported: {_dotted(oldest)} or newer"
    if here > NEWEST_TRIED:
        said += f"; the newest that the project was tried with is {_dotted(NEWEST_TRIED)}"
    return Finding("torch", here >= oldest, said, f"pip install 'torch>={_dotted(oldest)}'", True)


def backends() -> Finding:
    """The backends of torch.distributed in this build."""
    if not dist.is_available():
        return Finding(
            "backends", False, "this torch has no torch.distributed", "make env", needed=True
        )
    every = ("gloo", "nccl", "mpi", "ucc", "xccl")
    there = [name for name in every if getattr(dist, f"is_{name}_available", bool)()]
    text = f"torch.distributed has {', '.join(there) or 'none'}"
    return Finding("backends", "gloo" in there, text, "a torch with gloo: make env", needed=True)


def forks() -> Finding:
    """Whether a fork of a process with torch can compute: all graders fork their ranks."""
    problem = fork_problem()
    remedy = "Linux, also inside a container or WSL; macOS where forks can compute"
    return Finding("fork", not problem, problem or "forks with torch compute", remedy, True)


def _total(ctx: RankContext) -> float:
    value = torch.tensor([float(ctx.rank + 1)])
    dist.all_reduce(value)
    return value.item()


def ranks(name: str, run: Callable[..., Any]) -> Finding:
    """Whether two ranks can add two numbers: every check is built on that."""
    begun = time.monotonic()
    try:
        totals = list(run(_total, 2, timeout=TRIAL_LIMIT))
    except (RankFailure, OSError, RuntimeError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        remedy = "look for a firewall on the loopback interface, or limits on processes (ulimit -u)"
        return Finding(name, False, f"two ranks fail: {said[0]}", remedy, needed=True)
    seconds = time.monotonic() - begun
    text = f"an all-reduce of two ranks took {seconds:.2f} s"
    return Finding(name, totals == [3.0, 3.0], text, "make env", needed=True)


def build(has_gpu: bool) -> Finding:
    """The device that torch was built for."""
    cuda = torch.version.cuda
    if cuda:
        return Finding("CUDA build", True, f"torch is built for CUDA {cuda}")
    text = "torch is built for the CPU alone" + ("" if has_gpu else ", enough without a GPU")
    return Finding("CUDA build", not has_gpu, text, CUDA_BUILD)


def nccl(has_gpu: bool) -> Finding:
    """NCCL's version, and torch's backends for it."""
    if not dist.is_available() or not dist.is_nccl_available():
        text = "this torch has no NCCL" + ("" if has_gpu else ", which takes a GPU per rank")
        return Finding("NCCL", not has_gpu, text, CUDA_BUILD)
    here = ".".join(map(str, torch.cuda.nccl.version()))
    ways = ", ".join(nccl_backends())
    return Finding("NCCL", True, f"{here}; torch's backends for it: {ways}")


def nccl_backends() -> dict[str, dict[str, str]]:
    """torch's backends for NCCL, the usual one first, each with the settings that choose it."""
    if numbers(torch.__version__) < NCCL2:
        return {"legacy": {}}
    return {"nccl2": {"TORCH_DIST_USE_NCCL2": "1"}, "legacy": {"TORCH_DIST_USE_NCCL2": "0"}}


def compute(listed: int, found: Trial) -> Finding:
    """Whether CUDA computes on the GPUs that the driver lists."""
    if not torch.version.cuda:
        return Finding("CUDA", False, "torch is built for the CPU alone", CUDA_BUILD)
    count = len(found.names)
    hidden = gpus.environment().get(gpus.VISIBLE)
    why = f" ({gpus.VISIBLE}={hidden})" if hidden is not None and count < listed else ""
    if found.obstacle or not count:
        text = f"can't compute on a GPU{why}: {found.obstacle or 'it shows none'}"
        remedy = f"a driver for CUDA {torch.version.cuda}, or a torch for this driver's CUDA"
        return Finding("CUDA", False, text, remedy)
    return Finding("CUDA", True, f"computes on {count} of {listed} GPUs{why}")


def record() -> Finding:
    """Whether anybody has run the solutions on NCCL, and kept the record."""
    told = gpu_record.words()
    remedy = "distlab doctor --cuda, on a machine with two GPUs or more (about ten minutes)"
    return Finding("record of GPUs", gpu_record.NEVER not in told, f"solutions {told}", remedy)


def usable_gpus() -> tuple[list[str], str]:
    """The names of the GPUs that the solutions can run on, or why there are none."""
    found = nvml.driver()
    if not found.gpus:
        return [], found.obstacle or "the driver lists none"
    tried = trial()
    result = compute(len(found.gpus), tried)
    return ([*tried.names], "") if result.ok else ([], f"CUDA {result.text}. {result.remedy}")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
