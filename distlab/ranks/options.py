"""Options of runs: those that real and virtual ranks share, and those of real ranks alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """``timeout``: seconds. ``learner_files``: frames in these files are the learner's lines.

    ``ledger``: record communication, which also makes hang reports exact. ``values``: its events
    keep the values that were passed in. ``process_group=False``: no group is made.
    """

    timeout: float = 20.0
    learner_files: tuple[str, ...] = ()
    ledger: bool = True
    values: bool = False
    process_group: bool = True


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """How real ranks are run.

    ``device``: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL with a GPU per rank, else several ranks share a
    GPU over gloo, which passes no messages between GPUs). ``delays``: random pauses of up to 10 ms
    before each communication, drawn from ``seed``. ``enter(rank)`` is called in each rank before
    its process group is made. ``Network.placement``, for example, moves the rank to a node of a
    cluster.
    """

    device: str = "cpu"
    seed: int = 0
    delays: bool = False
    enter: Callable[[int], None] | None = None
