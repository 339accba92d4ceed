"""Ranks agree on devices and backend, whatever each of them is shown; GPUs are faked lists."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.ranks import RankContext, run_ranks
from given import devices
from given.devices import choose, place
from solutions.phase2_advanced import train_gpt

FOUR = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
CPU = "4 ranks on the CPU, backend gloo"
NCCL = "4 ranks, 4 GPUs, backend nccl"
NEEDED = "4 ranks, 1 GPU: point-to-point needs a GPU per rank"
PLACED = {  # what each rank is shown; asked for, with messages?; devices and backend, or a refusal
    "torchrun": ([FOUR] * 4, "auto", True, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"], NCCL),
    "one each": ([[gpu] for gpu in FOUR], "cuda", True, ["cuda:0"] * 4, NCCL),
    "two nodes": (
        [FOUR[:2], FOUR[:2], FOUR[2:], FOUR[2:]],
        "auto",
        True,
        ["cuda:0", "cuda:1", "cuda:0", "cuda:1"],
        NCCL,
    ),
    "one for all": (
        [FOUR[:1]] * 4,
        "auto",
        False,
        ["cuda:0"] * 4,
        "4 ranks, 1 GPU, backend gloo (NCCL takes a GPU per rank)",
    ),
    "one for all, messages": ([FOUR[:1]] * 4, "auto", True, ["cpu"] * 4, f"{CPU} ({NEEDED})"),
    "refused": ([FOUR[:1]] * 4, "cuda", True, None, f"{NEEDED}; use --device cpu"),
    "a node without": (
        [FOUR[:2], FOUR[:2], [], []],
        "auto",
        False,
        ["cpu"] * 4,
        f"{CPU} (4 ranks, 2 GPUs: rank 2 has none)",
    ),
    "refused without": (
        [FOUR[:2], FOUR[:2], [], []],
        "cuda",
        False,
        None,
        "4 ranks, 2 GPUs: rank 2 has none; use --device cpu",
    ),
    "none": ([[]] * 4, "auto", True, ["cpu"] * 4, CPU),
    "not wanted": ([FOUR] * 4, "cpu", True, ["cpu"] * 4, CPU),
}


def pretend(gpus: Sequence[str]) -> None:
    """This process is shown these GPUs."""
    devices.visible_gpus = lambda: [*gpus]
    torch.cuda.set_device = lambda number: None


@pytest.mark.parametrize("case", PLACED)
def test_all_ranks_come_to_the_same(case: str, tmp_path: Path) -> None:
    shown, wanted, messages, want, text = PLACED[case]

    def body(ctx: RankContext) -> tuple[str, str, str, dict]:
        pretend(shown[ctx.rank])
        os.environ["LOCAL_RANK"] = str(ctx.rank % 2 if case == "two nodes" else ctx.rank)
        store = dist.FileStore(str(tmp_path / "store"), 4)
        try:
            found = place(wanted, store, ctx.rank, 4, point_to_point=messages)
        except ValueError as error:
            return "", "", str(error), {}
        return (
            str(found.device),
            found.backend,
            found.text,
            {k: str(v) for k, v in found.settings.items()},
        )

    for rank, (device, backend, said, settings) in enumerate(
        run_ranks(body, 4, process_group=False, ledger=False)
    ):
        assert said == text
        if want is not None:
            assert device == want[rank]
            assert backend == ("nccl" if text == NCCL else "gloo")
            bound = {"device_id": device} if backend == "nccl" else {}
            assert settings == {"backend": backend, **bound}


def test_ranks_that_are_to_use_different_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="different devices: cpu, cuda"):
        choose(["cuda", "cpu"], ["GPU-a", "GPU-b"], False)


def test_one_rank_is_no_crowd() -> None:
    assert choose(["auto"], ["GPU-a"], True) == ("cuda", "nccl", "1 rank, 1 GPU, backend nccl")
    assert choose(["cpu"], [""], True)[2] == "1 rank on the CPU, backend gloo"


SERVER = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""


@pytest.fixture
def port() -> Iterator[str]:
    """A store of another process, as torchrun's: ranks that are forked beside a server's thread can
    inherit a lock that it holds."""
    command, pipe = [sys.executable, "-c", SERVER], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.communicate("\n")


def test_a_program_refuses_in_one_line(port: str) -> None:
    def body(ctx: RankContext) -> int:
        pretend(FOUR[:1])
        os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        sys.argv = ["train_gpt", "--pipeline=4", "--device=cuda"]
        try:
            train_gpt.main()
        except SystemExit as end:
            return end.code
        return 0

    done = run_ranks(body, 4, process_group=False, ledger=False, timeout=60)
    assert list(done) == [1] * 4
    assert "".join(done.output) == f"train_gpt: {NEEDED}; use --device cpu\n"
