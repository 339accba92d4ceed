"""A cluster on one machine: real links, torchrun on every node, and nothing left afterwards."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab import cli
from distlab.course.catalogue import root
from distlab.netcluster import (
    ClusterUnavailable,
    Network,
    Run,
    bytes_sent,
    cluster_obstacle,
    launch,
    network,
    run_cluster,
)
from distlab.ranks import RankContext, RankFailure, run_ranks

OBSTACLE = cluster_obstacle()
NAMESPACES = Path("/proc/self/ns/net")
needs_cluster = pytest.mark.skipif(OBSTACLE is not None, reason=f"needs a cluster: {OBSTACLE}")

SUM = """
import json, os, socket, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
mine = {"host": socket.gethostname(), "namespace": os.readlink("/proc/self/ns/net")}
mine |= {name: int(os.environ[name]) for name in ("GROUP_RANK", "LOCAL_RANK", "RANK")}
every = [None] * dist.get_world_size()
dist.all_gather_object(every, mine)
x = torch.full((1_000_000,), float(dist.get_rank()))
begun = time.perf_counter()
dist.all_reduce(x)
if dist.get_rank() == 0:
    print("working ...", end="\\r")
    print(json.dumps({"sum": x[0].item(), "ranks": every, "seconds": time.perf_counter() - begun}))
dist.destroy_process_group()
"""
LINGER = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
print("namespace", os.readlink("/proc/self/ns/net"), flush=True)
if os.environ["GROUP_RANK"] == sys.argv[1]:
    sys.exit(7)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def script(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(text)
        return str(path)

    return write


def left_of(folder: Path) -> list[str]:
    """Processes whose command line names something in ``folder``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


def alive(namespace: str) -> bool:
    """Whether a process of this machine still is in the network namespace."""
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            if os.readlink(path) == namespace:
                return True
        except OSError:
            continue
    return False


def gone(folder: Path, namespaces: set[str], within: float = 2.0) -> None:
    """Fail unless all processes and namespaces of a run have gone, at once or very soon."""
    end = time.monotonic() + within
    while left_of(folder) or any(map(alive, namespaces)):
        assert time.monotonic() < end, (left_of(folder), namespaces)
        time.sleep(0.02)
    assert not [name for name in network_names() if name.startswith(("port", "switch"))]


def network_names() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def namespaces_in(text: str) -> set[str]:
    return {line.split()[-1] for line in text.splitlines() if "namespace net:" in line}


# -- torchrun on every node -----------------------------------------------------------------------
@needs_cluster
def test_nodes_meet_over_the_link(script, tmp_path: Path) -> None:
    lines: list[tuple[str, bytes]] = []
    command = ["python", script(SUM)]
    run = run_cluster(
        command,
        nodes=2,
        ranks_per_node=(2, 1),
        rate="100mbit",
        write=lambda *said: lines.append(said),
        timeout=60,
    )
    assert run.status == 0, run.stderr
    assert run.result["sum"] == 3.0
    ranks = run.result["ranks"]
    assert [r["host"] for r in ranks] == ["node0", "node0", "node1"]
    assert [(r["GROUP_RANK"], r["LOCAL_RANK"], r["RANK"]) for r in ranks] == [
        (0, 0, 0), (0, 1, 1), (1, 0, 2)
    ]  # fmt: skip
    namespaces = {r["namespace"] for r in ranks}
    assert len(namespaces) == 2
    nbytes = 2 * 2 / 3 * 4e6  # of a ring over 3 ranks, which crosses once each way
    assert all(nbytes <= sent <= 1.05 * nbytes + 1e5 for sent in run.sent)
    assert run.result["seconds"] > 0.5 * nbytes * 8 / 100e6
    assert ("stdout", b"node0 | working ...\r") in lines
    assert b"Traceback" not in b"".join(line for _, line in lines)
    gone(tmp_path, namespaces)


@needs_cluster
@pytest.mark.parametrize("fails_on", ["0", "1"])
def test_failure_is_the_jobs_and_ends_the_other_nodes(
    script, tmp_path: Path, fails_on: str
) -> None:
    begun = time.monotonic()
    command = ["python", script(LINGER), fails_on, "600"]
    run = run_cluster(command, ranks_per_node=1, timeout=60)
    assert run.status == 7
    assert "exitcode  : 7" in run.stderr
    assert time.monotonic() - begun < 30
    assert len(namespaces_in(run.stdout)) == 2
    gone(tmp_path, namespaces_in(run.stdout))


