"""distlab doctor --cuda: parts that pass, fail and hang; its record, its page, words for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.commands import gpu_checks, gpu_run
from distlab.commands.gpu_page import page
from distlab.commands.gpu_run import Part
from distlab.course.catalogue import load_course, root
from distlab.grading.report import print_report
from distlab.grading.verdicts import CheckResult, ExerciseResult, Report
from distlab.host import gpus, nvml, system
from distlab.reference import gpu_record, sealed
from tests.distlab.pretend_driver import GPUS, NAME, Nvml, text_of

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
    sealed.write(one, known | {"gpus": GPUS[:1]})
    said = f"run on NCCL with one rank (1 x {NAME}); between GPUs never run on NCCL"
    assert gpu_record.words(tmp_path) == said
    sealed.write(two, known | {"gpus": GPUS, "complete": False})
    assert gpu_record.words(tmp_path) == said
    sealed.write(two, known | {"gpus": GPUS})
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
    assert f"the course's own solutions (not yours): {gpu_record.words()}" in text
    monkeypatch.setattr(gpu_record, "words", lambda: "run on NCCL (8 x H100)")
    assert (
        "the course's own solutions (not yours): run on NCCL (8 x H100)"
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
