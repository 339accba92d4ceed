"""distlab doctor: here, on machines that lack something, and with GPUs that are stand-ins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import forked_commands
import pytest
import torch
from rich.console import Console

from distlab.commands import doctor, gpu_run, machine, machine_torch
from distlab.course.catalogue import root
from distlab.host import gpus, nvml, system
from distlab.host.gpu_trial import Trial, trial
from distlab.ranks import run_ranks
from tests.distlab.pretend_driver import GIB, Nvml, text_of


def options(**given: Any) -> Namespace:
    return Namespace(**{"cuda": False, "json": None, "out": None} | given)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what takes half a second: ranks, nodes, torch."""
    monkeypatch.setattr(machine, "cluster_obstacle", lambda **_: None)
    monkeypatch.setattr(machine_torch, "findings", lambda: iter(()))


def test_here(tmp_path: Path) -> None:
    """Every line has a mark, a name and what was found; what is missing says how to get it."""
    file = tmp_path / "doctor.json"
    done = forked_commands.run([sys.executable, "-m", "distlab", "doctor", "--json", str(file)])
    *lines, last = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert last.startswith("The course can be worked through here.")
    assert all(line[:6] in ("  ok  ", "  --  ") for line in lines), done.stdout
    assert all("To get it: " in line for line in lines if line.startswith("  --"))
    data = json.loads(file.read_text())
    assert data["usable"] is True
    assert [line[6:].split(":")[0] for line in lines] == [f["name"] for f in data["findings"]]
    told = done.stdout
    for what in ("cores", "memory", "GPUs", "torch", "Python", "fork", "NCCL", "SLURM", "disk"):
        assert f"  {what}: " in told
    assert "gloo ranks: an all-reduce of two ranks took" in told
    assert "virtual ranks: an all-reduce of two ranks took" in told


@pytest.mark.usefixtures("quick")
def test_without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The course goes on without them; the line says what it takes."""
    reason = "no permission to make network namespaces (Operation not permitted)"
    monkeypatch.setattr(machine, "cluster_obstacle", lambda **_: reason)
    monkeypatch.setattr(machine, "missing_tools", dict)
    status, text = text_of(doctor.main, options())
    assert status == 0
    assert f"  --  nodes on this machine: {reason}. To get it: call it as root" in text
    assert "  --  links with latency: no nodes, see above" in text
    absent = {"tc": "iproute2", "ip": "iproute2", "mount": "mount"}
    monkeypatch.setattr(machine, "missing_tools", lambda: absent)
    assert "apt-get install iproute2 mount" in machine.cluster().remedy


@pytest.mark.usefixtures("quick")
def test_a_course_in_a_read_only_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine.os, "access", lambda *_: False)
    file = tmp_path / "doctor.json"
    status, text = text_of(doctor.main, options(json=file))
    assert status == 1
    assert "  NO  disk: the course's folder is read-only. To get it: chmod" in text
    last = text.splitlines()[-1]
    assert last == (
        "The course can't be worked through here. disk: the course's folder is read-only"
    )
    assert json.loads(file.read_text())["usable"] is False


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of 4 cores and 16 GiB, of which a container may have less."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    (tmp_path / "meminfo").write_text(f"MemTotal: {16 * 2**20} kB\nMemAvailable: {12 * 2**20} kB")
    monkeypatch.setattr(system, "PROC", tmp_path)
    return tmp_path


def test_limits_of_a_container(container: Path) -> None:
    assert (machine.cores().ok, machine.cores().text) == (True, "4 usable cores")
    assert (machine.memory().ok, machine.memory().text) == (True, "12 GiB free of 16 GiB")
    (container / "cpu.max").write_text("max 100000")
    (container / "memory.max").write_text("max")
    assert (machine.cores().text, machine.memory().text) == (
        "4 usable cores",
        "12 GiB free of 16 GiB",
    )
    (container / "cpu.max").write_text("50000 100000\n")
    (container / "memory.max").write_text(f"{3 * GIB}\n")
    (container / "memory.current").write_text(f"{GIB}\n")
    found = machine.cores()
    assert (found.ok, found.needed) == (False, False)
    assert found.text == "4 usable cores, of which this container has the time of 0.5"
    found = machine.memory()
    assert (found.ok, found.needed, found.text) == (False, False, "2 GiB free of 3 GiB")
    assert "4 GiB are comfortable" in found.remedy
    assert not machine.processes().ok, "it has no list of threads"


def test_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert machine.slurm().text.startswith("srun, sbatch, sinfo: not installed")
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert machine.slurm().ok
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert machine.slurm().text == "inside job 17 with 4 tasks"


def test_builds_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for the CPU is enough without a GPU, and only then."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    for ask in (machine_torch.build, machine_torch.nccl):
        assert ask(False).ok
        found = ask(True)
        assert (found.ok, found.needed) == (False, False)
        assert "torch torchvision" in found.remedy
    assert machine_torch.compute(2, Trial()).text == "torch is built for the CPU alone"
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    assert machine_torch.build(True).text == "torch is built for CUDA 13.2"


def test_ranks_that_fail_are_told() -> None:
    def broken(body: Any, world_size: int, **_: Any) -> list[float]:
        raise RuntimeError("connectFullMesh failed\nmore")

    found = machine_torch.ranks("gloo ranks", broken)
    assert (found.ok, found.needed) == (False, True)
    assert found.text == "two ranks fail: connectFullMesh failed"
    assert not machine_torch.ranks("gloo ranks", lambda *_, **__: [1.0, 2.0]).ok


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the grader are needed; those of notebooks are not."""
    every = machine.requirements()
    assert {"torch", "numpy", "pytest", "rich"} <= set(every)
    assert set(machine.OTHERS) <= set(every)
    asked = machine.importlib.metadata.version

    def without(*names: str) -> machine.Finding:
        def version(name: str) -> str:
            if name in names:
                raise machine.importlib.metadata.PackageNotFoundError(name)
            return "7.0" if name == "pytest" else asked(name)

        monkeypatch.setattr(machine.importlib.metadata, "version", version)
        return machine.packages()

    found = without("numpy", "jupyter")
    assert (found.ok, found.needed, found.text) == (False, True, "missing: numpy, pytest")
    monkeypatch.setattr(machine, "least", lambda _: ())
    found = without("jupyter")
    assert (found.ok, found.needed) == (False, False)
    assert "notebooks" in found.text
    assert without().ok


