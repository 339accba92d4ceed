"""A SLURM cluster of virtual nodes on one machine, to try ``slurm.sbatch`` without a cluster.

    python -m solutions.phase4_production.deployment.slurm_cluster start /tmp/slurm
    export SLURM_CONF=/tmp/slurm/slurm.conf
    sbatch …; squeue; scontrol show job 1
    python -m solutions.phase4_production.deployment.slurm_cluster stop /tmp/slurm

The scheduler is the real one. There are munged (authentication), one slurmctld (the controller) and
one slurmd per node, each with a name and a port of its own on the loopback interface. All of their
files are in one private folder, and no service is registered. On Debian and Ubuntu: ``apt install
slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins``.

Two things differ from a cluster. The nodes share the machine's cores, memory and file system. The
GPUs are null devices: jobs may ask for them and see CUDA_VISIBLE_DEVICES, but not compute.
Settings: manual pages slurm.conf(5), gres.conf(5), munged(8).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
PACKAGES = "slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins"
NULL_DEVICE = os.makedev(1, 3)
PATIENCE = 30.0  # seconds until the cluster must be up, or gone

CONFIGURATION = """\
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdTimeout=10
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1
GresTypes=gpu
NodeName=node[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] \
CPUs=4 RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def obstacle() -> str | None:
    """Why no virtual cluster can run here, in one sentence; None if one can."""
    if not Path("/proc/self/stat").exists():
        return "a virtual SLURM cluster needs /proc, and this system has none (Linux has)"
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if missing:
        return f"a virtual SLURM cluster needs {', '.join(missing)} (apt install {PACKAGES})"
    if os.geteuid() != 0:
        return "a virtual SLURM cluster needs root: slurmd starts jobs as their user"
    return None


def start(folder: Path, nodes: int = 4, gpus: int = 2) -> dict[str, str]:
    """Start a cluster of ``nodes`` nodes, each with 4 CPUs and ``gpus`` GPUs, in ``folder``.

    Returns the environment for SLURM's commands. ``folder`` must not exist; its path must be short
    (at most 60 characters: sockets are made in it). Raises RuntimeError with the logs if the
    cluster does not come up; nothing is left then.
    """
    why = obstacle()
    if why is not None:
        raise RuntimeError(why)
    folder = folder.absolute()
    if len(str(folder)) > 60:
        raise ValueError(f"the folder's path has {len(str(folder))} characters, at most 60 work")
    folder.mkdir(parents=True, mode=0o755)
    environment = environment_of(folder)
    try:
        _configure(folder, nodes, gpus)
        _munged(folder)
        _call(["slurmctld", "-c"], environment)
        for node in range(1, nodes + 1):
            _call(["slurmd", "-N", f"node{node}"], environment)
        _wait_for_nodes(nodes, environment)
    except BaseException as error:
        logs = "\n".join(_tail(file) for file in sorted(folder.glob("*.log")))
        stop(folder)
        if isinstance(error, subprocess.SubprocessError):
            raise RuntimeError(f"the cluster did not come up: {error}\n{logs}") from error
        raise
    return environment


def stop(folder: Path) -> None:
    """End every process of the cluster in ``folder``, its jobs' included, and delete the folder."""
    folder = folder.absolute()
    deadline = time.monotonic() + PATIENCE
    while processes := _processes(folder):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {processes} of the cluster in {folder} do not end")
        for process in processes:
            _kill(process)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def fail_node(folder: Path, node: str) -> None:
    """Play the failure of a node: its daemon and all processes that it started are gone at once."""
    tasks = _processes(folder, f"SLURMD_NODENAME={node}")
    stewards = {parent for task in tasks if (parent := _parent(task)) is not None}
    daemon = int((folder / f"{node}.pid").read_text())
    for process in [daemon, *stewards, *tasks]:
        _kill(process)


def environment_of(folder: Path) -> dict[str, str]:
    """The environment in which SLURM's commands find the cluster in ``folder``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return {**kept, "PATH": _path(), "SLURM_CONF": str(folder.absolute() / "slurm.conf")}


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _configure(folder: Path, nodes: int, gpus: int) -> None:
    """Write slurm.conf and gres.conf; make the devices that play GPUs."""
    controller_port, *ports = free_ports(nodes + 1)
    text = CONFIGURATION.format(
        host=socket.gethostname().split(".")[0],
        folder=folder,
        nodes=nodes,
        gpus=gpus,
        controller_port=controller_port,
        ports=",".join(map(str, ports)),
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()
    devices = folder / "gpu"
    devices.mkdir()
    for gpu in range(gpus):
        os.mknod(devices / str(gpu), 0o666 | stat.S_IFCHR, NULL_DEVICE)
    files = f"{devices}/[0-{gpus - 1}]"
    declared = f"NodeName=node[1-{nodes}] Name=gpu File={files}\n" if gpus else ""
    (folder / "gres.conf").write_text(declared)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _munged(folder: Path) -> None:
    """Start the daemon that signs the cluster's messages, with a key of its own."""
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={folder}/munge.{ending}" for option, ending in files.items()]
    _call(["munged", "--force", f"--key-file={key}", *options], environment_of(folder))


def _call(command: list[str], environment: dict[str, str]) -> str:
    """Run a command to its end (daemons detach themselves); what it printed."""
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if done.returncode:
        raise subprocess.SubprocessError(f"{command[0]}: {done.stdout.strip()}")
    return done.stdout


def _wait_for_nodes(nodes: int, environment: dict[str, str]) -> None:
    """Until all nodes are idle: the controller answers and every slurmd has registered."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            states = _call(["sinfo", "--noheader", "--Node", "--format=%T"], environment).split()
        except subprocess.SubprocessError:  # the controller does not listen yet
            states = []
        if states == ["idle"] * nodes:
            return
        time.sleep(0.1)
    raise subprocess.SubprocessError(f"after {PATIENCE:.0f} s the nodes are {states}")


def _processes(folder: Path, *marks: str) -> list[int]:
    """The cluster's processes: those whose environment names its configuration, and the marks."""
    wanted = {f"SLURM_CONF={folder.absolute()}/slurm.conf".encode(), *map(str.encode, marks)}
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):  # it ended meanwhile
            if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    return found


def _parent(process: int) -> int | None:
    """The slurmstepd that started this task; None if something else did."""
    with suppress(OSError):
        status = Path(f"/proc/{process}/stat").read_text()
        parent = int(status.rpartition(")")[2].split()[1])
        if Path(f"/proc/{parent}/comm").read_text().strip() == "slurmstepd":
            return parent
    return None


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _tail(file: Path, lines: int = 20) -> str:
    return "\n".join([f"{file.name}:", *file.read_text(errors="replace").splitlines()[-lines:]])


def main() -> None:
    """The command: start or stop a cluster."""
    parser = argparse.ArgumentParser(description="A SLURM cluster of virtual nodes.")
    parser.add_argument("action", choices=("start", "stop"))
    parser.add_argument("folder", type=Path, help="the cluster's own; made by start")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=2, help="of each node")
    options = parser.parse_args()
    if options.action == "stop":
        stop(options.folder)
        return
    try:
        start(options.folder, options.nodes, options.gpus)
    except (RuntimeError, ValueError, FileExistsError) as error:
        sys.exit(f"slurm_cluster: {error}")
    print(f"{options.nodes} nodes are up: export SLURM_CONF={options.folder.absolute()}/slurm.conf")


if __name__ == "__main__":
    main()
