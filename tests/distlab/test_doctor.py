"""distlab doctor: here, on machines that lack something, and with GPUs that are stand-ins."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked_commands
import pytest
import torch
from rich.console import Console

from distlab.commands import doctor, gpu_checks, gpu_run, machine, machine_torch
from distlab.commands.gpu_page import page
from distlab.commands.gpu_run import Part
from distlab.course.catalogue import load_course, root
from distlab.grading.report import print_report
from distlab.grading.verdicts import CheckResult, ExerciseResult, Report
from distlab.host import gpus, nvml, system
from distlab.host.gpu_trial import Trial, trial
from distlab.ranks import run_ranks
from distlab.reference import gpu_record

GIB = 2**30
NAME = "NVIDIA H100 80GB HBM3"
GPUS = [NAME, NAME]


def text_of(call: Any, *arguments: Any) -> tuple[int, str]:
    """The status of a command, and what it printed."""
    out = io.StringIO()
    status = call(*arguments, Console(file=out, width=100, color_system=None))
    return status, out.getvalue()


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
    status, text = text_of(doctor.doctor, options())
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
    status, text = text_of(doctor.doctor, options(json=file))
    assert status == 1
    assert "  NO  disk: the course's folder is read-only. To get it: chmod" in text
    last = text.splitlines()[-1]
    assert last == (
        "The course can't be worked through here. disk: the course's folder is read-only"
    )
    assert json.loads(file.read_text())["usable"] is False


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


class Nvml:
    """The driver's library of a machine with these GPUs; ``links``: NVLinks that are up on each."""

    NVML_NVLINK_MAX_LINKS, NVML_FEATURE_ENABLED = 18, 1

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    def __init__(self, names: list[str | bytes], links: int = 0, down: bool = False) -> None:
        self.names, self.links, self.down, self.open = names, links, down, 0

    def nvmlInit(self) -> None:
        if self.down:
            raise self.NVMLError("Driver/library version mismatch")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.86.15"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return self.names[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=80 * GIB)

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if not self.links:
            raise self.NVMLError("Not Supported")
        return int(link < self.links)


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
    assert text_of(doctor.doctor, options(cuda=True, out=tmp_path)) == (1, "")
    said = "distlab: doctor --cuda needs a GPU, and there is none: the driver lists none\n"
    assert capsys.readouterr().err == said
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(nvml, "pynvml", Nvml(["A"]))
    monkeypatch.setattr(machine_torch, "trial", lambda: Trial(["A"], "GPU 0: no kernel image"))
    assert gpu_run.examine(tmp_path, None, Console()) == 1
    assert "no kernel image" in capsys.readouterr().err


WATCHED = ("host waits", "sanitizer")


def test_parts_of_the_run() -> None:
    """Every phase and every comparison with each backend; the sanitizer in its own environment."""
    both = {"nccl2": {"TORCH_DIST_USE_NCCL2": "1"}, "legacy": {"TORCH_DIST_USE_NCCL2": "0"}}
    every = gpu_run.parts(8, both)
    names = [part.name for part in every]
    own = ("checks of phase 1", "checks of phase 4", "bandwidth", *gpu_run.programs(8))
    for name in (*own, *gpu_run.COMPARED):
        assert names.count(name) == 2
    for name in gpu_run.COMPARED:
        (waits,), (races,) = ([p for p in every if p.name == f"{k} of {name}"] for k in WATCHED)
        assert waits.command == races.command
        assert races.environment == waits.environment | {"TORCH_CUDA_SANITIZER": "1"}
    assert {part.environment["TORCH_DIST_USE_NCCL2"] for part in every} == {"0", "1"}
    for part in every:
        for module in [
            b for a, b in zip(part.command, part.command[1:], strict=False) if a == "-m"
        ]:
            file = root() / f"{module.replace('.', '/')}.py"
            assert module.startswith("torch.") or file.is_file()


