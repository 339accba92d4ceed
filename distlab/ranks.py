"""Run a function on W ranks: W results, or one clear failure.

Ranks are forked from a process that has already imported torch, so a check with 4 ranks takes
about 0.1 s where ``torch.multiprocessing.spawn`` takes seconds. Each rank reports every
communication as it begins, is waited for and ends; the parent knows at any time where each rank
is. So it names a mismatch of collectives at once, proves a deadlock without waiting for a time-out
(every rank waits for a message that no rank has issued), and can say for a hang what each rank
waits in. Results come back as tensors and plain data; nothing from a rank is unpickled as code.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from . import gpus, system
from .failure import CheckFailed
from .ledger import Log

if TYPE_CHECKING:
    from .recorder import Ledger

PIPE_LOST = 97  # exit status of a rank that can't report any more


@dataclass
class RankContext:
    """What a rank's body is given: who it is, where it computes, and its recorder."""

    rank: int
    world_size: int
    device: torch.device
    seed: int
    ledger: Ledger | None = None

    def generator(self, salt: int = 0) -> torch.Generator:
        """A CPU generator that differs by seed, rank and ``salt``."""
        return torch.Generator().manual_seed((self.seed * 1_000_003 + self.rank) * 1009 + salt)

    def start_picture(self) -> None:
        """Leave what came before out of timelines: set-up, imports, warm-up."""
        if self.ledger is not None:
            self.ledger.picture_from = time.monotonic()

    def steps(self, count: int) -> Iterator[int]:
        """The numbers 0 … count - 1 of steps, of which the first warms up: no picture shows it."""
        for number in range(count):
            if number == 1:
                self.start_picture()
            yield number

    @contextlib.contextmanager
    def span(self, name: str, label: str = "") -> Iterator[None]:
        """Show what is computed inside as one ``name`` in timelines, with ``label`` written on it.

        Time spent asleep counts; what operators run inside is not shown. ``name``: one word.
        """
        if self.ledger is None:
            yield
            return
        with self.ledger.span(f"{name} {label}".strip()):
            yield

    @contextlib.contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Mark the communication issued inside with ``name`` (see ``Log.select``)."""
        if self.ledger is None:
            yield
            return
        before, self.ledger.region = self.ledger.region, name
        try:
            yield
        finally:
            self.ledger.region = before


@dataclass(frozen=True, kw_only=True)
class Options:
    """How ranks are run; see ``run_ranks``."""

    timeout: float = 20.0
    device: str = "cpu"
    ledger: bool = True
    process_group: bool = True
    seed: int = 0
    learner_files: tuple[str, ...] = ()
    delays: bool = False
    enter: Callable[[int], None] | None = None


class RankResults(list[Any]):
    """The W return values; ``logs`` and ``output`` (standard output and error) per rank.

    ``on_read`` is called whenever values are taken out: what is judged then is of this run.
    """

    on_read: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, values: list[Any], logs: list[Log], output: list[str]) -> None:
        super().__init__(values)
        self.logs = logs
        self.output = output

    def __iter__(self) -> Iterator[Any]:
        self.on_read()
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        self.on_read()
        return super().__getitem__(place)


@dataclass
class RankReport:
    """Where one rank was when the run ended."""

    rank: int
    state: str
    line: str = ""
    output: str = ""
    detail: dict[str, Any] = field(default_factory=dict)


class RankFailure(CheckFailed):
    """The run failed: ``kind`` is exception, crash, hang, mismatch, blank or error.

    ``reports`` tells for each rank where it was; ``cause`` equals ``kind`` unless an exception
    raised in a rank carried a cause of its own.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str,
        cause: str = "",
        rank: int | None = None,
        line: str = "",
        reports: list[RankReport] | None = None,
    ) -> None:
        super().__init__(message, cause=cause or kind, rank=rank, line=line)
        self.kind = kind
        self.reports = reports or []
        self.interleaving: int | None = None  # of virtual ranks: the seed that repeats it


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 20.0,
    device: str = "cpu",
    ledger: bool = True,
    process_group: bool = True,
    seed: int = 0,
    learner_files: tuple[str, ...] = (),
    delays: bool = False,
    enter: Callable[[int], None] | None = None,
) -> RankResults:
    """Run ``fn(ctx, *args)`` on ``world_size`` ranks and return what each returned.

    ``fn`` may be a closure; it returns tensors and plain data (numbers, strings, None, lists,
    tuples, dicts). ``device``: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL with a GPU per rank, else
    several ranks share a GPU over gloo, which passes no messages between GPUs). GPUs are hidden
    from this process from now on, unless it uses them already (see ``gpus``). ``ledger``: record
    communication, which also makes hang reports exact. ``process_group=False``: no group is made.
    ``learner_files``: frames in these files are reported as the learner's lines. ``delays``: random
    pauses of up to 10 ms before each communication, drawn from ``seed``. ``enter(rank)`` is called
    in each rank before its process group is made: ``Network.placement`` moves it to a node of a
    cluster.

    Raises RankFailure when a rank raises, dies, or does not end within ``timeout`` seconds, which
    begin when all are ready; when ranks are in different collectives; or when all wait for each
    other. Leaves no process behind.
    """
    from .rank_report import defaults_named  # after the dataclasses above, which they import
    from .rank_watch import Watch

    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    options = Options(
        timeout=timeout,
        device=device,
        ledger=ledger,
        process_group=process_group,
        seed=seed,
        learner_files=tuple(learner_files),
        delays=delays,
        enter=enter,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    with Watch(fn, world_size, args, options) as watch, defaults_named(watch.members, options):
        return watch.run()


def fork_problem(device: str = "cpu") -> str:
    """Why forking ranks for this device is not safe in this process; empty when it is."""
    if torch.cuda.is_initialized():
        return "CUDA is already in use in this process"
    if device == "cuda" and gpus.count() and not gpus.reach_forks():
        return "CUDA has answered this process that it has no GPU"
    if any(name.startswith("pt_autograd") for name in system.threads()):
        return "autograd has threads in this process, which a forked one would miss"
    return system.fork_obstacle()
