"""Write ``notebooks/*.ipynb`` from their sources, with what a run of the solutions shows.

    python -m scripts.notebooks                  # all of them; some minutes
    python -m scripts.notebooks phase1_data_parallel
    python -m scripts.notebooks --cells          # runs nothing; cells that changed lose outputs

``notebooks/NAME.py`` is the source of a notebook's cells. A cell that gets the course on Colab is
added to each notebook, and a badge that opens it there once ``course.toml`` has an address.

What differs from run to run is left out: identifiers, versions, what pictures say of their maker. A
cell with the tag ``measured`` has shown times of a machine: it keeps its outputs until its source
changes, or until ``--measure`` is given on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import base64
import io
import re
import time

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell
from PIL import Image

from distlab.course.catalogue import load_course, root

FOLDER = root() / "notebooks"
COLOURS = 128  # of a picture: lines and bars need few, and it is a third as large
TIMEOUT = 900  # seconds for a cell: its ranks have limits of their own
GITHUB = re.compile(r"https://github\.com/(?P<project>[^/]+/[^/]+?)(?:\.git)?/?$")
BADGE = """[![Open this notebook in Colab]\
(https://colab.research.google.com/assets/colab-badge.svg)]\
(https://colab.research.google.com/github/{project}/blob/main/notebooks/{name}.ipynb)"""
FIRST_CELL = '''\
# In the course's folder this cell does nothing. Elsewhere, as on Colab, it gets the course.
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ADDRESS = "{address}"  # of the course's repository
NEEDED = {{"cloudpickle": "cloudpickle", "matplotlib": "matplotlib", "pytest": "pytest",
          "prometheus_client": "prometheus-client", "rich": "rich", "safetensors": "safetensors",
          "sklearn": "scikit-learn", "torch": "torch", "torchvision": "torchvision",
          "yaml": "pyyaml"}}
HERE = """The course is in {{folder}}. What is different on Colab:
- There are about 2 cores, and all ranks share them: measured times say little. Counts of bytes and
  messages, losses and virtual times are the same as anywhere.
- `distlab cluster` and the sandbox need namespaces, which Colab's containers may not make.
- No cluster of several machines can be reached.
- Your files are gone when Colab ends the session: download what you wrote."""

if not any(Path(folder, "distlab").is_dir() for folder in (".", "..")):
    if not ADDRESS:
        raise SystemExit("Open this notebook in a clone of the course, or write the address of its "
                         "repository after ADDRESS = above.")
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", ADDRESS, "course"], check=True)
    missing = [name for module, name in NEEDED.items() if not importlib.util.find_spec(module)]
    if missing:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *missing], check=True)
    os.chdir("course/notebooks")
    print(HERE.format(folder=os.path.dirname(os.getcwd())))'''


def built(name: str, address: str) -> NotebookNode:
    """The notebook without outputs: its source's cells, and the first one for Colab."""
    source = jupytext.read(FOLDER / f"{name}.py")
    title, *rest = source.cells
    cells = [title, new_code_cell(FIRST_CELL.format(address=address)), *rest]
    project = GITHUB.match(address)
    if project:
        cells.insert(0, new_markdown_cell(BADGE.format(name=name, **project.groupdict())))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number:02}"
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = source.metadata["kernelspec"]
    return numbered(notebook)


def numbered(notebook: NotebookNode) -> NotebookNode:
    """The notebook as if its cells had run once, from top to bottom."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, 1):
        cell["execution_count"] = number
    return notebook


def is_measured(cell: NotebookNode) -> bool:
    """Whether a cell shows times of the machine that it ran on."""
    return "measured" in cell.metadata.get("tags", [])


def executed(notebook: NotebookNode) -> NotebookNode:
    """The notebook after a run from top to bottom."""
    options = {"timeout": TIMEOUT, "kernel_name": "python3", "coalesce_streams": True}
    client = NotebookClient(notebook, resources={"metadata": {"path": str(FOLDER)}}, **options)
    return client.execute()


def small(png: str) -> str:
    """A PNG, in base64, with few colours and without words on its maker."""
    file = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    # by coverage: a thin line keeps its colour, though it is few of the pixels
    few = picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def stripped(notebook: NotebookNode, name: str) -> NotebookNode:
    """Only what is the same at the next run, but for measured times; ValueError if a cell warns."""
    for cell in numbered(notebook).cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if output.output_type == "error" or output.get("name") == "stderr":
                number = cell.execution_count
                raise ValueError(f"{name}, code cell {number} prints to stderr: {output}")
            data = output.get("data", {})
            if "image/png" in data:
                data["image/png"] = small(data["image/png"])
                data["text/plain"] = output.metadata["image/png"]["alt"]
    notebook.metadata.pop("language_info", None)
    return notebook


def keep_outputs(notebook: NotebookNode, before: NotebookNode, measured_only: bool) -> None:
    """Give cells whose source is as it was the outputs that they had."""
    known = {cell.source: cell for cell in before.cells if cell.cell_type == "code"}
    for cell in notebook.cells:
        old = known.get(cell.source)
        if old is not None and old.outputs and (is_measured(cell) or not measured_only):
            cell["outputs"] = old.outputs


def write(name: str, *, run: bool, measure: bool) -> None:
    """One notebook."""
    path = FOLDER / f"{name}.ipynb"
    notebook = built(name, address())
    begun = time.perf_counter()
    if run:
        notebook = stripped(executed(notebook), name)
    if path.is_file() and not measure:
        keep_outputs(notebook, nbformat.read(path, as_version=4), measured_only=run)
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook, ensure_ascii=False) + "\n", encoding="utf-8")
    took = f", ran for {time.perf_counter() - begun:.0f} s" if run else ""
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB{took}", flush=True)


def address() -> str:
    """The public address of the course's repository; "" while it has none."""
    return getattr(load_course(), "address", "")


def main() -> None:
    """The notebooks that the command line names, or all."""
    parser = argparse.ArgumentParser(description="Write notebooks with their outputs.")
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--cells", action="store_true", help="run nothing, keep outputs")
    parser.add_argument("--measure", action="store_true", help="measured times anew, too")
    options = parser.parse_args()
    unknown = set(options.names) - set(names)
    if unknown:
        parser.error(f"no notebook {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    for name in options.names or names:
        write(name, run=not options.cells, measure=options.measure)


if __name__ == "__main__":
    main()