@needs_cluster
def test_time_out_ends_all(script, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="still running after 2 s"):
        run_cluster([script(LINGER), "-", "600"], nodes=1, ranks_per_node=1, timeout=2)
    gone(tmp_path, set())


@needs_cluster
def test_two_clusters_side_by_side_and_their_end(
    script, tmp_path: Path, interruptible: None
) -> None:
    """Ctrl-C ends one, SIGKILL of the command the other: nothing stays."""
    command = [sys.executable, "-m", "distlab", "cluster", "run", "--nodes", "1"]
    command += ["--ranks-per-node", "1", "--", "python", script(LINGER), "-", "600"]
    both = [
        subprocess.Popen(
            command,
            cwd=root(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for _ in range(2)
    ]
    said = [job.stdout.readline() for job in both]
    spaces = [namespaces_in(line) for line in said]
    assert len(spaces[0] | spaces[1]) == 2, said
    os.killpg(both[0].pid, signal.SIGINT)
    rest = both[0].stdout.read()
    assert both[0].wait(60) == 130
    assert rest.strip() == "distlab: interrupted, everything on the nodes has ended"
    assert not any(map(alive, spaces[0]))
    assert all(map(alive, spaces[1]))
    both[1].kill()
    both[1].wait()
    gone(tmp_path, spaces[0] | spaces[1], within=3.0)
    for job in both:
        job.stdout.close()


def test_command_lines() -> None:
    def program(*command: str) -> list[str]:
        line = launch.torchrun(command, [2, 3], 1, "10.77.0.1")
        assert {"--nnodes=2", "--node-rank=1", "--nproc-per-node=3"} < set(line)
        return line[line.index("--no-python") + 1 :]

    python = sys.executable
    assert program("python", "-m", "my.module", "-x") == [python, "-m", "my.module", "-x"]
    assert program("train.py", "5") == [python, "train.py", "5"]
    assert program("/usr/bin/env", "python") == ["/usr/bin/env", "python"]


def test_result_is_the_last_json_line() -> None:
    assert Run(0, 'x\n{"a": 1}\n{"a": 2}\nbye', "", []).result == {"a": 2}
    with pytest.raises(ValueError, match=r"status 3.*no JSON"):
        _ = Run(3, "nothing", "it broke", []).result


# -- what can't be --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0"], "a cluster has 1 to 64 nodes, not 0"),
        (["--rate", "fast"], "the rate must be like 200mbit, 1gbit or 512kbit, not 'fast'"),
        (["--rate", "0mbit"], "the rate must be like"),
        (["--delay", "1"], "the delay must be like 1ms"),
        (["--ranks-per-node", "two"], "--ranks-per-node: 2 or 3,1, not 'two'"),
        (["--ranks-per-node", "0"], "a node has at least 1 rank, not 0"),
        (["--ranks-per-node", "1,2,3"], "given for 3 nodes, there are 2"),
    ],
)
def test_wrong_options_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["cluster", "run", *arguments, "--", "python", "x.py"]) == 2
    assert message in capsys.readouterr().err


def test_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cluster", "run", "--", "python"]) == 2
    assert "there is nothing to run" in capsys.readouterr().err


@pytest.fixture
def unknown_machine() -> Iterator[None]:
    """What was found out about this machine is forgotten, before and after."""
    for cached in (network._privilege, network.cluster_obstacle):
        cached.cache_clear()
    yield
    for cached in (network._privilege, network.cluster_obstacle):
        cached.cache_clear()


@pytest.mark.usefixtures("unknown_machine")
def test_other_systems_say_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(network.system, "PROC", tmp_path)
    assert cluster_obstacle() == "a cluster on one machine needs network namespaces (Linux's)"
    assert cli.main(["cluster", "run", "--", "python", "x.py"]) == 2
    assert capsys.readouterr().err == f"distlab: {cluster_obstacle()}\n"


@pytest.mark.usefixtures("unknown_machine")
@pytest.mark.skipif(not NAMESPACES.exists(), reason="needs network namespaces (Linux's)")
def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    which = network.shutil.which
    find = lambda name, path: None if name == "tc" else which(name, path=path) or f"/bin/{name}"
    monkeypatch.setattr(network.shutil, "which", find)
    assert cluster_obstacle() == "`tc` is not installed (package iproute2)"


