"""The SLURM job on a real SLURM: four virtual nodes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distlab.course.catalogue import root
from solutions.phase4_production import exit_codes
from solutions.phase4_production.deployment.slurm_cluster import (
    PACKAGES,
    environment_of,
    fail_node,
    free_ports,
    obstacle,
    start,
    stop,
)
from tests.deployment.manifests import DEPLOYMENT

OBSTACLE = obstacle()
needs_slurm = pytest.mark.skipif(OBSTACLE is not None, reason=f"needs SLURM: {OBSTACLE}")
SCRIPT = DEPLOYMENT / "slurm.sbatch"
MORE = 5  # steps of a job's second life
PATIENCE = 180.0  # seconds until something must have happened on a machine that is busy


class Cluster:
    """A virtual cluster, and one training's checkpoints and logs."""

    def __init__(self, folder: Path, work: Path, gpus: int) -> None:
        self.folder, self.work, self.gpus = folder, work, gpus
        self.environment = start(folder, gpus=gpus)
        path = f"{Path(sys.executable).parent}{os.pathsep}{self.environment['PATH']}"
        self.environment |= {"PATH": path, "OMP_NUM_THREADS": "1"}

    def call(self, *command: str, **variables: str) -> str:
        """Run one of SLURM's commands in the repository's folder; what it printed."""
        done = subprocess.run(
            command,
            cwd=root(),
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def configure(self, max_steps: int | None) -> None:
        """What the next life of a job is to do: each one reads it at its start."""
        self.work.mkdir(exist_ok=True)
        smoke = (root() / "configs" / "smoke.yaml").read_text(encoding="utf-8")
        limit = "null" if max_steps is None else max_steps
        text, found = re.subn(r"(?m)^max_steps: \S+", f"max_steps: {limit}", smoke)
        assert found == 1
        (self.work / "config.yaml").write_text(text, encoding="utf-8")

    def submit(self, *trainer: str) -> str:
        """Hand in the job as it is, on two nodes with all GPUs of each; its number."""
        self.configure(None)
        answer = self.call(
            *("sbatch", "--parsable", f"--gpus-per-node={self.gpus}"),
            *(f"--output={self.work}/job-%j.log", str(SCRIPT)),
            *("--config", f"{self.work}/config.yaml", "--data", "synthetic"),
            *("--checkpoints", f"{self.work}/checkpoints", "--logs", f"{self.work}/logs"),
            # one data worker: without cgroups SLURM signals every process of a job, it too
            *("--workers", "1", "--save-every", "0", "--watchdog-seconds", "300", *trainer),
            MASTER_PORT=str(free_ports(1)[0]),
            NPROC_PER_NODE="3",  # where there are GPUs they count
        )
        return answer.strip()

    def job(self, number: str) -> dict[str, str]:
        """What SLURM says of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "show", "job", number)))

    def log(self, number: str) -> str:
        file = self.work / f"job-{number}.log"
        return file.read_text() if file.exists() else ""

    def steps(self) -> list[int]:
        """The steps that the metrics tell of."""
        lines = (self.work / "logs" / "metrics.jsonl").read_text().splitlines()
        return [record["step"] for record in map(json.loads, lines) if "loss" in record]

    def begin_jobs(self, begin: bool) -> None:
        """Whether jobs that wait may begin; those that run go on."""
        state = "UP" if begin else "DOWN"
        self.call("scontrol", "update", "PartitionName=batch", f"State={state}")

    def wait(self, number: str, what: str, happened: Callable[[], bool]) -> None:
        """Until something has happened; the log if it does not."""
        deadline = time.monotonic() + PATIENCE
        while not happened():
            state = self.job(number)["JobState"]
            if time.monotonic() > deadline or state in ("FAILED", "TIMEOUT", "CANCELLED"):
                pytest.fail(f"{what} did not happen, job {state}\n{self.log(number)}")
            time.sleep(0.5)

    def wait_for_step(self, number: str) -> None:
        """Until the job has written of its first step."""
        metrics = self.work / "logs" / "metrics.jsonl"
        self.wait(number, "training", lambda: metrics.exists() and metrics.stat().st_size > 0)


@contextlib.contextmanager
def running(gpus: int) -> Iterator[Cluster]:
    """A cluster of nodes with so many GPUs each."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # short, as sockets need it
        cluster = Cluster(Path(folder) / "c", Path(folder) / "work", gpus)
        try:
            yield cluster
        finally:
            stop(cluster.folder)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running(gpus=1) as cluster:
        yield cluster


@pytest.fixture
def own(cluster: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    """The cluster, for a training of the test's own; its jobs end with the test."""
    cluster.work = tmp_path
    yield cluster
    cluster.call("scancel", "--partition=batch")
    cluster.begin_jobs(True)


def saved_step(log: str, ranks: int) -> int:
    """The step after which the last life of a job went on."""
    found = re.findall(rf"resumed after step (\d+), saved by {ranks} ranks", log)
    return int(found[-1]) if found else 0


@needs_slurm
def test_preempted_job_saves_is_requeued_and_goes_on_to_its_end(own: Cluster) -> None:
    """SLURM's warning before the end: the job leaves, comes back, and lost no step.

    The first life has no end. Before the second one begins, it learns of its last step.
    """
    number = own.submit("--epochs", "100000", "--log-every", "1")
    own.wait_for_step(number)
    own.begin_jobs(False)
    own.call("scancel", "--batch", "--signal=USR1", number)
    own.wait(number, "the way back", lambda: own.job(number)["JobState"] == "PENDING")
    saved = len(own.steps())
    own.configure(saved + MORE)
    own.begin_jobs(True)
    own.wait(number, "the end", lambda: own.job(number)["JobState"] == "COMPLETED")
    log = own.log(number)
    lives = [line for line in log.splitlines() if "2 nodes x 1 ranks, restart" in line]
    assert [line.rpartition(" ")[2] for line in lives] == ["0", "1"]
    assert "asked to leave, saving" in log
    assert saved_step(log, 2) == saved > 0
    assert own.job(number)["Restarts"] == "1"
    assert sorted(own.steps()) == list(range(saved + MORE))


@needs_slurm
def test_refused_job_ends_with_the_refusal_and_is_not_requeued(own: Cluster) -> None:
    number = own.submit("--epochz", "3")
    deadline = time.monotonic() + PATIENCE
    going_on = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
    while (job := own.job(number))["JobState"] in going_on:
        assert time.monotonic() < deadline, own.log(number)
        time.sleep(0.2)
    assert (job["JobState"], job["Restarts"]) == ("FAILED", "0")
    assert job["ExitCode"] == f"{exit_codes.REFUSED}:0"
    assert "there is no field 'epochz'; did you mean epochs?" in own.log(number)


@needs_slurm
@pytest.mark.skipif("DISTLAB_SLOW" not in os.environ, reason="a minute: DISTLAB_SLOW=1 runs it")
def test_job_of_a_dead_node_goes_on_elsewhere() -> None:
    """With two ranks on each node."""
    with running(gpus=2) as own:
        number = own.submit("--epochs", "100000", "--log-every", "1", "--save-every", "20")
        own.wait_for_step(number)
        checkpoints = own.work / "checkpoints"
        own.wait(number, "a checkpoint", lambda: any(checkpoints.glob("*/COMPLETE")))
        names = own.job(number)["NodeList"]
        _, second = own.call("scontrol", "show", "hostnames", names).split()
        fail_node(own.folder, second)
        own.wait(number, "the way back", lambda: own.job(number)["Restarts"] == "1")
        own.wait(number, "going on", lambda: saved_step(own.log(number), 4) > 0)
        assert second not in own.call("scontrol", "show", "hostnames", own.job(number)["NodeList"])


def test_packages_are_those_that_ci_installs() -> None:
    assert PACKAGES in (root() / ".ci" / "run").read_text(encoding="utf-8")


def test_obstacle_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "solutions.phase4_production.deployment.slurm_cluster"
    monkeypatch.setattr(f"{module}.PROGRAMS", ("no-such-daemon", "sh"))
    assert obstacle() == (f"a virtual SLURM cluster needs no-such-daemon (apt install {PACKAGES})")
    monkeypatch.setattr(f"{module}.Path", lambda path: Path("/nowhere" + path))
    assert obstacle() == "a virtual SLURM cluster needs /proc, and this system has none (Linux has)"


def test_environment_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    given = environment_of(Path("/tmp/c"))
    assert given["SLURM_CONF"] == "/tmp/c/slurm.conf"
    assert "SLURM_JOB_ID" not in given


@needs_slurm
def test_nothing_is_left(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="slurm-") as parent:
        folder = Path(parent) / "c"
        environment = start(folder, nodes=1, gpus=0)
        with pytest.raises(FileExistsError):
            start(folder)
        script = tmp_path / "job"
        script.write_text("#!/bin/sh\nsleep 600 & sleep 600\n")
        command = ["sbatch", "--parsable", f"--output={tmp_path}/log", str(script)]
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=30)
        deadline = time.monotonic() + 60
        while not marked(folder, b"sleep"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        stop(folder)
        assert not marked(folder, b"")
        assert not folder.exists()


def marked(folder: Path, name: bytes) -> list[int]:
    """Processes with the cluster's mark whose command contains ``name``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            ours = f"{folder}/slurm.conf".encode() in (entry / "environ").read_bytes()
            if ours and name in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found
