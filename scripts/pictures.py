"""Make the README's pictures from real runs: ``python scripts/pictures.py``.

``docs/report.svg`` is the report of a learner who has written 1.1 to 1.4, but sums the gradients
instead of averaging them. ``distlab trace 1.5`` draws ``docs/timeline.png``. ``distlab simulate``
draws ``docs/scaling.png`` for up to 256 GPUs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WRITTEN = {
    "data_loader": ("1.1", "1.2"),
    "trainer": ("1.3", "1.4"),
    "evaluation": (),
    "simple_allreduce": (),
    "collectives": (),
}
SIMULATED = ["--cluster", "p4d-a100", "--model", "resnet50", "--impl", "torch", "--gpus"]
SIMULATED += [*(str(2**k) for k in range(9)), "--roofline"]
MUTANT = "average-summed"
LEFT_OUT = (".git", ".venv", ".distlab", "__pycache__", "*.egg-info", "notebooks", "docs")

# run in the learner's copy: the grader's own command, its console recorded
RECORD = """
import io, re, sys
from rich.console import Console
from distlab.grading import command
out = Console(record=True, width=116, force_terminal=True, file=io.StringIO())
out.print("[bold]$ python test_phase1.py[/]", highlight=False)
command.console = lambda *args, **kwargs: out
command.main(1, [])
svg = out.export_svg(title="a learner's terminal")
open(sys.argv[1], "w").write(re.sub(r"@font-face {.*?}", "", svg, flags=re.DOTALL))
"""


def learner_file(name: str, written: tuple[str, ...]) -> str:
    """The learner's file: the exercises in ``written`` done, 1.4 wrongly, the others blank."""
    from distlab.course import templates
    from distlab.grading import wrong as mutants

    mutant = next(m for m in mutants.all_mutants() if m.id == MUTANT)
    path = ROOT / "solutions" / "phase1_data_parallel" / f"{name}.py"
    text = path.read_text(encoding="utf-8")
    if name == "trainer":
        text = mutants.patched(mutant)
    for exercise in written:  # without its markers a region stays as it is
        text = re.sub(rf"^ *# --- exercise {exercise}: (start|end)\n", "", text, flags=re.MULTILINE)
    if "# --- exercise" in text:
        return templates.generate(text, phase=1)
    return templates.SIBLING.sub(r"\1template_\2\3", text)


def main() -> None:
    """Write the pictures to docs/."""
    sys.path.insert(0, str(ROOT))
    docs = ROOT / "docs"
    docs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        course = Path(folder) / "course"
        shutil.copytree(ROOT, course, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for name, written in WRITTEN.items():
            file = course / "phase1_data_parallel" / f"template_{name}.py"
            file.write_text(learner_file(name, written), encoding="utf-8")
        report = [sys.executable, "-c", RECORD, str(docs / "report.svg")]
        subprocess.run(report, cwd=course, check=True)
        trace = [sys.executable, "-m", "distlab", "trace", "1.5", "--impl", "solutions"]
        subprocess.run([*trace, "--out", folder], cwd=course, check=True)
        shutil.copy(Path(folder) / "trace-1.5.png", docs / "timeline.png")
        simulate = [sys.executable, "-m", "distlab", "simulate", *SIMULATED, "--out", folder]
        subprocess.run(simulate, cwd=course, check=True)
        shutil.copy(Path(folder) / "resnet50-ddp-torch-p4d-a100.png", docs / "scaling.png")


if __name__ == "__main__":
    main()
