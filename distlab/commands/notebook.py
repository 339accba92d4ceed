"""How a notebook of the course begins: where it runs, whose files it uses, and ranks for a cell."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._dynamo  # torch.optim imports it: once here, not in every rank
from IPython.display import Image, display
from matplotlib import pyplot
from matplotlib.figure import Figure

from ..course.catalogue import load_course, root
from ..grading.implementation import Implementation, protect_this_process
from ..grading.sources import find_source
from ..ranks import RankFailure, run_ranks

T = TypeVar("T")
DOTS_PER_INCH = 90
# Okabe & Ito 2008: colour-blind readers tell them apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def show(picture: Figure | Path, alt: str) -> None:
    """Show a figure, or a file in PNG; ``alt`` says what is seen to readers who can't see it."""
    if isinstance(picture, Path):
        content = picture.read_bytes()
    else:
        file = io.BytesIO()
        picture.savefig(file, dpi=DOTS_PER_INCH)
        pyplot.close(picture)
        content = file.getvalue()
    display(Image(content, alt=alt))


class Notebook:
    """A phase's implementation, and runs that a blank exercise doesn't end.

    ``impl``: "solutions", "templates" or a folder; ``run``: what starts ranks unless a cell says
    otherwise. The notebook runs in the course's folder from now on.
    """

    def __init__(self, phase: int, impl: str, run: Callable[..., Any] = run_ranks) -> None:
        os.chdir(root())
        sys.path.insert(0, str(root()))  # the solutions
        torch.set_num_threads(1)
        pyplot.rcParams["axes.prop_cycle"] = pyplot.cycler(color=COLOURS)
        protect_this_process()
        self.run = run
        self.source = find_source(impl, load_course().phase(phase))

    def module(self, name: str) -> Implementation:
        """One file of the implementation."""
        return Implementation(self.source, name)

    def ranks(
        self,
        body: Callable[..., Any],
        world_size: int,
        run: Callable[..., Any] | None = None,
        **options: Any,
    ) -> Any:
        """The ranks' results, or None with one line that says why there are none."""
        options |= {"timeout": 60, "learner_files": self.source.files()}
        return self.attempt(lambda: (run or self.run)(body, world_size, **options))

    def attempt(self, call: Callable[[], T]) -> T | None:
        """What ``call()`` gives, or None with one line that says why there is nothing."""
        try:
            return call()
        except RankFailure as failure:
            print(f"{failure.message}  {failure.line}".rstrip())
            return None
