"""The whole idea in a minute: train on 4 ranks, prove that nothing changed, see what they did.

``make demo`` trains the trainer of phase 1 under torchrun on real handwritten digits and compares
every step's loss with training by one process and with the recorded reference run: W ranks that
average their gradients must do what one process does with the same global batches, to rounding.
``python -m distlab.demo --impl templates`` does the same with your own trainer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .course import load_course, root

if TYPE_CHECKING:
    from rich.console import Console

    from .ranks import RankContext

WORKLOAD = "digits_mlp"
WANTED = 0.97  # test accuracy
PICTURE = "pictures/phase1_steps.png"
WARM_UP, SHOWN = 4, 3  # steps before and in the picture
# Ranks add up the same numbers in another order than one process does: fp32 rounds by 6e-8 per
# operation, and 345 steps of momentum carry that along. Measured: 1e-6, and 8e-7 in a weight.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Trained:
    """What a training run left behind: the loss of every step and the weights."""

    losses: list[float]
    weights: dict[str, Any]


def train_on_ranks(impl: str, world_size: int, device: str) -> Trained:
    """Run the trainer under torchrun, its progress bar in this terminal."""
    import torch

    module = {
        "solutions": "solutions.phase1_data_parallel.trainer",
        "templates": "phase1_data_parallel.template_trainer",
    }[impl]
    with tempfile.TemporaryDirectory(prefix="distlab-") as folder:
        saved = os.path.join(folder, "trained.pt")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(world_size), "-m", module),
            *("--workload", WORKLOAD, "--device", device, "--save", saved),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=root(), env=environment)
        try:
            status = process.wait()
        except KeyboardInterrupt:
            process.wait()  # torchrun got the interrupt too, and ends its ranks
            raise
        if status:
            raise ValueError(f"{module} ended with status {status} (see above)")
        data = torch.load(saved, weights_only=True)
    return Trained(data["losses"], data["model"])


def train_alone(device: str) -> Trained:
    """The same training by one process; in a rank, so that this process stays fit to fork."""
    from .ranks import run_ranks

    def body(ctx: RankContext) -> tuple[list[float], dict[str, Any]]:
        import torch

        from . import references, workloads

        chosen = workloads.workload(WORKLOAD)
        losses, _, model = references.train_alone(
            chosen, epochs=chosen.epochs, device=str(ctx.device), dtype=torch.float32
        )
        return losses, {name: tensor.cpu() for name, tensor in model.state_dict().items()}

    options: dict[str, Any] = {"process_group": False, "ledger": False, "timeout": 120}
    return Trained(*run_ranks(body, 1, device=device, **options)[0])


def accuracy_of(weights: dict[str, Any]) -> float:
    """Accuracy of the weights on the 360 test images, counted here and not by the trainer."""
    import torch

    from . import workloads

    torch.set_num_threads(1)
    model = workloads.build_model(workloads.workload(WORKLOAD).model)
    model.load_state_dict(weights)
    images, labels = workloads.digits(train=False).tensors
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def largest_difference(got: Sequence[float], want: Sequence[float]) -> float:
    """Largest difference of two runs' losses; infinite if the runs differ in length."""
    if len(got) != len(want):
        return float("inf")
    return max((abs(a - b) for a, b in zip(got, want, strict=True)), default=0.0)


