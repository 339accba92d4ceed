"""Interrupted and resumed is uninterrupted: killed ranks and agents, preemption, other worlds."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distlab.host.system import tells_of_processes
from solutions.phase4_production.exit_codes import PREEMPTED, REFUSED
from solutions.phase4_production.trainer_config import Config
from tests.at_exit.expected import environment, no_threads_left
from tests.forked_agents import processes_of, ranks_of, start
from tests.phase4.image_runs import (
    config_of,
    few_digits,
    fields_of,
    loss_curve,
    losses,
    records,
    train,
)
from tests.phase4.launches import ended, launched, new, said_in, wait_for

INTERRUPTED = {
    "ddp": ["--ema-decay=0.9", "--mixup=0.2"],
    "zero2": ["--strategy=zero2", "--optimizer=adamw", "--base-lr=0.002"],
    "fsdp": ["--strategy=fsdp", "--ema-decay=0.9"],
    "PowerSGD": ["--compression=powersgd"],
    "Top-K": ["--compression=topk", "--compression-ratio=0.05"],
    "fp16": ["--precision=fp16"],
    "torch zero1": ["--parallel=torch", "--strategy=zero1"],
    "torch fsdp": ["--parallel=torch", "--strategy=fsdp", "--max-norm=1"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return few_digits(tmp_path_factory.mktemp("digits"))


@pytest.mark.verdict
@pytest.mark.parametrize("arguments", INTERRUPTED.values(), ids=INTERRUPTED)
def test_resumed_is_uninterrupted_to_the_bit(
    data: Path, tmp_path: Path, arguments: list[str]
) -> None:
    """Nine steps, and again with a stop after the fifth; loss and evaluation are the same bits."""
    whole = config_of(data, tmp_path / "whole", "--epochs=2", "--max-steps=9", *arguments)
    parts = config_of(data, tmp_path / "parts", "--epochs=2", "--max-steps=5", *arguments)
    want = losses(whole)
    assert len(losses(parts)) == 5
    done = train(config_of(data, tmp_path / "parts", "--epochs=2", "--max-steps=9", *arguments))
    assert "resumed after step 5" in done["output"]
    assert loss_curve(parts) == want
    ends = [[r["top1"], r["val_loss"]] for c in (whole, parts) for r in records(c) if "top1" in r]
    assert ends[: len(ends) // 2] == ends[len(ends) // 2 :]


@pytest.mark.parametrize("arguments", [[], ["--strategy=fsdp"]], ids=["ddp", "fsdp"])
def test_goes_on_with_other_numbers_of_ranks(
    data: Path, tmp_path: Path, arguments: list[str]
) -> None:
    """Saved by 2, resumed by 3 and then by 1: the curve of one process, up to rounding."""
    want = losses(config_of(data, tmp_path / "whole", *arguments), 1)
    for world_size, steps in ((2, 2), (3, 4), (1, 6)):
        parts = config_of(data, tmp_path / "parts", f"--max-steps={steps}", *arguments)
        assert train(parts, world_size)["complete"]
    assert loss_curve(parts) == pytest.approx(want, rel=2e-4)


def test_compressors_hand_on_what_is_owed_to_fewer_ranks(data: Path, tmp_path: Path) -> None:
    arguments = ["--compression=topk", "--compression-ratio=0.05"]
    assert train(config_of(data, tmp_path, "--max-steps=3", *arguments), 3)["complete"]
    for world_size, steps in ((2, 4), (3, 6)):
        config = config_of(data, tmp_path, f"--max-steps={steps}", *arguments)
        assert train(config, world_size)["complete"]
    assert len(records(config)) == 6


# -- processes of a launcher -----------------------------------------------------------------------
ENDLESS = ["--epochs=1000", "--warmup-epochs=3", "--save-every=4", "--workers=1"]
KILLED = [*ENDLESS, "--mixup=0.2", "--ema-decay=0.9"]
MORE = 4  # steps of the last life


def recorded(config: Config, step: int) -> Callable[[], bool]:
    """Whether ``step`` was recorded."""

    def condition() -> bool:
        path = Path(config.logs) / "metrics.jsonl"
        return path.exists() and f'"step": {step},' in path.read_text(encoding="utf-8")

    return condition


@pytest.mark.skipif(not tells_of_processes(), reason="no /proc that lists an agent's ranks")
def test_a_run_is_killed_refused_told_to_leave_and_comes_to_its_end(
    data: Path, tmp_path: Path
) -> None:
    """kill -9 of a rank: the agent goes on. Of the agent: all end. SIGTERM: all save. At the end
    it is the curve of a calm run, and nobody else could save into the folder meanwhile."""
    config, log = config_of(data, tmp_path / "killed", *KILLED), tmp_path / "output"
    agents = tmp_path / "agents"
    with launched(config, log, agents, 4, NPROC_PER_NODE="2") as process:
        wait_for(recorded(config, 6))
        os.kill(ranks_of(process.pid, log)[1], signal.SIGKILL)  # the agent starts both again
        wait_for(lambda: log.read_text().count("resumed after step") == 1)
        wait_for(recorded(config, 10))
        ranks, second = ranks_of(process.pid, log), tmp_path / "second"

        def stopped_beside_a_loader() -> bool:
            """All ranks are stopped, and not between two epochs: a loader's process is alive."""
            for rank in ranks:
                os.kill(rank, signal.SIGSTOP)
            if len(processes_of(log)) > len([process.pid, *ranks]):
                return True
            for rank in ranks:
                os.kill(rank, signal.SIGCONT)
            return False

        wait_for(stopped_beside_a_loader)  # what the lock tells of the holder comes from it alone
        with launched(config, second, agents, 1, NPROC_PER_NODE="1") as other:
            assert other.wait(150) == REFUSED, second.read_text()
        line = rf"imagenet_trainer: \S+/checkpoints is in use by process {ranks[0]} on .*"
        said = said_in(second)
        assert len(said) == 1
        assert re.fullmatch(line, said[0])
        process.kill()
        process.wait()
        wait_for(lambda: not processes_of(log))  # and their loaders' processes
    crashed = len(log.read_text())
    with launched(config, log, agents, 2, NPROC_PER_NODE="2") as process:
        wait_for(lambda: log.read_text().count("resumed after step") == 2)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(100) == PREEMPTED, log.read_text()
        said = log.read_text().splitlines()[-1]
        left = re.fullmatch(r"imagenet_trainer: told to leave: saved after step (\d+), .*", said)
        assert left
        assert not processes_of(log)
    assert not (tmp_path / "killed" / "checkpoints" / "LOCK").exists()
    assert log.read_text().count("took over") == 2
    steps = int(left[1]) + MORE
    calm, config = (
        config_of(data, tmp_path / name, *KILLED, f"--max-steps={steps}")
        for name in ("calm", "killed")
    )
    last = train(config)
    assert last["complete"]
    assert f"resumed after step {left[1]}, " in last["output"]
    assert "took over" not in last["output"]
    assert "Traceback" not in log.read_text()[crashed:] + last["output"]
    assert loss_curve(config) == losses(calm)
    assert [r["step"] for r in records(config)] == list(range(steps))


