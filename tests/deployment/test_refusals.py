"""A run that can't be is refused with a status of its own, and nobody starts it again.

Every manifest's own command is run on this machine; only paths are mapped, and one rank is started
where there are many.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from distlab.course.catalogue import root
from solutions.phase4_production import exit_codes
from solutions.phase4_production.config_sources import parse
from tests.deployment.manifests import DEPLOYMENT
from tests.deployment.starters import (
    UNIT,
    Starter,
    alone,
    compose,
    environment_file,
    kubeflow,
    kubernetes,
    slurm,
    systemd,
    unit,
)
from tests.phase4 import image_runs

STARTERS = ("kubernetes", "kubeflow", "compose", "systemd", "slurm")
LIMIT = 300  # seconds after which a command hangs
# shells in front of the launcher: what they do with its status is seen in the cheap tests, too
WRAPPED = pytest.mark.skipif(
    "DISTLAB_SLOW" not in os.environ, reason="a minute for all: DISTLAB_SLOW=1 runs it"
)
SMALLEST = (
    *("--config", f"{root()}/configs/smoke.yaml", "--data", "synthetic", "--device", "cpu"),
    *("--workers", "0", "--global-batch", "8", "--max-steps", "1"),
)


def starter(name: str, folder: Path) -> Starter:
    if name == "slurm":
        return slurm(folder)
    made = {"kubernetes": kubernetes, "kubeflow": kubeflow, "compose": compose, "systemd": systemd}
    return made[name]()


def run(
    started: Starter, *arguments: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*started.program, *arguments],
        cwd=cwd or root(),
        env=alone(started.environment),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def placed(arguments: list[str], folder: Path) -> list[str]:
    """A manifest's arguments, with the image's and the nodes' folders below ``folder``."""
    return [
        re.sub(r"^(--[a-z-]+=)?/(training|shared|data|datasets)\b", rf"\1{folder}/\2", word)
        for word in arguments
    ]


@pytest.mark.parametrize("name", STARTERS)
@pytest.mark.parametrize("refusal", ["bad field", "missing data"])
def test_refused_before_a_rank_starts(name: str, refusal: str, tmp_path: Path) -> None:
    """The manifest's command with its own arguments: a misspelt field, or no images there."""
    started = starter(name, tmp_path)
    arguments = placed(started.arguments, tmp_path)
    if refusal == "bad field":
        arguments.append("--epochz=3")
        reason = "there is no field 'epochz'; did you mean epochs?"
    else:
        arguments = [word.replace("--data=synthetic", f"--data={tmp_path}") for word in arguments]
        reason = f"there is no data folder {tmp_path}"
    done = run(started, *arguments)
    assert done.returncode == exit_codes.REFUSED, done.stderr
    assert (done.stdout + done.stderr).count(reason) == 1, done.stderr  # tried once
    assert not started.starts_again(done.returncode)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of a small model."""
    folder = tmp_path_factory.mktemp("foreign")
    config, _ = parse([*SMALLEST, *kept_in(folder)])
    assert image_runs.train(config, 1)["complete"]
    return folder


def kept_in(folder: Path) -> list[str]:
    return [f"--checkpoints={folder}/checkpoints", f"--logs={folder}/logs"]


@pytest.mark.parametrize(
    "name",
    [
        name if name == "systemd" else pytest.param(name, marks=WRAPPED)
        for name in STARTERS
        if name != "kubernetes"  # its container calls the launcher as the unit does
    ],
)
def test_another_models_checkpoint_is_refused(name: str, foreign: Path, tmp_path: Path) -> None:
    """A rank says so; its agent passes the status on, and does not start the rank again."""
    started = starter(name, tmp_path)
    kept = sorted((foreign / "checkpoints").rglob("*"))
    done = run(started, *SMALLEST, *kept_in(foreign), "--model=resnet18")
    assert done.returncode == exit_codes.REFUSED, done.stderr
    reason = "is of another model: small_cnn, this run trains resnet18"
    assert (done.stdout + done.stderr).count(reason) == 1, done.stderr
    assert not started.starts_again(done.returncode)
    assert sorted((foreign / "checkpoints").rglob("*")) == kept


def test_kubernetes_and_systemd_call_the_launcher_alike() -> None:
    """So one of the two stands for both where a run is dear."""
    assert (root() / kubernetes().program[0]).samefile(systemd().program[0])


# -- what is started again ------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["kubernetes", "kubeflow", "systemd"])
def test_manifest_starts_again_what_may_go_well_the_next_time(name: str, tmp_path: Path) -> None:
    started = starter(name, tmp_path)
    again = {status: started.starts_again(status) for status in exit_codes.MEANING}
    assert again.pop(exit_codes.REFUSED) is False
    if name == "systemd":
        assert again.pop(exit_codes.DONE) is False
    else:
        again.pop(exit_codes.DONE)  # no failure: no policy is asked
    assert all(again.values()), again


def test_a_stop_that_saved_is_no_failure_for_systemd() -> None:
    assert str(exit_codes.PREEMPTED) in unit()["SuccessExitStatus"][0].split()


@pytest.mark.parametrize("cloud", [".", "gcp", "nebius"])
def test_nodes_of_every_cloud_run_the_same_unit(cloud: str) -> None:
    folder = DEPLOYMENT / "terraform" / cloud
    text = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.tf"))
    (named,) = re.findall(r'templatefile\("\$\{path\.module\}/(\S+\.service\.tftpl)"', text)
    assert (folder / named).samefile(UNIT)
    wanted = {"NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT", "MAX_RESTARTS"}
    given = environment_file(cloud)
    assert wanted <= set(given)
    wait = int(given["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    (limit,) = re.findall(r"stop_seconds += (\d+)", text)
    assert wait < int(limit)  # ranks have saved before systemd kills them


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_unit_is_understood(tmp_path: Path) -> None:
    """systemd's own parser; ExecStart must exist, so the checkout stands for /opt/trainer."""
    text = UNIT.read_text(encoding="utf-8").replace("/opt/trainer", str(root()))
    for name in re.findall(r"\$\{(\w+)\}", text):
        text = text.replace(f"${{{name}}}", "60" if name == "stop_seconds" else "root")
    assert verify(tmp_path / "training.service", text) == ""
    spoilt = text.replace("RestartPreventExitStatus", "RestartPreventExitStatuses")
    assert "'RestartPreventExitStatuses'" in verify(tmp_path / "spoilt.service", spoilt)