GOOD = {
    "status": "passed",
    "message": "fine",
    "result": {"header": ["a", "b"], "table": [["1", "x|y"]], "note": "In ms."},
}
PROGRAMS = {
    "good": f"print('noise'); print({json.dumps(GOOD)!r})",
    "needs": 'print(\'{"status": "needs", "message": "needs two GPUs", "result": {}}\')',
    "raises": "raise RuntimeError('NCCL error: unhandled system error')",
    "raises on ranks": "import sys; sys.exit('[rank1]: distlab.ranks.RankFailure: rank 1 hangs\\n"
    "torch.distributed.elastic.ChildFailedError: \\n=====' + 9000 * '-')",
    "hangs": "import os, time; os.fork() or os.setsid()\n"
    "open(os.environ['PIDS'], 'a').write(f'{os.getpid()} ')\ntime.sleep(600)",
    "dies": "import os; os.kill(os.getpid(), 11)",
    "babbles": "print('ok')",
    "explains": "import sys; "
    'print(\'{"status": "failed", "message": "rank 1: first", "result": {}}\'); '
    'print(\'{"status": "failed", "message": "rank 0: peer", "result": {}}\'); sys.exit(1)',
    "passes, then dies": f"print({json.dumps(GOOD)!r}); import os; os._exit(3)",
    "sees": "import os, json; print(json.dumps({'status': 'passed', 'message': "
    "os.environ['CHOSEN'] + os.environ.get('CUDA_VISIBLE_DEVICES', 'all'), 'result': {}}))",
}


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of which the commands believe that it has two GPUs."""
    monkeypatch.setattr(gpu_run, "usable_gpus", lambda: (GPUS, ""))
    monkeypatch.setattr(nvml, "pynvml", Nvml(GPUS, links=18))
    monkeypatch.setattr(gpus, "_before", None)
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpus.hide()
    yield
    gpus.show()


@pytest.mark.usefixtures("two_gpus")
def test_a_part_that_fails_is_recorded_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment = {"CHOSEN": "0 ", "PIDS": str(tmp_path / "pids")}
    every = [
        Part(name, "legacy", ("-c", code), 4 if name == "hangs" else 60, environment)
        for name, code in PROGRAMS.items()
    ]
    for name, status in (("quiet", 0), ("quiet and wrong", 2)):
        code = f"import sys; print('loss 2.5'); print(); sys.exit({status})"
        every.append(Part(name, "legacy", ("-c", code), 60, reports=False))
    monkeypatch.setattr(gpu_run, "parts", lambda *_: every)
    status, text = text_of(gpu_run.examine, tmp_path, None)
    path = tmp_path / "cuda" / "nccl-2x-nvidia-h100-80gb-hbm3.json"
    data = gpu_record.read(path)
    found = {part["name"]: part for part in data["parts"]}
    assert (status, data["complete"]) == (1, True)
    assert {name: part["status"] for name, part in found.items()} == {
        **dict.fromkeys((*PROGRAMS, "quiet and wrong"), "failed"),
        **{"good": "passed", "sees": "passed", "needs": "needs", "quiet": "passed"},
    }
    assert found["quiet"]["message"] == "loss 2.5"
    assert found["quiet and wrong"]["message"].startswith("ended with status 2")
    assert found["raises"]["message"].endswith("RuntimeError: NCCL error: unhandled system error")
    message = "ended with status 1: distlab.ranks.RankFailure: rank 1 hangs"
    assert found["raises on ranks"]["message"] == message
    assert len(found["raises on ranks"]["result"]["said"]) < 2 * gpu_run.KEPT + 10
    assert found["hangs"]["message"].startswith("did not end within 4 s")
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    assert not [pid for pid in pids if (system.PROC / pid).exists()], "nothing is left running"
    assert found["dies"]["message"].startswith("ended with status -11")
    assert found["explains"]["message"] == "rank 1: first"
    assert found["passes, then dies"]["message"].startswith("ended with status 3")
    assert found["sees"]["message"] == "0 all", "a part sees the GPUs that this process hides"
    assert found["good"]["result"] == GOOD["result"]
    assert "  NO  raises (legacy, " in text
    assert "failed: raises (legacy), raises on ranks (legacy), hangs (legacy), dies" in text
    shown = path.with_suffix(".md").read_text()
    assert f"# The solutions on 2 x {NAME}" in shown
    assert "| 1 | x\\|y |" in shown
    assert "RuntimeError: NCCL error" in shown
    assert "interrupted" not in shown
    assert {each.name for each in path.parent.iterdir()} == {path.name, f"{path.stem}.md"}
    assert "interrupted: parts are missing" in page(data | {"complete": False})


@pytest.mark.usefixtures("two_gpus")
def test_an_interrupted_run_leaves_the_record_that_was_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good = Part("good", "legacy", ("-c", PROGRAMS["good"]), 60)
    monkeypatch.setattr(gpu_run, "parts", lambda *_: [good])
    status, text = text_of(gpu_run.examine, tmp_path, None)
    assert status == 0
    assert "failed" not in text
    path = gpu_record.record_path(GPUS, tmp_path)
    before = path.read_text()

    def interrupted(part: Part) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_run, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        text_of(gpu_run.examine, tmp_path, None)
    assert path.read_text() == before
    assert gpu_record.read(path.with_name(f"{path.stem}-partial.json"))["parts"] == []
    assert gpu_record.words(tmp_path).endswith("parts 1 passed)")


@pytest.mark.usefixtures("two_gpus")
def test_what_reports_say_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the records there are: none, of one GPU, of several; a damaged one counts for nothing."""
    assert gpu_record.words(tmp_path) == "never run on NCCL"
    part = {"name": "ddp", "status": "passed"}
    known = {"complete": True, "date": "2026-01-02", "parts": [part, part | {"status": "failed"}]}
    one, two = (gpu_record.record_path(GPUS[:count], tmp_path) for count in (1, 2))
    gpu_record.write(one, known | {"gpus": GPUS[:1]})
    said = f"run on NCCL with one rank (1 x {NAME}); between GPUs never run on NCCL"
    assert gpu_record.words(tmp_path) == said
    gpu_record.write(two, known | {"gpus": GPUS, "complete": False})
    assert gpu_record.words(tmp_path) == said
    gpu_record.write(two, known | {"gpus": GPUS})
    told = f"run on NCCL (2 x {NAME}, 2026-01-02: parts 1 passed, 1 failed)"
    assert gpu_record.words(tmp_path) == told
    two.write_text(two.read_text().replace('"passed"', '"failed"'))
    with pytest.raises(ValueError, match=r"corrupt .*: record it anew: distlab doctor --cuda"):
        gpu_record.read(two)
    assert gpu_record.words(tmp_path) == said
    two.write_text("[]")
    with pytest.raises(ValueError, match="can't be read"):
        gpu_record.read(two)