def test_two_nodes_on_one_host(data: Path, tmp_path: Path) -> None:
    """An agent per node by NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT; sums node by node.

    On the first node all processes are new ones.
    """
    config = config_of(data, tmp_path, "--pattern=hierarchical", "--max-steps=2")
    environ = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(free_port()), "MAX_RESTARTS": "0"}
    environ |= environment(tmp_path / "ends")
    command, log = ["./launch_training.sh", *fields_of(config)], tmp_path / "output"
    with (
        new(command, log, **environ, NODE_RANK="0") as first,
        launched(config, log, tmp_path / "agents", 1, **environ, NODE_RANK="1") as second,
    ):
        assert [first.wait(150), second.wait(150)] == [0, 0], log.read_text()
    no_threads_left(tmp_path / "ends", 2)
    assert "Exception ignored" not in log.read_text(), "the loaders' processes end quietly"
    assert len(records(config)) == 2
    assert records(config)[-1]["ranks"] == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_preempted_run_saves_first(data: Path, tmp_path: Path, number: signal.Signals) -> None:
    """The signal comes to all processes of the job, those that decode images too."""
    config = config_of(data, tmp_path, *ENDLESS, "--save-every=0")
    environ = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    program = "solutions.phase4_production.imagenet_trainer"
    command, log = [sys.executable, "-m", program, *fields_of(config)], tmp_path / "output"
    process = start(command, log, os.environ | environ)
    with ended(process, log):
        wait_for(recorded(config, 3))
        os.killpg(process.pid, number)
        assert process.wait(60) == PREEMPTED, log.read_text()
    assert log.read_text().splitlines()[-1].startswith("imagenet_trainer: told to leave: saved")
    last = records(config)[-1]["step"]
    assert [int(p.parent.name[-8:]) for p in tmp_path.rglob("COMPLETE")] == [last + 1]


def free_port() -> int:
    """A port on which no process listens."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]
