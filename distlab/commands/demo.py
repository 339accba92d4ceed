"""``make demo``: the complete Phase 1 on real digits, proved equal to one process, and the map."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from ..course.catalogue import load_course, need_solutions, root
from ..host import gpus
from ..host.terminal import console
from ..reference import compare as references
from ..reference.workloads import WORKLOADS, build_model, digits
from . import learn
from .trace import trace

RANKS = 4
WANTED_ACCURACY = 0.97
# float32 after 345 steps on 4 ranks against float64 on one: relative error of a parameter's norm;
# measured: 4e-7
WEIGHT_TOLERANCE = 1e-4


def train(file: Path) -> None:
    """Train the workload on 4 ranks under torchrun, by the solution's own program."""
    need_solutions("the demo")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(RANKS), "-m", "solutions.phase1_data_parallel.trainer"),
        *("--workload", "digits_mlp", "--device", "cpu", "--save", str(file)),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root())}
    with tempfile.TemporaryFile("w+") as errors:  # Ctrl-C must not reach it
        options = {"cwd": root(), "env": environment, "stderr": errors, "start_new_session": True}
        with subprocess.Popen(command, **options) as process:  # type: ignore[call-overload]
            try:
                status = process.wait()
            except BaseException:
                process.terminate()  # torchrun ends its ranks
                raise
        if status:
            errors.seek(0)
            print(errors.read(), file=sys.stderr)
            raise ValueError("training failed, see above")


def compare(file: Path, out: Console) -> bool:
    """Whether the accuracy is reached, and whether the run of one process and the recorded run
    agree; prints the numbers."""
    saved = torch.load(file, weights_only=True)
    chosen = WORKLOADS["digits_mlp"]
    model = build_model(chosen.model)
    model.load_state_dict(saved["model"])
    images, labels = digits(train=False).tensors
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).double().mean().item()
    steps = len(saved["losses"])
    # in float64: a ReLU whose input is rounded to the other side of 0 has another gradient, and one
    # process in float32 then leaves the path (after 100 steps, on an AMD EPYC)
    alone, _, single = references.train_alone(chosen, epochs=chosen.epochs)
    apart = max(abs(a - b) for a, b in zip(saved["losses"], alone, strict=True))
    weights = max(
        float((a - b).detach().abs().max())
        for a, b in zip(model.parameters(), single.parameters(), strict=True)
    )
    reference, note = references.best(chosen.name)
    recorded = max(abs(a - b) for a, b in zip(saved["losses"], reference["losses"], strict=True))
    problems = references.compare_parameters(reference, model, WEIGHT_TOLERANCE)
    limit = references.LOSS_TOLERANCE
    last = f"last loss {saved['losses'][-1]:.6f}"
    rows = [
        (accuracy >= WANTED_ACCURACY, f"test accuracy {accuracy:.2%} (wanted: 97 %)"),
        (apart < limit, f"one process in float64: {last} here, {alone[-1]:.6f} there"),
        (apart < limit, f"  all {steps} losses within {apart:.1e} (limit {limit:g})"),
        (weights < limit, f"  all weights within {weights:.1e} (limit {limit:g})"),
        (recorded < limit, f"reference run: {last} here, {reference['losses'][-1]:.6f} there"),
        (recorded < limit, f"  all {steps} losses within {recorded:.1e} (limit {limit:g})"),
        (not problems, f"  norms of all weights within {WEIGHT_TOLERANCE:g}"),
    ]
    for good, text in rows:
        mark = Text.assemble(("  ok  " if good else "  NO  ", "green" if good else "red"), text)
        out.print(mark, soft_wrap=True)
    out.print(Text(f"      (reference run: {note})", "dim"))
    return all(good for good, _ in rows)


def main() -> int:
    """Train, compare, draw, and show the map."""
    out = console()
    begun = time.monotonic()
    torch.set_num_threads(1)
    gpus.hide()  # one process trains here, then ranks are forked
    try:
        out.print(Text(f"1. Training on {RANKS} ranks: 1,437 handwritten digits\n", "bold"))
        sys.stdout.flush()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trained.pt"
            train(file)
            out.print(Text("\n2. The same as one process, to rounding?\n", "bold"))
            good = compare(file, out)
        out.print(Text("\n3. What the ranks did\n", "bold"))
        exercise = load_course().exercise("1.5")
        trace(exercise, "solutions", Path(".distlab"), out)
    except KeyboardInterrupt:
        out.show_cursor()  # the progress bar had hidden it
        print("\ninterrupted: no rank is left running", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    seconds = time.monotonic() - begun
    out.print(Text(f"\n4. Your course (the demo took {seconds:.0f} s)", "bold"))
    learn.show_map(load_course(), out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