def verify(file: Path, text: str) -> str:
    file.write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return "".join(line for line in done.stderr.splitlines(True) if file.name in line)


AGAIN = DEPLOYMENT / "again.sh"


@pytest.mark.parametrize(
    ("status", "runs"),
    [
        (exit_codes.DONE, 1),
        (exit_codes.CRASHED, 3),
        (exit_codes.HUNG, 3),
        (exit_codes.REFUSED, 1),
        (126, 1),
        (127, 1),
        (137, 3),
    ],
)
def test_container_tries_again_what_may_go_well(status: int, runs: int, tmp_path: Path) -> None:
    script = f"echo ran; exit {status}"
    command = [str(AGAIN), "2", "0", "bash", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == status
    assert done.stdout == "ran\n" * runs


@pytest.mark.parametrize("when", ["running", "waiting"])
def test_container_that_is_stopped_saves_and_is_not_started_again(when: str) -> None:
    """SIGTERM reaches the command once; between two tries it ends the wait."""
    running = "trap 'echo saving; exit 75' TERM; echo up; while :; do sleep 0.05; done"
    script = running if when == "running" else "echo up; exit 1"
    process = subprocess.Popen(
        [str(AGAIN), "9", "600", "bash", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "up\n"
    if when == "waiting":
        assert process.stderr.readline() == "again: status 1, try 1 of 9\n"
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=LIMIT)
    assert (process.returncode, printed) == ((75, "saving\n") if when == "running" else (1, ""))


# -- SLURM's queue --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("status", "preempted", "again"),
    [
        (exit_codes.DONE, False, False),
        (exit_codes.CRASHED, False, False),  # torchrun has tried it MAX_RESTARTS times
        (exit_codes.REFUSED, False, False),
        (exit_codes.PREEMPTED, False, True),
        (exit_codes.PREEMPTED, True, True),
        (exit_codes.DONE, True, False),  # it was done before it could leave
        (exit_codes.REFUSED, True, False),
        (137, True, True),  # it could not save in time
    ],
)
def test_job_goes_back_into_the_queue(
    status: int, preempted: bool, again: bool, tmp_path: Path
) -> None:
    """The job's script with a launcher that ends so, after SLURM's warning or by itself."""
    work = tmp_path / "work"
    work.mkdir()
    launcher = work / "launch_training.sh"
    waiting = "echo $$ >$REQUEUED.pid; echo up; while :; do sleep 0.05; done" if preempted else ""
    end = f"exit {status}"
    launcher.write_text(f"#!/usr/bin/env bash\ntrap '{end}' TERM\n{waiting}\n{end}\n")
    launcher.chmod(0o755)
    started = slurm(tmp_path)
    process = subprocess.Popen(
        started.program,
        cwd=work,
        env=alone(started.environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    if preempted:
        while process.stdout.readline() != "up\n":
            assert process.poll() is None
        process.send_signal(signal.SIGUSR1)
    printed, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == status, printed
    assert (tmp_path / "requeued").exists() is again
    if again:
        assert (tmp_path / "requeued").read_text() == "7\n"
