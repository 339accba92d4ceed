"""``distlab doctor --cuda``: the solutions on this machine's GPUs, recorded for others to read.

Every part is a program of its own. torch chooses its backend for NCCL when it is imported, and a
part that fails, hangs or dies does not disturb the others. A part ends with one line of JSON: its
status, a message, and its findings.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..course.catalogue import load_course, need_solutions, root
from ..grading.lifetime import contained
from ..host import gpus, nvml
from ..host.processes import descendants
from ..host.terminal import say, short
from ..reference import gpu_record, sealed
from .gpu_page import page
from .machine_torch import nccl_backends, usable_gpus

COMPARED = ("ddp", "fsdp", "pipeline", "tensor-parallel")
EVEN_RANKS = (8, 4, 2, 1)  # batches, eight layers and eight heads can be divided by these
SANITIZER = {"TORCH_CUDA_SANITIZER": "1"}
LEAVE = 5.0  # seconds
KEPT = 3000  # characters of a failed part's output: so many of its beginning and of its end
RAISED = re.compile(
    r"^(?:\[rank\d+\]:\s?)?((?:\w+\.)*\w*(?:Error|Exception|Failure)s?(?:: .*)?)$", re.M
)


@dataclass(frozen=True)
class Part:
    """One program of the run. ``limit``: seconds, after which it counts as hung. ``reports``: it
    prints its own outcome; any other program has passed if its exit status is 0. ``prefix``: the
    command that starts Python, if there is one."""

    name: str
    backend: str
    command: Sequence[str]
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    reports: bool = True
    prefix: Sequence[str] = ()


def parts(count: int, backends: Mapping[str, Mapping[str, str]]) -> list[Part]:
    """The parts for ``count`` GPUs: everything with each backend, then the
    host waits of the steps."""
    found = []
    measure = ("-m", "benchmarks.cuda", "--ranks", str(count))
    most = next(ranks for ranks in EVEN_RANKS if ranks <= count)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(most), "-m")
    for backend, chosen in backends.items():
        for phase in load_course().phases:
            command = ("-m", "distlab.commands.gpu_checks", str(phase.number))
            found.append(Part(f"checks of phase {phase.number}", backend, command, 600, chosen))
        measured = ("bandwidth", *COMPARED)
        found += [Part(what, backend, (*measure, what), 180, chosen) for what in measured]
        for name, program in programs(most).items():
            found.append(Part(name, backend, (*launch, *program), 180, chosen, reports=False))
    usual, chosen = next(iter(backends.items()))
    for what in COMPARED:
        step = (*launch, "benchmarks.cuda_steps", what)
        found.append(Part(f"host waits of {what}", usual, step, 120, chosen))
        found.append(Part(f"sanitizer of {what}", usual, step, 180, {**chosen, **SANITIZER}))
    return found


def programs(ranks: int) -> dict[str, tuple[str, ...]]:
    """Trainings that start as in README, for some steps each."""
    trainer = ("solutions.phase1_data_parallel.trainer", "--workload", "digits_cnn")
    gpt = ("solutions.phase2_advanced.train_gpt", "--steps", "50", "--device", "cuda")
    sizes = ("--tensor", str(min(ranks, 2)), "--pipeline", str(2 if ranks > 2 else 1))
    return {
        "program trainer": (*trainer, "--epochs", "2", "--device", "cuda"),
        "program train_gpt": (*gpt, *sizes),
    }


def run(part: Part) -> dict[str, Any]:
    """Run a part to its end, or to its limit; returns its outcome."""
    own = {**part.environment, "PYTHONPATH": str(root()), "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    with contained():
        process = subprocess.Popen(
            [*part.prefix, sys.executable, *part.command],
            cwd=root(),
            env=gpus.environment() | own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches this process, which then ends the part
        )
        try:
            out, err = process.communicate(timeout=part.limit)
            ended = ""
        except subprocess.TimeoutExpired:
            _end(process)
            out, err = _rest(process)
            ended = f"did not end within {part.limit:g} s"
        except BaseException:
            _end(process)
            raise
    found = _told(out) if part.reports else _passed(out)
    if found is None or (found["status"] != "failed" and (ended or process.returncode)):
        ended = ended or f"ended with status {process.returncode}"
        raised = RAISED.search(err)  # the first one: others follow from it
        why = raised.group(1) if raised else _last(err)
        said = {"said": _shortened(err.strip())}
        found = {"status": "failed", "message": f"{ended}: {why}", "result": said}
    seconds = round(time.monotonic() - begun, 1)
    return {"name": part.name, "backend": part.backend, "seconds": seconds} | found


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the part and all processes that it has started, also those outside its session."""
    for pid in [*descendants(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _rest(process: subprocess.Popen[str]) -> tuple[str, str]:
    """The output of a killed part; a daemon that it left may still hold its pipes."""
    try:
        return process.communicate(timeout=LEAVE)
    except subprocess.TimeoutExpired:
        return "", ""


def _told(out: str) -> dict[str, Any] | None:
    """The outcome that the part printed: its first failure, because others follow
    from it, or the last line."""
    told: list[dict[str, Any]] = []
    for line in out.splitlines():
        with contextlib.suppress(LookupError, TypeError, ValueError):
            found = json.loads(line)
            told.append({key: found[key] for key in ("status", "message", "result")})
    return next((each for each in told if each["status"] == "failed"), told[-1] if told else None)


def _passed(out: str) -> dict[str, Any]:
    """The last line of a program that prints no outcome."""
    return {"status": "passed", "message": _last(out), "result": {}}


def _shortened(said: str) -> str:
    return said if len(said) <= 2 * KEPT else f"{said[:KEPT]}\n[…]\n{said[-KEPT:]}"


def _last(said: str) -> str:
    lines = [line for line in said.splitlines() if any(map(str.isalnum, line))]
    return lines[-1].strip() if lines else "it said nothing"


def examine(folder: Path | None, as_json: Path | None, out: Console) -> int:
    """Look for GPUs, and run all parts on them; returns 0 if no part failed, 1 if one
    did or there is no GPU."""
    need_solutions("distlab doctor --cuda")
    names, obstacle = usable_gpus()
    if not names:
        print(f"distlab: doctor --cuda needs a GPU, and there is none: {obstacle}", file=sys.stderr)
        return 1
    return run_parts(names, folder, as_json, out)


def run_parts(names: Sequence[str], folder: Path | None, as_json: Path | None, out: Console) -> int:
    """Run all parts on these GPUs and write record and page; 1 if a part failed, else 0."""
    every = parts(len(names), nccl_backends())
    path = gpu_record.record_path(names, folder)
    head = f"{len(every)} parts on {len(names)} x {names[0]}"
    say(out, f"{head}: about ten minutes; Ctrl-C ends them all")
    done: list[dict[str, Any]] = []
    _keep(path, names, done, complete=False)  # fails now, not after ten minutes
    for part in every:
        with out.status(f"{part.name} ({part.backend})"):
            done.append(run(part))
        last = done[-1]
        label = {"passed": "ok", "needs": "--"}.get(last["status"], "NO")
        text = f"{last['name']} ({last['backend']}, {last['seconds']:.0f} s): {last['message']}"
        say(out, text, label=f"{label}  ", indent="  ")
        _keep(path, names, done, complete=len(done) == len(every))
    if as_json:
        as_json.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    failed = [f"{part['name']} ({part['backend']})" for part in done if part["status"] == "failed"]
    say(out, f"{short(path)}  (record)")
    say(out, f"{short(path.with_suffix('.md'))}  (page: send it in, with the record)")
    if failed:
        say(out, f"failed: {', '.join(failed)}", "bold red")
    return 1 if failed else 0


def _keep(path: Path, names: Sequence[str], done: list[dict[str, Any]], complete: bool) -> None:
    """Write record and page. Until the run is complete they go to files of their own: an
    interrupted run keeps its findings, and an earlier record stays as it is."""
    data = described(names) | {"complete": complete, "parts": done}
    partial = path.with_name(f"{path.stem}-partial.json")
    for suffix in (".json", ".md") if complete else ():
        partial.with_suffix(suffix).unlink(missing_ok=True)
    target = path if complete else partial
    sealed.write(target, data)
    target.with_suffix(".md").write_text(page(data), encoding="utf-8")


def described(names: Sequence[str]) -> dict[str, Any]:
    """The machine and the versions with which the parts are run."""
    found = nvml.driver()
    asked = ["git", "-C", str(root()), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    except OSError:
        commit = ""
    return {
        "gpus": list(names),
        "machine": [
            {"name": gpu.name, "memory_bytes": gpu.memory, "nvlinks": gpu.nvlinks}
            for gpu in found.gpus
        ],
        "driver": found.version,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "python": platform.python_version(),
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }
