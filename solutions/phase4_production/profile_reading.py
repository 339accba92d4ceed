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
    # --- exercise 4.19: start
    # Step 1: annotations, then the device's work or the host's. A trace of a GPU repeats the
    #         host's annotations under another category
    # Step 2: a trace without a step has no window
    events = trace_events(path)
    complete = [e for e in events if e.get("ph") == "X"]
    spans = [span_of(e, kind) for e in complete if (kind := annotated(e))]
    spans += device_work(complete) or host_work(complete)
    if not any(s.kind == "step" for s in spans):
        raise ValueError(f"{path} has no step: give the profiler a schedule, and call its step()")
    return Trace(tuple(spans), noted_changes(events))
    # --- exercise 4.19: end


def device_work(events: list[Event]) -> list[Span]:
    """The work of a GPU: events of a category in ``DEVICE``. A trace of a CPU has none.

    A "kernel" whose name begins with "nccl" is communication. ``launched`` is the begin of the
    event of category "cuda_runtime" or "cuda_driver" with the same ``args["correlation"]``. If
    there is none, it is the span's own begin.
    """
    # --- exercise 4.19: start
    # Step 3: the host's calls by their correlation, then the device's events
    calls = {
        e["args"].get("correlation"): e["begin"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    calls.pop(None, None)
    spans = []
    for e in events:
        if e.get("cat") in DEVICE:
            nccl = e["cat"] == "kernel" and e["name"].startswith("nccl")
            kind = "communication" if nccl else DEVICE[e["cat"]]
            spans.append(span_of(e, kind, calls.get(e["args"].get("correlation"))))
    return spans
    # --- exercise 4.19: end


def host_work(events: list[Event]) -> list[Span]:
    """The compute of a CPU: operators, which are events of category "cpu_op" named "aten::…".

    Operators call each other, and only the outermost counts: an operator that lies in another one
    of its lane does not. Of two with equal times the first in the file counts. An operator that
    lies in a data span of its lane is the loader's work, and does not count either.
    """
    # --- exercise 4.19: start
    # Step 4: from left to right, the longer one first. An operator that ends before or where an
    #         earlier one ended lies in it. A data span comes first and hides operators as well
    spans: list[Span] = []
    reached: dict[Lane, int] = {}
    data = [span_of(e, "data") for e in events if annotated(e) == "data"]
    operators = [e for e in events if e.get("cat") == "cpu_op" and e["name"].startswith("aten::")]
    both = data + [span_of(e, "compute") for e in operators]
    for span in sorted(both, key=lambda s: (s.begin, -s.end)):
        if span.end > reached.get(span.lane, span.begin - 1):
            reached[span.lane] = span.end
            spans += [span] if span.kind == "compute" else []
    return spans
    # --- exercise 4.19: end


def read_snapshot(path: str | Path, device: int = 0) -> tuple[Change, ...]:
    """The changes in a memory snapshot, from the actions that ``snapshot_entries`` reads.

    An "alloc" adds its ``size``, and a "free_completed" takes it away. All other actions change
    nothing. ``at`` is 1000 · ``time_us``, and ``site`` is ``site_of`` its ``frames``.
    """
    # --- exercise 4.19: start
    # Step 5: bytes are free when "free_completed" says so; "free_requested" may come long before
    sign = {"alloc": 1, "free_completed": -1}
    found = []
    for e in snapshot_entries(path, device):
        if e["action"] in sign:
            size, site = sign[e["action"]] * e["size"], site_of(e.get("frames", ()))
            found.append(Change(1000 * e["time_us"], size, e["addr"], site))
    return tuple(found)
    # --- exercise 4.19: end


def parts(trace: Trace) -> dict[str, int]:
    """The ns of the window that belong to each of ``PARTS``, in that order; together all of it.

    A moment belongs to the first kind in ``PARTS`` of which a span runs, on any lane. If only
    steps run, it belongs to "launch". So communication is the exposed one alone.
    """
    # --- exercise 4.19: start
    # Step 6: what is left of the window shrinks from part to part
    left, found = [trace.window], {}
    for part in PARTS[:-1]:
        rest = without(left, [(s.begin, s.end) for s in trace.of(part)])
        found[part] = length(left) - length(rest)
        left = rest
    return {**found, "launch": length(left)}
    # --- exercise 4.19: end


def launch_gaps(trace: Trace) -> dict[Lane, int]:
    """For each lane with work: the ns in which it had nothing to do, because the host was late.

    That is, before each piece of work but the lane's first: the time from the latest end of all
    before it until it was launched or began, whichever came first. Steps do not matter here.
    """
    # --- exercise 4.19: start
    # Step 7: per lane from left to right; remember the latest end, not the last one
    gaps: dict[Lane, int] = {}
    reached: dict[Lane, int] = {}
    for span in trace.of("compute", "communication", "copy"):
        before = reached.get(span.lane, span.begin)
        late = min(span.launched, span.begin) - before
        gaps[span.lane] = gaps.get(span.lane, 0) + max(0, late)
        reached[span.lane] = max(before, span.end)
    return gaps
    # --- exercise 4.19: end


def growth(trace: Trace, changes: Iterable[Change]) -> list[int]:
    """For each step but the first: the bytes in use at its end, less those at the end before it.

    A change at the very end of a step belongs to that step.
    """
    # --- exercise 4.19: start
    # Step 8: nobody knows the bytes at the begin of a trace, but their changes are known
    ends = sorted(s.end for s in trace.of("step"))
    changes = list(changes)
    spans = pairwise(ends)
    return [sum(c.size for c in changes if before < c.at <= end) for before, end in spans]
    # --- exercise 4.19: end


def kept(trace: Trace, changes: Iterable[Change]) -> dict[str, int]:
    """By site, the bytes that were taken after the first step's end, and are kept.

    They are in use at the last step's end. ``changes`` are in their order. A change below 0 gives
    back the bytes at its address. Sites that keep nothing are not in it.
    """
    # --- exercise 4.19: start
    # Step 9: an address is used again and again: follow who has it now
    ends = sorted(s.end for s in trace.of("step"))
    owners: dict[int, Change] = {}
    for change in changes:
        if ends[0] < change.at <= ends[-1]:
            owners.pop(change.address, None)
            if change.size > 0:
                owners[change.address] = change
    found: Counter[str] = Counter()
    for change in owners.values():
        found[change.site] += change.size
    return dict(found)
    # --- exercise 4.19: end


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
    # --- exercise 4.19: start
    # Step 10: memory: a run that ends is worse than a slow one
    # Step 11: the largest part, and the spans behind it
    changes = list(trace.changes if changes is None else changes)
    grown, steps = growth(trace, changes), len(trace.of("step"))
    if steps >= 3 and min(grown) >= leak:
        sites = kept(trace, changes)
        worst = max(sorted(sites), key=sites.__getitem__)
        return Finding("memory", min(grown), sum(sites.values()), steps, worst)
    lost, (begin, end) = parts(trace), trace.window
    part = max(LOST, key=lost.__getitem__)
    part = part if lost[part] >= share * (end - begin) else "compute"
    detail = exposed_operation(trace) if part == "communication" else ""
    updates = [(s.begin, s.end) for s in trace.of("optimizer")]

    def behind(span: Span) -> bool:
        if part not in ("optimizer", "launch"):
            return span.kind == part and detail in ("", operation(span.name))
        updating = any(a <= span.launched < b for a, b in updates)
        return span.kind == "compute" and updating == (part == "optimizer")

    count = sum(behind(s) for s in trace.spans if begin <= s.launched < end)
    return Finding(part, lost[part], end - begin, count, detail)
    # --- exercise 4.19: end


def exposed_operation(trace: Trace) -> str:
    """The operation with the most ns in the window in which no compute runs; first by name."""
    # --- exercise 4.19: start
    # Step 12: each operation for itself: two that overlap are both exposed
    busy = [(s.begin, s.end) for s in trace.of("compute")]
    (begin, end), exposed = trace.window, {}
    for name in sorted({operation(s.name) for s in trace.of("communication")}):
        mine = [s for s in trace.of("communication") if operation(s.name) == name]
        inside = [(max(s.begin, begin), min(s.end, end)) for s in mine]
        exposed[name] = length(without(inside, busy))
    return max(exposed, key=exposed.__getitem__)
    # --- exercise 4.19: end


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
