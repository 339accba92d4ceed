"""What ``docs/scaling.md`` says about its cells: each sentence with what it rests on.

A number in a sentence comes from the cells. ``Said.holds`` is what the rest of the sentence claims.
``told`` refuses a sentence that the cells do not bear out, so the page is never written with it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from .scaling_choice import SIMULATED, Cell, Cells

H100, A100 = "dgx-h100", "p4d-a100"
WIDTH, NO_BREAK = 100, "\u00a0"
OWN = ("DDP, own ring", "DDP, own tree", "DDP, own halving-doubling", "DDP, own hierarchical")
RING, TREE, HALVING, HIERARCHICAL = OWN
PLAIN, DDP, ZERO1, ZERO2 = "all-reduce, nothing hidden", "DDP in buckets", "ZeRO-1", "ZeRO-2"
FSDP, HYBRID, LOCAL = "FSDP with prefetch", "hybrid FSDP", "local SGD, 8 steps"
SERVER, SERVERS, FREE = (
    "parameter server, 1",
    "parameter servers, 1 in 4",
    "asynchronous, servers 1 in 4",
)
CANDIDATES = tuple(SIMULATED.values())  # of exercise 3.21


@dataclass(frozen=True)
class Said:
    """A sentence. ``holds`` stays True where a sentence explains and claims nothing of a cell."""

    text: str
    holds: bool = True


Paragraph = Iterable[Said]


@dataclass(frozen=True)
class Facts:
    """A model's cells, as the sentences ask for them."""

    cells: Cells

    def cell(self, name: str, gpus: int, cluster: str = H100) -> Cell:
        """The cell of a row."""
        return self.cells[cluster, name, gpus]

    def step(self, name: str, gpus: int, cluster: str = H100) -> float:
        """Milliseconds of a step."""
        return float(self.cell(name, gpus, cluster)["step"] * 1e3)

    def gigabytes(self, name: str, gpus: int) -> float:
        """Memory."""
        return float(self.cell(name, gpus)["memory"] / 1e9)

    def updating(self, name: str, gpus: int) -> float:
        """Milliseconds of the optimizer."""
        return float(self.cell(name, gpus)["parts"]["optimizer"] * 1e3)

    def waits(self, name: str, gpus: int, cluster: str = H100) -> float:
        """The share of a step that waits for communication."""
        cell = self.cell(name, gpus, cluster)
        return float(cell["exposed"] / cell["step"])

    def per_gpu(self, name: str, gpus: int, cluster: str = H100) -> float:
        """Throughput of a GPU."""
        return float(self.cell(name, gpus, cluster)["rate"] / gpus)

    def ahead(self, name: str, other: str, gpus: int, cluster: str = H100) -> float:
        """By which share the other row's step is longer."""
        return self.step(other, gpus, cluster) / self.step(name, gpus, cluster) - 1

    def smallest(self, names: Iterable[str], gpus: int) -> str:
        """The row with the least memory."""
        return min(names, key=lambda name: self.gigabytes(name, gpus))

    def fastest(self, names: Iterable[str], gpus: int, cluster: str = H100) -> str:
        """The row with the shortest step."""
        return min(names, key=lambda name: self.step(name, gpus, cluster))


def share(value: float, digits: int = 0) -> str:
    """A share in a sentence."""
    return f"{100 * value:.{digits}f} %"


def told(paragraphs: Iterable[Paragraph], listed: bool = False) -> str:
    """The paragraphs as Markdown, or as a list of them.

    Raises ValueError for a sentence that the cells do not bear out.
    """
    texts = []
    first, rest = ("- ", "  ") if listed else ("", "")
    for paragraph in paragraphs:
        sentences = [*paragraph]
        if wrong := [said.text for said in sentences if not said.holds]:
            raise ValueError(f"the cells do not say: {' '.join(wrong)}")
        whole = " ".join(said.text for said in sentences)
        texts.append(
            textwrap.fill(
                whole.replace(" %", f"{NO_BREAK}%"),
                WIDTH,
                initial_indent=first,
                subsequent_indent=rest,
                break_on_hyphens=False,
                break_long_words=False,
            )
        )
    return ("\n" if listed else "\n\n").join(texts).replace(NO_BREAK, " ")
