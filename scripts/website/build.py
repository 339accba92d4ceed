"""From the texts of the course to HTML."""

from __future__ import annotations

from pathlib import Path

from sphinx.cmd.build import main as sphinx

from distlab.course.catalogue import root

from . import tree


def build(out: Path) -> int:
    """Write the site to ``out``; 0 if there was no warning.

    What the next build can take over is kept beside it.
    """
    work = out.with_name(out.name + "-source")
    tree.write(root(), work / "pages")
    options = ["--builder", "html", "--conf-dir", str(Path(__file__).parent), "--quiet"]
    options += ["--fail-on-warning", "--doctree-dir", str(work / "read")]
    return sphinx([*options, str(work / "pages"), str(out)])
