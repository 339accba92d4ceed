# Exercises 4.19: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase4.py 4.19
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Reading a profile: to what a run loses its time, and which line keeps its memory.

    python -m solutions.phase4_production.profile_reading TRACE --snapshot SNAPSHOT

    a moment's part  =  the first of compute, communication, copy, data, optimizer that runs then;
                        launch, if none of them runs.      The six parts add up to the window.

A device that does nothing has nothing in its queue. So the host's place at that moment is the
reason: it waits for the loader, it is in the optimizer, or it has not launched the next work yet.
A trace of a CPU is read in the same way: its operators are the work, and launch is Python's time.

Cost: O(n·log n) for n events, no message. Invariant: every moment of the window has one part.
Sources: Chrome's trace event format; ``torch.cuda.memory._snapshot``; Holistic Trace Analysis
(temporal breakdown, idle time breakdown).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from given.intervals import length, without
from given.profile_files import (
    Change,
    Event,
    Finding,
    Lane,
    Span,
    Trace,
    annotated,
    noted_changes,
    operation,
    site_of,
    snapshot_entries,
    span_of,
    trace_events,
)

LOST = ("communication", "copy", "data", "optimizer", "launch")
PARTS = ("compute", *LOST)
DEVICE = {"kernel": "compute", "gpu_memcpy": "copy", "gpu_memset": "copy"}


def read_trace(path: str | Path) -> Trace:
    """The trace of one process from a file, which ``trace_events`` reads.

    Complete events (``ph`` is "X") become spans of these kinds, and all others are left out:

    - step, data, optimizer, communication: events of the category (``cat``) "user_annotation"
      that ``annotated`` knows by their names;
    - compute, copy, communication: ``device_work``. If there is none, compute: ``host_work``.

    A ``lane`` is (``pid``, ``tid``). ``launched`` is the begin, unless ``device_work`` says more.
    ``changes`` are those that the profiler noted (``noted_changes``).

    Raises ValueError for a file that is no trace, and for a trace without a step.
    """
    # Step 1: annotations, then the device's work or the host's. A trace of a GPU repeats the
    #         host's annotations under another category
    # Step 2: a trace without a step has no window
    raise NotImplementedError("exercise 4.19")


def device_work(events: list[Event]) -> list[Span]:
    """The work of a GPU: events of a category in ``DEVICE``. A trace of a CPU has none.

    A "kernel" whose name begins with "nccl" is communication. ``launched`` is the begin of the
    event of category "cuda_runtime" or "cuda_driver" with the same ``args["correlation"]``. If
    there is none, it is the span's own begin.
    """
    # Step 3: the host's calls by their correlation, then the device's events
    raise NotImplementedError("exercise 4.19")


def host_work(events: list[Event]) -> list[Span]:
    """The compute of a CPU: operators, which are events of category "cpu_op" named "aten::…".

    Operators call each other, and only the outermost counts: an operator that lies in another one
    of its lane does not. Of two with equal times the first in the file counts. An operator that
    lies in a data span of its lane is the loader's work, and does not count either.
    """
    # Step 4: from left to right, the longer one first. An operator that ends before or where an
    #         earlier one ended lies in it. A data span comes first and hides operators as well
    raise NotImplementedError("exercise 4.19")


def read_snapshot(path: str | Path, device: int = 0) -> tuple[Change, ...]:
    """The changes in a memory snapshot, from the actions that ``snapshot_entries`` reads.

    An "alloc" adds its ``size``, and a "free_completed" takes it away. All other actions change
    nothing. ``at`` is 1000 · ``time_us``, and ``site`` is ``site_of`` its ``frames``.
    """
    # Step 5: bytes are free when "free_completed" says so; "free_requested" may come long before
    raise NotImplementedError("exercise 4.19")


def parts(trace: Trace) -> dict[str, int]:
    """The ns of the window that belong to each of ``PARTS``, in that order; together all of it.

    A moment belongs to the first kind in ``PARTS`` of which a span runs, on any lane. If only
    steps run, it belongs to "launch". So communication is the exposed one alone.
    """
    # Step 6: what is left of the window shrinks from part to part
    raise NotImplementedError("exercise 4.19")


def launch_gaps(trace: Trace) -> dict[Lane, int]:
    """For each lane with work: the ns in which it had nothing to do, because the host was late.

    That is, before each piece of work but the lane's first: the time from the latest end of all
    before it until it was launched or began, whichever came first. Steps do not matter here.
    """
    # Step 7: per lane from left to right; remember the latest end, not the last one
    raise NotImplementedError("exercise 4.19")


def growth(trace: Trace, changes: Iterable[Change]) -> list[int]:
    """For each step but the first: the bytes in use at its end, less those at the end before it.

    A change at the very end of a step belongs to that step.
    """
    # Step 8: nobody knows the bytes at the begin of a trace, but their changes are known
    raise NotImplementedError("exercise 4.19")


def kept(trace: Trace, changes: Iterable[Change]) -> dict[str, int]:
    """By site, the bytes that were taken after the first step's end, and are kept.

    They are in use at the last step's end. ``changes`` are in their order. A change below 0 gives
    back the bytes at its address. Sites that keep nothing are not in it.
    """
    # Step 9: an address is used again and again: follow who has it now
    raise NotImplementedError("exercise 4.19")


def bottleneck(
    trace: Trace,
    changes: Iterable[Change] | None = None,
    *,
    share: float = 0.1,
    leak: int = 2**20,
) -> Finding:
    """What to mend first. ``changes``: those of a snapshot; without them the trace's own.

    "memory" comes first, if there are three steps or more, and each but the first keeps ``leak``
    bytes or more. Then comes the largest of ``LOST`` (of equal ones the first), if it has
    ``share`` of the window or more. If not, it is "compute".

    ``share`` and ``leak`` are above 0. ``amount`` and ``whole`` are ns of the part and of the
    window. For "memory" they are the least growth of a step, and the bytes that ``kept`` names
    in all. ``count`` and ``detail``:

    - memory: steps; the site that keeps most bytes (of equal ones the first by name);
    - communication: its spans of the ``operation`` whose spans have the most ns in the window
      beside compute (of equal ones the first by name); this operation;
    - optimizer, launch: compute launched while an optimizer runs, and all other compute; "";
    - copy, data, compute: spans of that kind; "".

    Spans count if they were launched in the window. An interval has its begin, and not its end.
    """
    # Step 10: memory: a run that ends is worse than a slow one
    # Step 11: the largest part, and the spans behind it
    raise NotImplementedError("exercise 4.19")


def exposed_operation(trace: Trace) -> str:
    """The operation with the most ns in the window in which no compute runs; first by name."""
    # Step 12: each operation for itself: two that overlap are both exposed
    raise NotImplementedError("exercise 4.19")


def main() -> int:
    """The command line: the parts of a profile, its growth, and the bottleneck."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path, help="file of torch.profiler: .json or .json.gz")
    parser.add_argument("--snapshot", type=Path, help="file of torch.cuda.memory._dump_snapshot")
    options = parser.parse_args()
    try:
        trace = read_trace(options.trace)
        changes = read_snapshot(options.snapshot) if options.snapshot else trace.changes
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    lost = parts(trace)
    for part, ns in lost.items():
        print(f"{part:14}{ns / 1e6:12.3f} ms{ns / sum(lost.values()):8.1%}")
    print("kept per step ", *(f"{size:,}" for size in growth(trace, changes)), "bytes")
    print(bottleneck(trace, changes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
