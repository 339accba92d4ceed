"""Who starts the trainer, with which command, and what each does with an exit status.

All of it is read from the manifests, so that a test can run a container's or a unit's own command
and compare how it ends with what its manifest says of such an end.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from distlab.course.catalogue import root
from solutions.phase4_production.deployment.slurm_cluster import free_ports
from tests.deployment.manifests import (
    DEPLOYMENT,
    Document,
    after_exit,
    documents,
    launcher_variables,
    one,
)

UNIT = DEPLOYMENT / "terraform" / "training.service.tftpl"
STAND_INS = {
    # as SLURM's own, for a job on this machine alone
    "srun": 'while [ "$1" != bash ]; do shift; done\nSLURM_NODEID=0 exec "$@"\n',
    "scontrol": 'case "$1 $2" in\n"show hostnames") echo node1 ;;\n'
    '"show node") echo "NodeAddr=127.0.0.1" ;;\n'
    'requeue*) echo "$2" >>"$REQUEUED" ;;\nesac\n',
    "scancel": "kill -TERM $(cat $REQUEUED.pid)\n",
}


@dataclass(frozen=True)
class Starter:
    """A command as a manifest has it, without the trainer's arguments, and what follows its end."""

    program: list[str]
    arguments: list[str]
    environment: dict[str, str]
    starts_again: Callable[[int], bool]


def image_entrypoint() -> list[str]:
    text = (DEPLOYMENT / "Dockerfile").read_text(encoding="utf-8")
    (found,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    return yaml.safe_load(found)


def static(container: Document) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def kubernetes() -> Starter:
    job = one(documents("kubernetes.yaml"), "Job")["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert "command" not in container  # or the image's entry point would not count
    return Starter(
        image_entrypoint(),
        container["args"],
        static(container),
        lambda status: after_exit(job, status) != "FailJob",
    )


def kubeflow() -> Starter:
    found = documents("kubeflow.yaml")
    trainer = one(found, "TrainJob")["spec"]["trainer"]
    runtime = one(found, "TrainingRuntime")["spec"]["template"]["spec"]
    (replicated,) = runtime["replicatedJobs"]
    refused = runtime["failurePolicy"]["rules"][0]
    assert refused["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert refused["action"] == "FailJobSet"
    given = {  # what Kubeflow sets
        **{"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "1"},
        **{"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_ports(1)[0])},
    }
    return Starter(
        trainer["command"],
        trainer["args"],
        {**static(trainer), **given},
        lambda status: after_exit(replicated["template"]["spec"], status) != "FailJob",
    )


def compose() -> Starter:
    (found,) = documents("docker-compose.yaml")
    node = found["services"]["node0"]
    return Starter(
        node["entrypoint"],
        [word.replace("${DATA:-synthetic}", "synthetic") for word in node["command"]],
        node["environment"],
        lambda status: node["restart"] != "no",  # again.sh does it, within the container
    )


def unit() -> dict[str, list[str]]:
    """The settings of the unit's [Service] section; a name may come several times."""
    values = {
        **{"user": "nobody", "config": "configs/resnet50_imagenet.yaml", "stop_seconds": "110"},
        **{"data": "/shared/imagenet", "epochs": "7", "save_every": "11"},
    }
    text = re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], UNIT.read_text(encoding="utf-8"))
    settings: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", text.partition("[Service]")[2], re.MULTILINE):
        settings.setdefault(name, []).append(value)
    return settings


def environment_file(cloud: str) -> dict[str, str]:
    """What a cloud's cloud-init writes to /etc/training.env, with this machine's values."""
    text = (DEPLOYMENT / "terraform" / cloud / "cloud-init.yaml.tftpl").read_text(encoding="utf-8")
    block = text.partition("/etc/training.env")[2].partition("- path:")[0]
    return dict(re.findall(r"^ +([A-Z_]+)=(.*)$", block, re.MULTILINE))


def systemd() -> Starter:
    """systemd.service(5): Restart=on-failure, and the three lists of exit statuses."""
    settings = unit()
    lists = {
        name: set(map(int, " ".join(settings.get(name, [])).split()))
        for name in ("SuccessExitStatus", "RestartForceExitStatus", "RestartPreventExitStatus")
    }

    def starts_again(status: int) -> bool:
        if status in lists["RestartPreventExitStatus"]:
            return False
        if status in lists["RestartForceExitStatus"]:
            return True
        failed = status != 0 and status not in lists["SuccessExitStatus"]
        return settings["Restart"] == ["on-failure"] and failed

    words = shlex.split(settings["ExecStart"][0])
    program = [words[0].replace("/opt/trainer", str(root()))]
    return Starter(program, words[1:], environment_file("."), starts_again)


def slurm(folder: Path) -> Starter:
    """The job's script, with stand-ins for SLURM's commands in ``folder``."""
    for name, text in STAND_INS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (folder / name).chmod(stat.S_IRWXU)
    requeued = folder / "requeued"
    environment = {
        **{"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1"},
        **{"SLURM_CPUS_ON_NODE": "1", "MASTER_PORT": str(free_ports(1)[0])},
        **{"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "REQUEUED": str(requeued)},
    }
    arguments = ["--config", "configs/resnet50_imagenet.yaml", "--data", "/datasets/imagenet"]
    arguments += ["--checkpoints", "/shared/checkpoints", "--logs", "/shared/logs"]
    program = ["bash", str(DEPLOYMENT / "slurm.sbatch")]
    return Starter(program, arguments, environment, lambda status: requeued.exists())


def alone(environment: dict[str, str]) -> dict[str, str]:
    """This process's environment with a starter's, for one rank on this machine alone."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if name not in launcher_variables() and not name.startswith(("PET_", "SLURM_"))
    }
    theirs = {name: value for name, value in environment.items() if "${" not in value}
    if "MASTER_ADDR" in theirs:  # names of other machines
        theirs = {name: value for name, value in theirs.items() if not name.startswith("MASTER_")}
    one_rank = {"NNODES": "1", "NODE_RANK": "0", "NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
    return {**ours, **theirs, **one_rank}
