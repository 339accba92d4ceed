"""The notebooks show what a run has shown, to everybody and without a trace of its machine."""

from __future__ import annotations

import base64
import io
import re
import socket
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest
from nbformat.v4 import new_output
from PIL import Image

from distlab.course.catalogue import root
from scripts import notebooks
from tests.notebooks.test_notebooks import EXPECTED

PATHS = sorted((root() / "notebooks").glob("*.ipynb"))
LARGEST = 500_000  # bytes
ADDRESS = "https://github.com/someone/course"
OF_A_MACHINE = re.compile(
    r"/(?:home|root|tmp|work|Users|mnt|var)/|site-packages|\b20\d\d-\d\d-\d\d|\b\d\d:\d\d:\d\d\b"
    r"|\b(?:\d{1,3}\.){3}\d{1,3}\b"
)


def code_cells(path: Path) -> list[Any]:
    notebook = nbformat.read(path, as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(path: Path) -> list[Any]:
    return [output for cell in code_cells(path) for output in cell.outputs]


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_outputs_are_there(path: Path) -> None:
    """Those of a whole run: as many pictures as cells make, and the words of the last cell."""
    count, words = EXPECTED[path.stem]
    found = outputs(path)
    assert sum("image/png" in o.get("data", {}) for o in found) == count
    assert words in "".join(o.get("text", "") for o in found)
    assert {o.output_type for o in found} <= {"stream", "display_data"}
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell.outputs for cell in cells if re.search(r"^ *(print|show)\(", cell.source, re.M)
               and "notebook = Notebook(" not in cell.source and "ADDRESS" not in cell.source)  # fmt: skip


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_nothing_tells_of_the_machine(path: Path) -> None:
    text = re.sub(r'"image/png": "[^"]+"', "", path.read_text(encoding="utf-8"))
    assert not OF_A_MACHINE.findall(text)
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
    assert "language_info" not in text
    assert '"execution": {' not in text
    assert path.stat().st_size <= LARGEST


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_every_picture_has_words_and_few_bytes(path: Path) -> None:
    words = []
    for output in outputs(path):
        png = output.get("data", {}).get("image/png")
        if png:
            words.append(output.metadata["image/png"]["alt"])
            picture = Image.open(io.BytesIO(base64.b64decode(png)))
            assert picture.width <= 1700
            assert not picture.info.get("Software")
    assert all(40 <= len(alt) <= 250 and alt.endswith(".") for alt in words), words
    assert len(set(words)) == len(words)


def test_what_changes_from_run_to_run_is_stripped() -> None:
    notebook = notebooks.built("phase1_data_parallel", "")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    picture = io.BytesIO()
    Image.new("RGB", (4, 4)).save(picture, "PNG")
    png, alt = base64.b64encode(picture.getvalue()).decode(), {"image/png": {"alt": "words"}}
    cells[0].outputs = [new_output("display_data", {"image/png": png}, metadata=alt)]
    cells[1].metadata["execution"] = {"iopub.execute_input": "2026-01-01T00:00:00Z"}
    cells[1].execution_count = 77
    notebook.metadata["language_info"] = {"version": "3.11.7"}
    text = nbformat.writes(notebooks.stripped(notebook, "it"))
    assert "2026" not in text
    assert "3.11.7" not in text
    assert cells[1].execution_count == 2
    assert cells[0].outputs[0].data["text/plain"] == "words"
    cells[1].outputs = [new_output("stream", name="stderr", text="a warning")]
    with pytest.raises(ValueError, match="it, code cell 2 prints to stderr"):
        notebooks.stripped(notebook, "it")


def test_measured_cells_keep_what_they_have_shown() -> None:
    """Others are taken from the new run; a cell whose source has changed as well."""
    source = '# %% tags=["measured"]\nprint(1)\n# %% tags=["measured"]\nprint(2)\n# %%\nprint(3)\n'
    new, old = (jupytext.reads(source, fmt="py:percent") for _ in range(2))
    for notebook, text in ((new, "new"), (old, "old")):
        for cell in notebook.cells:
            cell.outputs = [new_output("stream", name="stdout", text=text)]
    old.cells[1].source = "print(22)"
    notebooks.keep_outputs(new, old, measured_only=True)
    assert [cell.outputs[0].text for cell in new.cells] == ["old", "new", "new"]
    notebooks.keep_outputs(new, old, measured_only=False)
    assert [cell.outputs[0].text for cell in new.cells] == ["old", "new", "old"]


def test_a_badge_once_there_is_an_address() -> None:
    without = notebooks.built("virtual_cluster", "")
    assert "colab.research" not in nbformat.writes(without)
    badge, *rest = notebooks.built("virtual_cluster", ADDRESS).cells
    link = "https://colab.research.google.com/github/someone/course/blob/main/notebooks/"
    assert f"]({link}virtual_cluster.ipynb)" in badge.source
    assert f'ADDRESS = "{ADDRESS}"' in rest[1].source
    elsewhere = notebooks.built("virtual_cluster", "https://git.example.org/course")
    assert "colab.research" not in nbformat.writes(elsewhere)  # Colab opens from GitHub alone