def test_the_projects_own_records_hold() -> None:
    """As soon as there is one: its hash, its name, and the page beside it."""
    for path in (root() / "references" / "cuda").glob("nccl-*.json"):
        data = gpu_record.read(path)
        assert path == gpu_record.record_path(data["gpus"])
        assert path.with_suffix(".md").read_text(encoding="utf-8") == page(data)


@pytest.mark.parametrize("page", ["README.md", "solutions/phase4_production/README.md"])
def test_readme_says_whether_the_solutions_ran_on_nccl(page: str) -> None:
    text = " ".join((root() / page).read_text(encoding="utf-8").split())
    assert (gpu_record.NEVER in text) == (gpu_record.NEVER in gpu_record.words())


def test_reports_say_whether_the_solutions_ran_on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a check of the cuda tier, whether it ran or not."""
    phase = load_course().phase(1)
    check = CheckResult("test_a[cuda]", "needs", "a CUDA GPU", tier="cuda")
    report = Report(1, "solutions", 7, "cpu", [ExerciseResult("1.4", "", 5, checks=[check])])
    _, text = text_of(print_report, report, phase)
    assert f"the project's own solutions: {gpu_record.words()}" in text
    monkeypatch.setattr(gpu_record, "words", lambda: "run on NCCL (8 x H100)")
    assert (
        "the project's own solutions: run on NCCL (8 x H100)"
        in text_of(print_report, report, phase)[1]
    )
    check.tier = "gloo"
    assert "NCCL" not in text_of(print_report, report, phase)[1]


def test_checks_of_the_cuda_tier_in_words() -> None:
    """Other tiers do not count; the first failure is told."""
    checks = [
        CheckResult("test_a[cuda]", "pass", tier="cuda"),
        CheckResult("test_b[cuda]", "needs", "3 GPUs: send of …", tier="cuda"),
        CheckResult("test_c[gloo]", "fail", "wrong", tier="gloo"),
    ]
    report = Report(1, "solutions", 7, "cuda", [ExerciseResult("1.4", "", 5, checks=checks)])
    found = gpu_checks.outcome(report)
    assert (found["status"], found["message"]) == ("passed", "1 pass, 1 needs")
    assert found["result"]["needs"] == {"3 GPUs: send of …": 1}
    checks.append(CheckResult("test_d[cuda]", "hang", "deadlock\nrank 0", tier="cuda"))
    found = gpu_checks.outcome(report)
    assert (found["status"], found["message"]) == (
        "failed",
        "1 pass, 1 needs, 1 hang; 1.4 test_d[cuda]: deadlock",
    )
    assert json.dumps(found)
    assert gpu_checks.outcome(Report(1, "solutions", 7, "cuda"))["status"] == "needs"