@pytest.mark.usefixtures("unknown_machine")
@pytest.mark.skipif(not NAMESPACES.exists(), reason="needs network namespaces (Linux's)")
def test_missing_permission_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in network.PACKAGES:
        tool = tmp_path / name
        tool.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
        tool.chmod(0o755)
    monkeypatch.setattr(network, "_environment", lambda: {"PATH": str(tmp_path)})
    why = cluster_obstacle()
    assert why is not None
    assert why.startswith("no permission to make network namespaces (unshare failed: Operation")
    assert "\n" not in why


def test_links_with_delay() -> None:
    """The delay goes on top of the rate, once each way; a kernel that can't is told in one line."""
    egress, ingress = network.shaping("1gbit", "2ms")
    assert egress[0].endswith("root handle 1: netem delay 2ms limit 100000")
    assert "parent 1:1 handle 10: tbf rate 1gbit" in egress[1]
    assert "netem" not in ingress[0]
    assert network.shaping(None, None) == ([], [])
    if OBSTACLE is None and (why := cluster_obstacle(delay=True)) is not None:
        assert why.startswith("this kernel has no netem, which a delay needs")
        assert "\n" not in why


@pytest.mark.skipif(
    cluster_obstacle(delay=True) is not None, reason=f"needs {cluster_obstacle(delay=True)}"
)
def test_delay_takes_its_time() -> None:
    def body(ctx: RankContext) -> float:
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(5):
            dist.send(torch.ones(1), 1) if ctx.rank == 0 else dist.recv(torch.ones(1), 0)
            dist.recv(torch.ones(1), 1) if ctx.rank == 0 else dist.send(torch.ones(1), 0)
        return time.perf_counter() - begun

    with Network(2, delay="20ms") as net:
        assert min(run_ranks(body, 2, enter=net.placement((0, 1)))) > 5 * 0.04


# -- forked ranks on nodes ------------------------------------------------------------------------
@needs_cluster
@pytest.mark.parametrize("flags", [(), ("--user", "--map-root-user")], ids=["plain", "own user"])
def test_forked_ranks_move_to_nodes(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if flags == () and os.geteuid() != 0:
        pytest.skip("needs root")
    monkeypatch.setattr(network, "_privilege", lambda: flags)

    def body(ctx: RankContext) -> list[object]:
        dist.all_reduce(torch.ones(1))
        dist.barrier()
        before = bytes_sent()
        dist.all_reduce(torch.ones(250_000))
        dist.barrier()
        names = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME")
        return [bytes_sent() - before, socket.gethostname(), *map(os.environ.get, names)]

    try:
        with Network(3, rate="1gbit") as net:
            results = run_ranks(body, 4, enter=net.placement((0, 2, 0, 1)))
            assert results[0][0] <= net.bytes_sent()[0]
    except ClusterUnavailable as why:
        pytest.skip(f"needs namespaces of users: {why}")
    assert [r[1:5] for r in results] == [
        ["node0", "0", "0", "2"],
        ["node2", "2", "0", "1"],
        ["node0", "0", "1", "2"],
        ["node1", "1", "0", "1"],
    ]
    ring = 2 * 3 / 4 * 1e6  # bytes that each rank sends to the next one, which is elsewhere
    for rank, crossings in enumerate((2, 1, 2, 1)):
        assert 0.9 * ring <= results[rank][0] / crossings <= 1.1 * ring


@needs_cluster
def test_ranks_die_with_their_run_on_a_node() -> None:
    def body(ctx: RankContext) -> None:
        if ctx.rank == 0:
            time.sleep(600)
        raise ValueError(os.readlink("/proc/self/ns/net"))

    with Network(1) as net:
        with pytest.raises(RankFailure) as caught:
            run_ranks(body, 2, enter=net.placement((0, 0)), process_group=False, ledger=False)
        name = next(word for word in caught.value.message.split() if word.startswith("net:"))
        assert not alive(name)


def test_no_bytes_are_counted_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "INTERFACE", "none")
    if not Path("/proc/self/net/dev").exists():
        pytest.skip("no /proc that counts bytes")
    with pytest.raises(ClusterUnavailable, match="on no node of a cluster"):
        bytes_sent()
