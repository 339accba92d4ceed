# Exercises 2.9, 2.21: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase2.py 2.9
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Pipeline schedules as data: completed with messages, validated and counted before they run.

A model is divided into stages 0 … S-1, a batch into micro-batches 0 … m-1. A schedule says for
every rank which steps it takes, in order:

=========  =====================================================================================
kind       a step of stage s for micro-batch i
=========  =====================================================================================
F          forward: reads the output of F(s-1, i), stage 0 the data
B          backward: reads what F(s, i) kept and the gradient from B(s+1, i); the last stage reads
           the loss. With W steps in the schedule it computes the gradient of the input only
W          gradient of the weights, any time after B(s, i)
send F     sends the output of F(s, i) to the rank of stage s+1
recv F     receives the input of F(s, i) from the rank of stage s-1
send B     sends the gradient of stage s's input to the rank of stage s-1
recv B     receives the gradient of stage s's output from the rank of stage s+1
=========  =====================================================================================

Two stages on the same rank need no message between them. Every micro-batch crosses every boundary
between ranks twice: 2·m·(S-1) messages in all if no two neighbours share a rank. A message has no
name: the k-th send from one rank to another meets the k-th receive there.

Invariant: if a schedule completes when every send waits for its receive (a *rendezvous*), it
completes on every backend, however little that buffers. Two numbers judge a schedule. The
**bubble** is the share of the ranks' time that is idle. The **peak** is the largest number of
micro-batches whose activations a rank keeps. Sources: Huang et al. 2019 (GPipe, arXiv 1811.06965),
section 2.3. Narayanan et al. 2021 (arXiv 2104.04473), section 2.2. Qi et al. 2023 (arXiv
2401.10241) for W.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

COMPUTE = ("F", "B", "W")
COSTS = {"F": 1.0, "B": 2.0}  # a matrix product in forward, two in backward
SPLIT_COSTS = {"F": 1.0, "B": 1.0, "W": 1.0}


class Step(NamedTuple):
    """One step of a rank; see the module's table."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}({self.stage}, {self.micro_batch})"


Schedule = Sequence[Sequence[Step]]  # the steps of each rank, in order


def rank_of_stages(schedule: Schedule) -> dict[int, int]:
    """The rank that computes each stage; ValueError if two ranks compute the same stage."""
    found: dict[int, int] = {}
    for rank, steps in enumerate(schedule):
        for step in steps:
            if step.kind in COMPUTE and found.setdefault(step.stage, rank) != rank:
                raise ValueError(f"{step} is on rank {rank}, others of its stage are elsewhere")
    return found


def needs(step: Step, last: int) -> list[Step]:
    """The compute steps that must be done before compute step ``step``; ``last``: last stage."""
    kind, stage, micro_batch = step
    if kind == "W":
        return [Step("B", stage, micro_batch)]
    if kind == "B":
        found = [Step("F", stage, micro_batch)]
        return found if stage == last else [*found, Step("B", stage + 1, micro_batch)]
    return [Step("F", stage - 1, micro_batch)] if stage else []


def message_after(step: Step, last: int) -> tuple[Step, Step] | None:
    """The send at the step's own rank and the receive that it meets; None if nothing is sent."""
    kind, stage, micro_batch = step
    to = {"F": stage + 1, "B": stage - 1}.get(kind, -1)
    if not 0 <= to <= last:
        return None
    return Step(f"send {kind}", stage, micro_batch), Step(f"recv {kind}", to, micro_batch)


def with_messages(order: Schedule) -> list[list[Step]]:
    """Complete an order of compute steps (F, B, W per rank) with its sends and receives.

    The compute steps stay as they are, and so does ``order``; a rank may have none. Each result
    that another rank needs is sent once; stages of one rank need no message. The result is a new
    list per rank and needs no buffering: it completes when every send waits for its receive
    (``validate``). Raises ValueError if the order itself is impossible: ranks wait for each other,
    or for a step that no rank has.
    """
    # Step 1: go in rounds: every rank whose next compute step has all that it needs takes that step
    # Step 2: append the round's steps one by one, each with its message, at both ranks at once. So
    #         all lists come from one common order, and no rank waits for a step that comes later.
    #         In a round, senders come first: a receive then stands before the step during which its
    #         message arrives
    # Step 3: if no rank can go on in a round, the order is impossible
    raise NotImplementedError("exercise 2.9")


def validate(schedule: Schedule, stages: int, micro_batches: int) -> None:
    """Raise ValueError unless the schedule can run and is complete; a rank may have no steps.

    - F and B of every stage and micro-batch exactly once, all of a stage on one rank; with any W in
      the schedule, W as well;
    - every message that crosses ranks sent once and received once, by the ranks of its stages;
    - on each rank: F before B before W, receives before and sends after the step they belong to;
    - it completes if each rank takes its steps in order, and a send waits for its receive as a
      receive waits for its send;
    - messages from one rank to another meet in the order in which they are issued.

    ``schedule`` is not changed. Raises ValueError, too, if a number is below 1.
    """
    # Step 4: compare the steps that there are with those that should be: none missing or repeated
    # Step 5: then walk through it with all ranks (below)
    raise NotImplementedError("exercise 2.9")


def messages_of(steps: Sequence[Step], last: int) -> Iterator[tuple[Step, Step]]:
    """The (send, receive) of all compute ``steps``."""
    return (found for step in steps if (found := message_after(step, last)) is not None)


def _run_through(
    schedule: Schedule, rank_of: Mapping[int, int], crossing: Mapping[Step, Step]
) -> None:
    """Raise ValueError unless all ranks reach their end with rendezvous sends."""
    # Step 6: walk through all ranks at once. A compute step or a send needs earlier steps of its
    #         own rank. A send is taken only together with its receive, when that is the peer's next
    # Step 7: if no rank can move before all is done, name the step at which each rank stands
    raise NotImplementedError("exercise 2.9")


@dataclass(frozen=True)
class Replay:
    """When each rank takes its compute steps: (step, start, end) per rank, in order."""

    spans: list[list[tuple[Step, float, float]]]

    @property
    def seconds(self) -> float:
        """When the last rank is done."""
        return max(end for spans in self.spans for _, _, end in spans)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time, until the last is done, in which they don't compute."""
        # Step 1: divide the busy time of all ranks by (number of ranks · time of the whole run)
        raise NotImplementedError("exercise 2.21")


def replay(
    schedule: Schedule, costs: Mapping[str, float] | None = None, *, message: float = 0.0
) -> Replay:
    """Run a schedule (with or without messages) under a virtual clock.

    ``costs``: the time of a step of each kind (None: COSTS, with W steps SPLIT_COSTS).
    ``message``: the time from the end of a step until another rank has its result. A rank takes its
    compute steps in order. Each starts as soon as the rank is free and all that the step needs is
    there: sends delay no rank. A rank may have no steps; then it is idle all the time.
    ``schedule`` is not changed. Raises ValueError if the order is impossible: ranks wait for each
    other, or for a step that no rank has.
    """
    # Step 2: start = the later of "this rank is free" and "all that the step needs has arrived"
    raise NotImplementedError("exercise 2.21")


def peak_live(schedule: Schedule) -> list[int]:
    """Per rank, the most activations kept at a time, in units of one stage and micro-batch.

    They are kept from F to the last step that reads them: W if this rank has any, else B. Messages
    don't count. ``schedule`` is not changed.
    """
    # Step 3: count up at F and down at the step that frees them; the largest count is the peak
    raise NotImplementedError("exercise 2.21")
