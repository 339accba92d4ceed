"""Submissions that attack: texts of ``trainer.py`` whose exercise 1.4 does not average anything.

Quiet ones look, write and ask for privileges, and go on: several of them share one submission
(``quiet_*.py``). Loud ones end, stop, fill, flood or forge, each in a submission of its own.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
QUIET = ("reads", "reaches", "powers", "takes")
# what each of them tells: its name, and what it got or what stopped it
REPORT = """

def outcomes() -> str:
    told = []
    for name, function in PROBES.items():
        if name not in PLACES.get("only", PROBES):
            continue
        try:
            got = function()
        except BaseException as error:
            told.append(f"{name} = {type(error).__name__}")
        else:
            told.append(f"{name} = " + (f"REACHED {got!r:.60}" if got else "nothing"))
    return "; ".join(told)


"""
CALLED = """
def average_gradients(parameters, num_samples, group=None):
    import torch.distributed as dist
    if dist.get_rank() == 0:
        raise RuntimeError("told: " + outcomes())
"""
IMPORTED = """
raise RuntimeError("told: " + outcomes())
"""
LOUD = """
import ctypes, json, os, signal, sys, threading, time
import torch
import torch.distributed as dist
$IMPORTED
def average_gradients(parameters, num_samples, group=None):
$CALLED
"""


def quiet(name: str, places: Mapping[str, object], when: str) -> str:
    """The text of a quiet submission; ``when``: its probes run when "imported", or "called"."""
    text = (HERE / f"quiet_{name}.py").read_text(encoding="utf-8")
    head = "PLACES: dict[str, Any] = {}"
    assert head in text
    text = text.replace(head, f"PLACES: dict[str, Any] = {json.loads(json.dumps(places))!r}")
    return text + REPORT + (IMPORTED if when == "imported" else CALLED)


def told(message: str) -> dict[str, str]:
    """What each probe has told, by name."""
    head, found, report = message.partition("told: ")
    assert found, f"the probes told nothing: {message}"
    return dict(part.split(" = ", 1) for part in report.strip().split("; "))  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class Loud:
    """One submission that can't be overheard.

    ``called``: what exercise 1.4's function does; ``imported``: what its file does. ``promised``:
    README says that the grader without a sandbox stands this, too.
    """

    kind: str
    called: str = "pass"
    imported: str = ""
    promised: bool = False
    tier: str = "virtual"

    @property
    def alone(self) -> bool:
        """It ends where its file is imported: the grader does that in a rank of its own first."""
        return self.called == "pass"

    def text(self, outside: Path) -> str:
        """Its ``trainer.py``; ``outside``: a folder in which nothing may change."""
        called = textwrap.indent(textwrap.dedent(self.called).strip(), "    ")
        text = LOUD.replace("$IMPORTED", textwrap.dedent(self.imported))
        return text.replace("$CALLED", called).replace("$OUTSIDE", str(outside))
