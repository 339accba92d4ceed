"""The trainer of phase 4 by NCCL's rules, with each strategy.

Virtual ranks stand for it as far as they can. A step is profiled on the CPU before (a profile is
taken with tensors that have no data, and those report no GPU), signals are left alone (ranks are
threads), and checkpoints are saved while training waits (a second thread can't communicate).
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch._dynamo  # once here instead of in every forked world

from distlab.course.catalogue import root
from distlab.ranks import RankContext
from distlab.virtual import run_virtual
from given.step_profile import Profile
from solutions.phase4_production import trainer_loop, trainer_setup, training_plan
from solutions.phase4_production.trainer_config import Config
from solutions.phase4_production.trainer_loop import Trainer
from tests.phase4 import text_runs
from tests.phase4.image_runs import PROFILES, STEPS, config_of, few_digits, loss_curve, losses

pytestmark = pytest.mark.verdict

assert torch._dynamo
FILES = tuple(map(str, (root() / "solutions").glob("*/*.py")))
STRATEGIES = {
    "ddp": [],
    "zero1": ["--strategy=zero1"],
    "zero2": ["--strategy=zero2"],
    "fsdp": ["--strategy=fsdp"],
    "fsdp, offloaded": ["--strategy=fsdp", "--offload"],
    "hybrid on two nodes": ["--strategy=hybrid", "--node-size=2"],
    "ring": ["--pattern=ring"],
    "hierarchical": ["--pattern=hierarchical"],
    "tree": ["--pattern=tree"],
    "halving and doubling": ["--pattern=halving_doubling"],
    "all of random-K": ["--compression=randomk", "--compression-ratio=1.0"],
}
MESHES = {  # and by which rules
    "tensor 2 x pipeline 2": ("nccl2", ["--tensor=2", "--pipeline=2"]),
    "shard 2 x context 2": ("legacy lazy", ["--shard=2", "--context=2"]),
}
ON_GPUS = ["--device=cuda", "--async-save=false"]
ROUNDED = ("bf16", "int8", "onebit", "powersgd", "topk")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return few_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Profile]:
    """The losses of one process on the CPU, and the profile of one of two ranks' steps."""
    found = losses(config_of(data, tmp_path_factory.mktemp("alone")), 1)
    PROFILES.clear()
    losses(config_of(data, tmp_path_factory.mktemp("two")), 2)
    return found, next(iter(PROFILES.values()))


def curves(data: Path, profile: Profile, out: Path, arguments: list[str]) -> list[list[float]]:
    """The losses in each way in which PyTorch runs NCCL."""
    size = 4 if "--strategy=hybrid" in arguments else 2
    found = []
    for rules in ("nccl2", "legacy lazy", "legacy eager"):
        config = config_of(data, out / rules, *ON_GPUS, *arguments)
        found.append(curve(config, rules, size, profile))
    return found


def curve(config: Config, rules: str, size: int, profile: Profile | None = None) -> list[float]:
    """The losses of ``size`` virtual ranks by ``rules``."""

    def body(ctx: RankContext) -> bool:
        signal.signal = lambda *_: None  # type: ignore[assignment]
        trainer_setup.matmul_peak = lambda device, dtype, n: 1e9  # type: ignore[assignment]
        training_plan.profile_of = lambda *_: profile  # type: ignore[assignment]
        trainer_loop.write_report = lambda logs: None  # type: ignore[assignment]
        return Trainer(config, ctx.device).run()

    options = {"rules": rules, "learner_files": FILES, "timeout": 100}
    assert [*run_virtual(body, size, **options)] == [True] * size
    return loss_curve(config)


@pytest.mark.parametrize("arguments", STRATEGIES.values(), ids=STRATEGIES)
def test_every_strategy_trains_by_the_rules_of_nccl(
    data: Path, alone: tuple[list[float], Profile], tmp_path: Path, arguments: list[str]
) -> None:
    right, profile = alone
    assert len(right) == STEPS
    for losses_of_mode in curves(data, profile, tmp_path, arguments):
        assert losses_of_mode == pytest.approx(right, rel=2e-4)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A folder of texts, and the losses of one process on the CPU."""
    folder = text_runs.few_texts(tmp_path_factory.mktemp("texts"))
    return folder, losses(text_runs.config_of(folder, tmp_path_factory.mktemp("alone")), 1)


@pytest.mark.parametrize(("rules", "axes"), MESHES.values(), ids=MESHES)
def test_a_mesh_trains_by_the_rules_of_nccl(
    texts: tuple[Path, list[float]], tmp_path: Path, rules: str, axes: list[str]
) -> None:
    folder, right = texts
    config = text_runs.config_of(folder, tmp_path, *ON_GPUS, "--strategy=mesh", *axes)
    assert curve(config, rules, 4) == pytest.approx(right, rel=2e-4)


@pytest.mark.parametrize("compression", ROUNDED)
def test_every_compression_travels_by_the_rules_of_nccl(
    data: Path, alone: tuple[list[float], Profile], tmp_path: Path, compression: str
) -> None:
    """The same losses in all modes, near those without compression in the first step."""
    right, profile = alone
    first, *others = curves(data, profile, tmp_path, [f"--compression={compression}"])
    assert len(first) == STEPS
    assert first[0] == pytest.approx(right[0], rel=2e-4)
    assert others == [first] * 2
