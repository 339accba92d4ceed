"""Run a check's ranks: on real or virtual ones, within the check's limits, with its seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from ..host import gpus
from ..host.program_clock import spent
from ..observe.log import SHARED_GPU
from ..ranks.results import RankFailure, RankResults
from ..ranks.run import run_ranks
from ..virtual import VirtualResults, run_worlds
from ..virtual.rules import rules_named
from .verdicts import NotRun

# seconds on a machine that does nothing else (``ProgramClock``)
CHECK_LIMIT = 60.0  # for all runs of one check
RUN_LIMIT = 10.0  # for one run of ranks, unless the check says otherwise
INTERLEAVINGS = 2  # explored by every run on virtual ranks
DELAYED = 8  # the same, where timing is what is checked
R = TypeVar("R", bound=RankResults)
Body = Callable[..., Any]


class Place(Protocol):
    """The place where ranks run: ``run_ranks`` and ``run_worlds`` of this machine,
    or of a sandbox on it."""

    def run_ranks(self, body: Body, size: int, /, *args: Any, **options: Any) -> RankResults:
        """Real ranks."""

    def run_worlds(
        self, body: Body, sizes: Sequence[int], /, *args: Any, **options: Any
    ) -> list[VirtualResults]:
        """Virtual ones."""


class Here:
    """This machine, without walls around ranks."""

    run_ranks = staticmethod(run_ranks)
    run_worlds = staticmethod(run_worlds)


HERE = Here()


class Runner:
    """``run(body, world_size, *args, timeout=…)`` for one check, on real ranks."""

    ways = 1  # in which each run is made

    def __init__(self, files: tuple[str, ...], seed: int, device: str, place: Place = HERE) -> None:
        self.files, self.seed, self.device, self.place = files, seed, device, place
        self.end = spent() + CHECK_LIMIT * self.ways
        self.printed: list[str] = []  # printed by each rank of the run whose values were read last

    def note(self, results: R) -> R:
        """Remember the ranks' output as soon as the check reads their results."""

        def read() -> None:
            self.printed = results.output

        results.on_read = read
        return results

    def limit(self, seconds: float) -> float:
        """Seconds for the next run: as many as it asks for, but no more than the check has left."""
        return round(min(seconds, max(1.0, self.end - spent())), 1)

    def __call__(self, body: Body, world_size: int, *args: Any, **options: Any) -> RankResults:
        """``run_ranks`` with the defaults of checks."""
        defaults = {"device": self.device, "seed": self.seed, "learner_files": self.files}
        limit = self.limit(options.pop("timeout", RUN_LIMIT))
        try:
            options = {"timeout": limit} | defaults | options
            results = self.place.run_ranks(body, world_size, *args, **options)
        except RankFailure as failure:
            if failure.cause == SHARED_GPU and self.device == "cuda" and gpus.count() < world_size:
                raise NotRun("needs", f"{world_size} GPUs: {failure.message}") from None
            raise
        return self.note(results)

    def worlds(
        self, body: Body, world_sizes: Sequence[int], *args: Any, **options: Any
    ) -> list[RankResults]:
        """The results for several world sizes."""
        return [self(body, w, *args, **options) for w in world_sizes]


class VirtualRunner(Runner):
    """The same on virtual ranks: several interleavings each time, several sizes in one process."""

    rules = "gloo"
    interleavings, delayed = INTERLEAVINGS, DELAYED

    def __call__(self, body: Body, world_size: int, *args: Any, **options: Any) -> RankResults:
        """``run_virtual`` with the defaults of checks."""
        return self.worlds(body, (world_size,), *args, **options)[0]

    def worlds(
        self, body: Body, world_sizes: Sequence[int], *args: Any, **options: Any
    ) -> list[RankResults]:
        """The results for several world sizes."""
        more = self.delayed if options.pop("delays", False) else self.interleavings
        return [*self._run(body, world_sizes, args, {"seed": self.seed, "seeds": more} | options)]

    def simulate(self, body: Body, world_size: int, *args: Any, **options: Any) -> VirtualResults:
        """One run in the order of virtual time, for checks of the clock; see ``run_virtual``.

        Its ``clock`` and ``traffic`` are those of the ``cluster`` given. (Links that an adversarial
        order reserves too early would make it late.)
        """
        return self._run(body, (world_size,), args, options)[0]

    def _run(
        self,
        body: Body,
        world_sizes: Sequence[int],
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> list[VirtualResults]:
        each = options.pop("timeout", RUN_LIMIT)
        runs = len(world_sizes) * options.get("seeds", 1) * self.ways
        limit = self.limit(each * runs)
        every = self.place.run_worlds(
            body,
            world_sizes,
            *args,
            base_seed=self.seed,
            timeout=limit,
            each=min(each, limit),
            patience=each,
            learner_files=self.files,
            **{"rules": self.rules} | options,
        )
        return [self.note(results) for results in every]


class NcclRunner(VirtualRunner):
    """The same by NCCL's rules, in each of the three ways in which PyTorch runs NCCL."""

    rules = "nccl"
    ways = len(rules_named(rules))


class BriefNcclRunner(NcclRunner):
    """The same where nobody has asked for this tier: one interleaving of each way.

    A program that NCCL's order blocks is blocked in all interleavings.
    """

    interleavings = delayed = 1
