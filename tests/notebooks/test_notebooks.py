"""The notebooks run from clean, and hold the cells of their sources."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch._dynamo  # noqa: F401 (forked kernels find it imported)
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

from distlab.course.catalogue import root
from scripts import notebooks
from tests import forked_commands

# pictures, and words of an output
EXPECTED = {
    "phase1_data_parallel": (4, "among the 4 ranks: 1 "),
    "phase2_advanced": (6, "rounding"),
    "phase3_multi_node": (5, "14        7,000       7,000"),
    "phase4_production": (5, "largest difference from the run without a kill: 0.0\n"),
    "context_and_experts": (7, "ZB-V                         5.9%             8        96"),
    "memory_meshes_profiles": (8, "weights beside one process: rounding"),
    "virtual_cluster": (4, "sum 64; virtual time 428.610000 µs, formula 428.610000 µs"),
}
# the same cells, less often around: text of a cell, and what runs instead
SMALL = {
    "phase1_data_parallel": {
        'WORKLOADS["digits_mlp"], 4\n': 'WORKLOADS["digits_mlp"], 1\n',
    },
    "phase2_advanced": {"STEPS, BATCH = 12, 8": "STEPS, BATCH = 3, 8"},
    "phase3_multi_node": {
        "for workers in (1, 2, 4, 8, 16):": "for workers in (1, 3):",
        "for lr in (0.05, 0.2, 0.4):": "for lr in (0.05, 0.4):",
        "GRADIENTS = 4, 0.01, 1.5, 240": "GRADIENTS = 4, 0.01, 0.5, 60",
        "worlds, found = (1, 2, 4, 8), {}": "worlds, found = (1, 2), {}",
    },
    "phase4_production": {
        "EPOCHS, EVERY, KILLED = 4, 20, 57": "EPOCHS, EVERY, KILLED = 2, 10, 27",
        "LR, STEPS = 0.1, 6 * 22": "LR, STEPS = 0.1, 23",
    },
    "context_and_experts": {"8, 256, 240": "8, 256, 12"},
    "virtual_cluster": {
        "train, w, 3, cluster": "train, w, 1, cluster",
        "GPUS = (1, 2, 4, 8, 16, 32)": "GPUS = (1, 2, 4)",
        '"p4d-a100", "ethernet-v100", "bigbasin-p100")': '"p4d-a100")',
    },
}
# what `python -m ipykernel_launcher` does; matplotlib anew: tests leave figures and a backend in it
KERNEL = """
import sys
from ipykernel import kernelapp

for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
    del sys.modules[name]
kernelapp.launch_new_instance()
"""
NOTEBOOKS = sorted((root() / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_its_source(path: Path) -> None:
    source = notebooks.built(path.stem, notebooks.address())
    notebook = nbformat.read(path, as_version=4)
    assert [(c.cell_type, c.id, c.metadata, c.source) for c in notebook.cells] == [
        (c.cell_type, c.id, c.metadata, c.source) for c in source.cells
    ]


class ForkedKernel(forked_commands.Popen):
    """A kernel in a fork of this process: a new one would import torch for 4 seconds."""

    def __init__(self, args: Sequence[str], **options: Any) -> None:
        launcher = args.index("ipykernel_launcher")
        super().__init__([sys.executable, "-c", KERNEL, *args[launcher + 1 :]], **options)


@pytest.mark.verdict
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one kernel, from clean with the templates, then all of it again with the solutions.

    That way round, no cell finds a name that only a solved exercise would have made.
    """
    notebook = nbformat.read(path, as_version=4)
    text = "\0".join(cell.source for cell in notebook.cells)
    for what, instead in SMALL.get(path.stem, {}).items():
        assert text.count(what) == 1, f"{path.name} has no such setting any more: {what}"
        text = text.replace(what, instead)
    sources = text.split("\0")
    code = [place for place, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    monkeypatch.setattr("jupyter_client.launcher.Popen", ForkedKernel)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3")
    with client.setup_kernel(cwd=str(path.parent)):
        for impl in ("templates", "solutions"):
            for place in code:
                source = sources[place].replace('IMPL = "solutions"', f'IMPL = "{impl}"')
                notebook.cells[place] = new_code_cell(source)
                client.execute_cell(notebook.cells[place], place)
            outputs = [o for place in code for o in notebook.cells[place].outputs]
            check_outputs(path.stem, impl, outputs)


def check_outputs(name: str, impl: str, outputs: list[nbformat.NotebookNode]) -> None:
    """Of a whole run: no error, all pictures; a blank exercise is told as such."""
    text = "".join(o.get("text", "") for o in outputs)
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert all(o.output_type != "error" for o in outputs)
    if impl == "templates":
        assert pictures or "still blank" in text
        return
    count, words = EXPECTED[name]
    assert len(pictures) == count
    assert "still blank" not in text
    assert words in text
