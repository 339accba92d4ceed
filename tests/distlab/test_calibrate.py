"""``distlab calibrate``: what it measures, what its files say, and what a simulation makes of them.

No test knows how fast a machine is: times are planted, or compared with a planted slowness.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks import predictions_page, this_machine, validation
from distlab.cli import main
from distlab.course.catalogue import root
from distlab.hardware.clusters import KINDS, load_cluster, numbers
from distlab.hardware.collectives import collective_time
from distlab.hardware.kernels import load_kernels
from distlab.ranks import RankContext
from distlab.simulate import calibrate, calibrate_kernels, calibrate_links
from distlab.simulate.calibrate_file import Machine, Measured, write
from distlab.simulate.calibrate_fit import constants
from distlab.virtual import run_virtual

RATE, BANDWIDTH, HOST = 50e9, 10e9, 3e-6  # of the planted machine
ALPHA, POST, ISSUE, ALONE, MESSAGES = 60e-6, 15e-6, 40e-6, 90e-6, 2e9
SOURCE = "measured by distlab calibrate on a planted core, 2026-01-01, torch 2"


def cached(nbytes: int) -> float:
    """How much faster caches make a kernel: 4 times up to 48 KiB, and 1 at 12 MiB."""
    least, most = math.log2(12 * 4096), math.log2(12 * 4**10)
    return 4 - 3 * max(0.0, (math.log2(nbytes) - least) / (most - least))


def planted_rows() -> list[dict[str, Any]]:
    """Kernels of a machine that follows the formulas to the last digit."""
    rows: list[dict[str, Any]] = [{"kind": "launch", "dtype": "float32", "seconds": HOST}]
    for n in (32, 64, 256, 1024):
        taken = 2 * n**3 / RATE + 0.5 * 12 * n * n / BANDWIDTH
        sizes = {"kind": "matmul", "m": n, "n": n, "k": n, "dtype": "float32"}
        rows.append(sizes | {"seconds": HOST + taken})
    for elements in (4096, 4**10):
        for name, tensors, share in (("add", 3, 0.8), ("add_", 3, 1.0), ("gelu", 2, 0.5)):
            nbytes = tensors * 4 * elements
            taken = nbytes / (share * BANDWIDTH * cached(nbytes))
            row = {"kind": "memory", "name": name, "elements": elements, "dtype": "float32"}
            rows.append(row | {"seconds": HOST + taken})
    for way, work in (("forward", 4), ("backward", 10)):
        for length in (64, 256):
            for causal in (0, 1):
                flops = work * 8 * length**2 * 64 / (2 if causal else 1)
                taken = flops / (0.6 * RATE) * (1 + (200 if causal else 50) / length)
                shape = {"batch": 2, "heads": 4, "length": length, "width": 64, "causal": causal}
                row = {"kind": "attention", "name": way, "dtype": "float32", **shape}
                rows.append(row | {"seconds": HOST + taken})
        sizes = dict(zip(calibrate_kernels.CONVOLUTION_SIZES, (8, 4, 6, 12, 3, 1, 1), strict=True))
        flops = 2 * 8 * 6 * 12**2 * 4 * 9 * (2 if way == "backward" else 1)
        row = {"kind": "convolution", "name": way, "dtype": "float32", **sizes, "channels_last": 0}
        rows.append(row | {"seconds": HOST + flops / (0.25 * RATE)})
    for name in ("fused", "foreach", "for"):
        row = {"kind": "optimizer", "name": f"adamw {name}", "tensors": 2, "elements": 1000}
        rows.append(row | {"dtype": "float32", "seconds": 56_000 / (0.2 * BANDWIDTH)})
    return rows


def planted_links() -> list[dict[str, Any]]:
    """Messages of α + nβ, of which two at once keep the processors busy; linear collectives."""

    def row(kind: str, nbytes: int, seconds: float) -> dict[str, Any]:
        return {"kind": kind, "ranks": 2, "bytes": nbytes, "seconds": seconds}

    rows = [row("post", 4, POST), row("issue", 4, ISSUE)]
    for nbytes in (16, 65_536, 2**22):
        message = ALPHA + nbytes / MESSAGES
        rows.append(row("send", nbytes, 2 * (POST + message)))
        rows.append(row("exchange", nbytes, 2 * POST + message + ALPHA / 2 + nbytes / MESSAGES))
        taken = ISSUE + 200e-6 + nbytes / 1e9
        rows += [row(op, nbytes, taken) for op in calibrate_links.OPERATORS]
    return rows


def planted() -> Measured:
    gpu, kernels = constants(planted_rows())
    machine = Machine(processor="planted", units=2, on_gpu=False, memory=1e9, source=SOURCE)
    found = Measured(machine=machine, gpu=gpu, kernels=kernels, links=planted_links())
    found.alone = ALONE + ISSUE
    found.host = {"forward": 20e-6, "backward": 10e-6, "optimizer": 8e-6, "": 5e-6}
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "planted.yaml"
    write(planted(), path)
    return path


def complete(path: Path) -> None:
    """Every number of both files has a source and a kind."""
    cluster = load_cluster(path)
    kernels = load_kernels(cluster.gpu.kernels)
    for name, value in numbers(cluster):
        if value:
            kept = name if name in cluster.sources else name.split(".")[0]
            assert cluster.sources[kept]
            assert cluster.kinds[kept] in KINDS
    assert all(curve.source for curve in cluster.curves)
    assert {*kernels.sources} == {*kernels.kinds}
    measured = {name for name, kind in cluster.kinds.items() if kind == "measured"}
    assert {"gpu", "inside", "overhead", "company", "collective_overhead"} <= measured
    for told in (cluster, kernels):
        for name, kind in told.kinds.items():
            assert ("distlab calibrate" in told.sources[name]) == (kind == "measured")


# -- what links take -------------------------------------------------------------------------------
def test_a_collective_has_its_mean_and_a_message_its_median(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every third one waits, by a clock that nothing else moves."""
    calls, late, waited = {"all_reduce": 0, "recv": 0}, 0.05, [0.0]

    def slow(name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        calls[name] += 1
        waited[0] += late * (calls[name] % 3 == 0)
        return call(*args, **options)

    monkeypatch.setattr(calibrate_links, "_now", lambda _: waited[0])
    for name in calls:
        monkeypatch.setattr(dist, name, partial(slow, name, getattr(dist, name)))
    kinds = {row["kind"]: row["seconds"] for row in calibrate_links.rows(2, "cpu", True, (16,))}
    assert kinds["all_reduce"] >= late / 5  # one of five rounds, at least
    assert kinds["send"] == 0.0


# -- from times to constants -----------------------------------------------------------------------
def test_constants_of_a_planted_machine_come_out() -> None:
    gpu, kernels = constants(planted_rows())
    product = kernels["product"]["float32"]
    assert product["share"] * gpu["flops"]["float32"] == pytest.approx(RATE, rel=1e-3)
    assert product["traffic"] == pytest.approx(0.5, rel=1e-2)
    assert gpu["bandwidth"] == pytest.approx(BANDWIDTH)
    assert kernels["memory"] == pytest.approx({"other": 0.8, "gelu": 0.5})
    assert list(kernels["cached"].values()) == pytest.approx([4.0, 1.0])
    share = 0.6 * RATE / gpu["flops"]["float32"]
    for way in ("forward", "backward"):
        form = kernels["attention"][way][64]
        assert (form["share"], form["half"], form["half_causal"]) == pytest.approx(
            (share, 50, 200), rel=1e-3
        )
    shares = [row[-1] for row in kernels["convolution"]]
    assert shares == pytest.approx([0.25 * RATE / gpu["flops"]["float32"]] * 2)
    assert kernels["optimizer"] == pytest.approx(dict.fromkeys(("fused", "foreach", "for"), 0.2))
    assert kernels["host"] == HOST


def test_a_slower_kernel_has_a_smaller_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def share() -> float:
        rows = [row for row in planted_rows() if row["kind"] != "memory"]
        for row, run in calibrate_kernels.pointwise(quick=True):
            rows.append(row | {"seconds": calibrate_kernels.seconds(run)})
        return float(constants(rows)[1]["memory"]["gelu"])

    monkeypatch.setattr(calibrate_kernels, "ELEMENTS", (1, 4**9))
    before, gelu = share(), F.gelu

    def slow(x: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            gelu(x)
        return gelu(x)

    monkeypatch.setattr(calibrate_kernels.F, "gelu", slow)
    assert share() < before / 5


def test_kernels_of_an_h100_give_the_constants_that_its_file_has() -> None:
    record = json.loads((root() / "benchmarks/kernels_h100.json").read_text())
    measured = calibrate.of_record(record, 8)
    known, found = load_kernels("h100"), measured.kernels
    node = load_cluster("dgx-h100").gpu
    for dtype in ("bfloat16", "float16"):
        rate = found["product"][dtype]["share"] * measured.gpu["flops"][dtype]
        assert rate == pytest.approx(known.product[dtype].share * node.flops[dtype], rel=0.1)
    for way, forms in known.attention.items():
        for width, form in forms.items():
            rate = found["attention"][way][width]["share"] * measured.gpu["flops"]["float16"]
            assert rate == pytest.approx(form.share * node.flops["bfloat16"], rel=0.12)
    assert found["optimizer"] == pytest.approx(known.optimizer, rel=0.05)
    assert len(found["convolution"]) == len(known.convolution)
    assert not {"phases", "cached"} & {*found}


def test_a_gpu_is_a_cluster_without_processors(tmp_path: Path) -> None:
    record = json.loads((root() / "benchmarks/kernels_h100.json").read_text())
    measured = calibrate.of_record(record, 2)
    measured.links = planted_links()
    cluster, kernels = write(measured, tmp_path / "gpu.yaml")
    complete(tmp_path / "gpu.yaml")
    assert (cluster.processors, cluster.gpus_per_node, cluster.handling) == (0, 2, 0)
    assert kernels.host > 0
    assert "has 2 GPUs, which is fewer than 3 ranks" in cluster.why_not(3)


# -- the files -------------------------------------------------------------------------------------
def test_a_file_holds_what_was_measured(file: Path) -> None:
    complete(file)
    cluster = load_cluster(file)
    assert cluster.inside.alpha == pytest.approx(ALPHA, rel=1e-3)
    assert cluster.inside.bandwidth == pytest.approx(MESSAGES, rel=1e-3)
    assert cluster.overheads == pytest.approx((ISSUE, POST))
    assert cluster.handling == pytest.approx(ALPHA / 2, rel=0.01)
    for op in calibrate_links.OPERATORS:
        shard = 2 if op == "all_gather" else 1  # each rank passes in its part of all bytes
        for nbytes in (16, 65_536, 2**22):
            taken = collective_time(op, nbytes / shard, (0, 1), cluster)
            assert taken == pytest.approx(200e-6 + nbytes / 1e9, rel=1e-2), (op, nbytes)


def test_the_kernels_lie_beside_the_cluster(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert load_kernels(load_cluster(file).gpu.kernels).phases["backward"] == 10e-6


# -- what a simulation makes of them ---------------------------------------------------------------
def test_a_cpu_spends_the_hosts_time_and_then_the_kernels(file: Path) -> None:
    def body(ctx: RankContext) -> None:
        x = torch.empty(4096, device="meta")  # the host runs this one, too
        x.view(64, 64)
        torch.add(x, x)

    kernels = load_kernels(load_cluster(file).gpu.kernels)
    moved = 12 * 4096 / (0.8 * BANDWIDTH * 4)
    clock = run_virtual(body, 1, cluster=file, compute="kernels").clock
    assert clock == pytest.approx(3 * kernels.host + moved, rel=0.02)


def test_a_collective_of_one_rank_takes_its_time(file: Path) -> None:
    def body(ctx: RankContext) -> None:
        dist.all_reduce(torch.ones(4))

    assert run_virtual(body, 1, cluster=file).clock == pytest.approx(ISSUE + ALONE, rel=0.01)


def test_two_messages_at_once_share_the_processors(file: Path) -> None:
    def body(ctx: RankContext) -> None:
        peer, out, into = 1 - ctx.rank, torch.ones(4), torch.empty(4)
        for work in (dist.irecv(into, peer), dist.isend(out, peer)):
            work.wait()

    clock = run_virtual(body, 2, cluster=file).clock
    assert clock == pytest.approx(2 * POST + ALPHA + ALPHA / 2, rel=0.01)


def test_measured_cpu_time_has_the_time_to_issue_already(file: Path) -> None:
    def body(ctx: RankContext) -> None:
        dist.all_reduce(torch.ones(4))

    modelled = run_virtual(body, 2, cluster=file).clock
    assert modelled == pytest.approx(ISSUE + 200e-6, rel=0.01)
    waited = run_virtual(body, 2, cluster=file, compute="measured", ledger=False)
    assert waited.clock > 200e-6


def test_company_slows_each_rank_down(tmp_path: Path) -> None:
    measured = planted()
    measured.company = 1.5
    cluster, _ = write(measured, tmp_path / "c.yaml")
    assert [cluster.crowding(ranks) for ranks in (1, 2)] == [1.0, 1.5]
    assert load_cluster("laptop").crowding(4) == 2.0


@pytest.mark.parametrize("cluster", ["laptop", "own"])
def test_more_ranks_than_cores_are_refused_in_one_line(
    cluster: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(file) if cluster == "own" else cluster
    command = ["simulate", "--cluster", name, "--model", "mlp", "--gpus", "3"]
    assert main([*command, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err.strip()
    assert "has 2 cores, which is fewer than 3 ranks" in said
    assert said.count("\n") == 0


# -- the page of this machine ----------------------------------------------------------------------
def test_the_page_tells_errors_by_program_and_whether_goals_are_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def point(what: str, ranks: int, measured: float, *predicted: float) -> this_machine.Point:
        rounds = [this_machine.Point(what, ranks, measured, p, 9, ()) for p in predicted]
        return this_machine.middle(rounds)

    points = (
        point("training step, a", 1, 1e-3, 0.8e-3, 1.5e-3, 1.1e-3),
        point("training step, b", 2, 2e-3, 1.9e-3),
        point("all-reduce root, 4 B", 2, 1e-4, 1.3e-4),
    )
    monkeypatch.setattr(this_machine, "FILE", tmp_path / "this_machine.json")
    assert this_machine.read() is None
    assert predictions_page.on_this_machine() == []
    this_machine.write(this_machine.Record("a machine", "2026-01-01", "α is 1 µs.", points))
    head, words, short, full = predictions_page.on_this_machine()
    assert "not met: 10% and 30%" in words
    assert "| training step | 2 | 8% | +10% |" in short
    assert full.count("\n") == 4
    assert "| training step, a | 1 | 1 | 1.1 | +10% | -20% … +50% |" in full
    assert this_machine.read().points == points
    assert "met: 5% and 5%" in this_machine.verdict(points[1:2])


def test_programs_of_the_validation_run_on_virtual_ranks_of_the_file(file: Path) -> None:
    for program, _, least, _ in validation.PROGRAMS:
        found = run_virtual(program, least, "meta", 2, cluster=file, compute="kernels")[0]
        assert all(seconds > 0 for seconds in found.values())


# -- the command -----------------------------------------------------------------------------------
def test_the_command_measures_this_machine_and_names_the_next_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.yaml"
    monkeypatch.setattr(calibrate_links, "SIZES", (64, 4096, 2**18, 2**18))
    assert main(["calibrate", "--quick", "--out", str(file)]) == 0
    printed = capsys.readouterr().out
    complete(file)
    cluster = load_cluster(file)
    assert f"distlab simulate --cluster {file}" in printed
    assert "the host's time for an operator" in printed
    kernels = load_kernels(cluster.gpu.kernels)
    assert all(math.isfinite(v) and v >= 0 for v in (kernels.host, *kernels.phases.values()))
    ranks = ["1"] if cluster.processors == 1 else ["1", "2"]
    command = ["simulate", "--cluster", str(file), "--model", "mlp", "--gpus", *ranks]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    assert "mlp, ddp by" in capsys.readouterr().out
    assert (tmp_path / "out" / "mlp-ddp-solutions-mine.json").exists()


def test_a_wrong_name_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["calibrate", "--out", "machine.txt"]) == 2
    assert "must end in .yaml" in capsys.readouterr().err


def test_a_wrong_option_is_refused_at_once_with_the_usage_of_its_command() -> None:
    """At once: before torch is imported."""
    code = (
        "import sys\n"
        "from distlab.cli import main\n"
        "try:\n"
        "    main(['calibrate', '--fast'])\n"
        "finally:\n"
        "    print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr.startswith("usage: distlab calibrate ")
    assert "error: unrecognized arguments: --fast" in done.stderr
