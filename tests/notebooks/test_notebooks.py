"""The notebooks run from clean, and hold the cells of their sources."""

from __future__ import annotations

from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

from distlab.course import root

# pictures, and words of an output
EXPECTED = {
    "phase1_data_parallel": (4, "among the 4 ranks: 1 "),
    "phase2_advanced": (6, "rounding"),
    "phase4_production": (5, "largest difference from the run without a kill: 0.0\n"),
    "virtual_cluster": (4, "sum 64; virtual time 428.610000 µs, formula 428.610000 µs"),
}
NOTEBOOKS = sorted((root() / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_its_source(path: Path) -> None:
    source = jupytext.read(path.with_suffix(".py"))
    notebook = nbformat.read(path, as_version=4)
    assert [(c.cell_type, c.source) for c in notebook.cells] == [
        (c.cell_type, c.source) for c in source.cells
    ]


@pytest.mark.parametrize("impl", ["solutions", "templates"])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path: Path, impl: str) -> None:
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace('IMPL = "solutions"', f'IMPL = "{impl}"')
    client = NotebookClient(notebook, timeout=300, kernel_name="python3")
    client.execute(cwd=str(path.parent))
    outputs = [o for c in notebook.cells for o in c.get("outputs", [])]
    text = "".join(o.get("text", "") for o in outputs)
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert all(o.output_type != "error" for o in outputs)
    if impl == "solutions":
        count, words = EXPECTED[path.stem]
        assert len(pictures) == count
        assert "still blank" not in text
        assert words in text
    else:
        assert pictures or "still blank" in text