@pytest.mark.parametrize(("here", "ok"), [("2.7.1", False), ("2.8.0", True), ("2.16.0a0", True)])
def test_versions_of_torch(monkeypatch: pytest.MonkeyPatch, here: str, ok: bool) -> None:
    monkeypatch.setattr(torch, "__version__", here)
    found = machine_torch.version()
    assert (found.ok, found.needed) == (ok, True)
    assert ("the newest that the project was tried with" in found.text) == (here == "2.16.0a0")


def test_which_backends_of_nccl_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.1+cu130")
    assert machine_torch.nccl_backends() == {"legacy": {}}
    monkeypatch.setattr(torch, "__version__", "2.15.0+cu132")
    ways = machine_torch.nccl_backends()
    assert [*ways] == ["nccl2", "legacy"]
    assert ways["legacy"] == {"TORCH_DIST_USE_NCCL2": "0"}


def test_a_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    """It is a finding like others, not a traceback."""
    (tmp_path / "torch").mkdir()
    broken = "raise ImportError('libcudart.so.13: cannot open shared object file')"
    (tmp_path / "torch" / "__init__.py").write_text(broken)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root()}"}
    command = [sys.executable, "-m", "distlab", "doctor"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    said = "torch: can't be imported: libcudart.so.13: cannot open shared object file"
    assert f"  NO  {said}. To get it: make env" in done.stdout
    assert done.stdout.splitlines()[-1] == f"The course can't be worked through here. {said}"


def lines_of(monkeypatch: pytest.MonkeyPatch, library: Nvml) -> list[str]:
    monkeypatch.setattr(nvml, "pynvml", library)
    found = [f"{f.name}: {f.text}" for f in machine.graphics()]
    assert library.open == 0
    return found


def test_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted through NVML: this process can fork ranks that compute, as before."""
    eight = Nvml([b"H100"] * 8, links=18)
    assert lines_of(monkeypatch, eight) == [
        "GPUs: 8 x H100 with 80 GiB; driver 570.86.15",
        "NVLink: 18 links up on each GPU",
    ]
    unequal = lines_of(monkeypatch, Nvml(["A", "B", "A"]))
    assert unequal[0].startswith("GPUs: 2 x A with 80 GiB, 1 x B with 80 GiB")
    assert unequal[1] == "NVLink: none is up: GPUs talk over PCIe"
    assert "one GPU: NCCL takes one rank per GPU" in lines_of(monkeypatch, Nvml(["A"]))[1]
    assert not torch.cuda.is_initialized()
    assert list(run_ranks(lambda ctx: float(torch.ones(2).sum()), 2)) == [2.0, 2.0]


def test_a_driver_that_is_absent_or_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    down = "GPUs: none (the NVIDIA driver does not answer: Driver/library version mismatch)"
    assert lines_of(monkeypatch, Nvml([], down=True))[0].startswith(down)
    assert lines_of(monkeypatch, Nvml([]))[0].startswith("GPUs: none (the driver lists none)")
    monkeypatch.setattr(nvml, "pynvml", None)
    assert "nvidia-ml-py is not installed" in nvml.driver().obstacle


def test_cuda_is_tried_in_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that the driver lists and torch can't use are told; this process stays as it was."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"H{device.index}")
    if not torch.backends.cuda.is_built() or not nvml.driver().gpus:
        found = trial()
        assert found.obstacle.startswith("GPU 0: ")
        assert list(found.names) == ["H0"]
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device=None: ones(*size))
    assert trial() == Trial(["H0", "H1"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: time.sleep(60))
    assert trial(0.2).obstacle == "CUDA did not answer within 0.2 s"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: os._exit(9))
    assert trial().obstacle == "CUDA ended the process"
    assert not torch.cuda.is_initialized()


def test_fewer_gpus_than_the_driver_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "_before", None)
    monkeypatch.setenv(gpus.VISIBLE, "0,3")
    found = machine_torch.compute(8, Trial(["A", "A"]))
    assert found.text == "computes on 2 of 8 GPUs (CUDA_VISIBLE_DEVICES=0,3)"
    monkeypatch.setenv(gpus.VISIBLE, "")
    found = machine_torch.compute(8, Trial())
    assert not found.ok
    assert "(CUDA_VISIBLE_DEVICES=): it shows none" in found.text
    assert machine_torch.compute(8, Trial(["A"], "GPU 0: no kernel image")).text.endswith("image")


def test_cuda_without_a_gpu_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(nvml, "pynvml", Nvml([]))
    assert text_of(doctor.main, options(cuda=True, out=tmp_path)) == (1, "")
    said = "distlab: doctor --cuda needs a GPU, and there is none: the driver lists none\n"
    assert capsys.readouterr().err == said
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(nvml, "pynvml", Nvml(["A"]))
    monkeypatch.setattr(machine_torch, "trial", lambda: Trial(["A"], "GPU 0: no kernel image"))
    assert gpu_run.examine(tmp_path, None, Console()) == 1
    assert "no kernel image" in capsys.readouterr().err
