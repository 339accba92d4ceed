"""Ranks that do the same are run once: one of them runs, and stands for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..observe.failure import CheckFailed


class Fold:
    """The rank that runs in place of each rank. ``of[r] == r`` for the ranks that run.

    Ranks of one role do the same at the same times. So what a rank does to its ports and cards, the
    others of its role do to theirs, and one time stands for all of these. A group in which a rank
    runs has the ranks that stand for its members as members.

    Raises ValueError unless each rank that stands for others stands for itself.
    """

    def __init__(self, of: Sequence[int]) -> None:
        self.of = tuple(of)
        self.runs = tuple(sorted({*self.of}))
        self.times = Counter(self.of)  # the ranks for which each one stands
        self.all_run = len(self.runs) == len(self.of)
        self._running = frozenset(self.runs)
        if any(self.of[rank] != rank for rank in self.runs):
            raise ValueError("a rank that stands for others must run itself")

    def without(self, ranks: Sequence[int]) -> bool:
        """Whether none of ``ranks`` runs."""
        return self._running.isdisjoint(ranks)

    def running(self, group: Sequence[int]) -> int:
        """How many ranks of the group run."""
        return len(group) if self.all_run else len(self._running.intersection(group))

    def roles(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The ranks that run in place of ``ranks``, in the same order."""
        return tuple([self.of[rank] for rank in ranks])

    def refuse_absent(self, rank: int, peer: int | None) -> None:
        """Raise CheckFailed unless the rank to which ``rank`` sends, or from which it receives,
        runs."""
        if self.all_run or peer in self._running:
            return
        raise CheckFailed(
            f"rank {rank} sends to or receives from rank {'any' if peer is None else peer}, which "
            f"does not run: rank {self.of[peer or 0]} stands for it. Run every rank (--every-rank)",
            cause="absent-rank",
            rank=rank,
        )