def compare(ranks: Trained, device: str, out: Console) -> bool:
    """Print the ranks' losses beside those of one process and of the reference; all equal?"""
    from rich.table import Table

    from . import references

    alone = train_alone(device)
    reference, origin = references.best(WORKLOAD)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for name in ("first loss", "last loss", "largest difference"):
        table.add_column(name, justify="right")
    equal = True
    for name, losses in (
        ("4 ranks", ranks.losses),
        ("one process", alone.losses),
        ("reference run", reference["losses"]),
    ):
        difference = largest_difference(ranks.losses, losses)
        equal = equal and difference <= TOLERANCE
        shown = "" if losses is ranks.losses else f"{difference:.1e}"
        table.add_row(name, f"{losses[0]:.6f}", f"{losses[-1]:.6f}", shown)
    out.print(table)
    drift = max(
        (ranks.weights[name].cpu() - tensor).abs().max().item()
        for name, tensor in alone.weights.items()
    )
    equal = equal and drift <= TOLERANCE
    out.print(f"largest difference of a weight from one process: {drift:.1e}", highlight=False)
    out.print(f"reference run: {origin}", style="dim", highlight=False)
    verdict = f"equal within {TOLERANCE:g}, at every one of {len(ranks.losses)} steps"
    failure = f"NOT equal within {TOLERANCE:g}: the ranks train something else"
    out.print(verdict if equal else failure, style="bold green" if equal else "bold red")
    return equal


def picture(impl: str, world_size: int, device: str) -> Path:
    """Draw a few training steps: compute and communication of each rank over time."""
    from . import timeline
    from .grading.implementation import Implementation, find_source
    from .ranks import run_ranks

    trainer = Implementation(find_source(impl, load_course().phase(1)), "trainer")

    def body(ctx: RankContext) -> tuple[float, float]:
        from . import workloads

        chosen = workloads.workload("digits_cnn")
        model = workloads.build_model(chosen.model).to(ctx.device)
        optimizer = workloads.build_optimizer(chosen, model)
        loader = trainer.module("data_loader").build_loader(
            workloads.digits(),
            rank=ctx.rank,
            world_size=ctx.world_size,
            global_batch_size=64 * ctx.world_size,  # enough work to be seen beside the messages
        )
        begun = 0.0
        for step, (inputs, targets) in enumerate(loader):
            if step == WARM_UP + SHOWN:
                break
            if step == WARM_UP:
                begun = time.monotonic()
            trainer.train_step(model, optimizer, inputs.to(ctx.device), targets.to(ctx.device))
        return begun, time.monotonic()

    results = run_ranks(body, world_size, device=device, timeout=60)
    begin, end = min(r[0] for r in results), max(r[1] for r in results)
    spans = [s for s in timeline.spans_of(results) if s.start >= begin and s.end <= end]
    path = root() / PICTURE
    path.parent.mkdir(exist_ok=True)
    title = f"{SHOWN} training steps of the digits CNN on {world_size} ranks"
    return Path(timeline.draw(spans, path, title=title))


def run(impl: str, world_size: int, device: str, out: Console) -> bool:
    """The demonstration; whether all of it came out as it should."""
    out.rule(f"1. train on {world_size} ranks", align="left")
    ranks = train_on_ranks(impl, world_size, device)
    accuracy = accuracy_of(ranks.weights)
    good = accuracy >= WANTED
    out.print(
        f"test accuracy {accuracy:.2%} (wanted: {WANTED:.0%} or more)",
        style="bold green" if good else "bold red",
    )
    out.rule("2. is it the training that one process does?", align="left")
    equal = compare(ranks, device, out)
    out.rule("3. what the ranks did", align="left")
    path = picture(impl, world_size, device)
    out.print(f"{path.relative_to(root())}: computing and communicating, rank by rank")
    out.rule("4. now you", align="left")
    subprocess.run([sys.executable, "-m", "distlab"], cwd=root(), check=False)
    return good and equal


def main(argv: Sequence[str] | None = None) -> int:
    """The command behind ``make demo``; returns the exit status."""
    from .failure import CheckFailed
    from .grading.report import console

    parser = argparse.ArgumentParser(prog="python -m distlab.demo", description=main.__doc__)
    parser.add_argument("--impl", default="solutions", choices=["solutions", "templates"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args(argv)
    begun = time.monotonic()
    out = console()
    try:
        good = run(options.impl, options.ranks, options.device, out)
    except KeyboardInterrupt:
        print("interrupted: no rank is left running", file=sys.stderr)
        return 130
    except (CheckFailed, ValueError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    out.print(f"the demo took {time.monotonic() - begun:.0f} s", style="dim", highlight=False)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
