# for: 4.19
"""Written differently: pieces between edges are painted, the most important part last."""

from __future__ import annotations

import bisect
from collections import Counter

from given import profile_files as files
from given.profile_files import Change, Finding, Trace

LOST = ("communication", "copy", "data", "optimizer", "launch")
PARTS = ("compute", *LOST)


def read_trace(path):
    events = files.trace_events(path)
    complete = [event for event in events if event.get("ph") == "X"]
    spans = device_work(complete) or host_work(complete)
    for event in complete:
        kind = files.annotated(event)
        if kind is not None:
            spans.append(files.span_of(event, kind))
    if all(span.kind != "step" for span in spans):
        raise ValueError("a trace without a step")
    return Trace(tuple(spans), files.noted_changes(events))


def device_work(events):
    kinds = {"kernel": "compute", "gpu_memcpy": "copy", "gpu_memset": "copy"}
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    begins = {e["args"]["correlation"]: e["begin"] for e in calls if "correlation" in e["args"]}
    found = []
    for event in events:
        kind = kinds.get(event.get("cat"))
        if kind:
            if kind == "compute" and event["name"].startswith("nccl"):
                kind = "communication"
            launched = begins.get(event["args"].get("correlation", object()))
            found.append(files.span_of(event, kind, launched))
    return found


def host_work(events):
    """Longest first: an operator counts unless one that is there already holds it."""
    rows = []
    for number, event in enumerate(events):
        loads = files.annotated(event) == "data"
        if loads or (event.get("cat") == "cpu_op" and event["name"].startswith("aten::")):
            rows.append((event["begin"] - event["end"], not loads, number, event))
    outer, found = {}, []
    for _, works, _, event in sorted(rows, key=lambda row: row[:3]):
        there = outer.setdefault((event["pid"], event["tid"]), [])
        at = bisect.bisect_right(there, (event["begin"], float("inf")))
        if any(end >= event["end"] for _, end in there[max(0, at - 2) : at]):
            continue
        bisect.insort(there, (event["begin"], event["end"]))
        if works:
            found.append(files.span_of(event, "compute"))
    return found


def read_snapshot(path, device=0):
    entries = files.snapshot_entries(path, device)
    taken = [e for e in entries if e["action"] in ("alloc", "free_completed")]
    return tuple(
        Change(
            at=e["time_us"] * 1000,
            size=e["size"] if e["action"] == "alloc" else -e["size"],
            address=e["addr"],
            site=files.site_of(e.get("frames", [])),
        )
        for e in taken
    )


def painted(trace, kinds, inside=lambda span: True):
    """ns of the window by the last kind in ``kinds`` that covers a piece; None: none does."""
    low, high = trace.window
    spans = [s for s in trace.of(*kinds) if inside(s)]
    edges = sorted({low, high, *(t for s in spans for t in (s.begin, s.end) if low < t < high)})
    colours = [None] * (len(edges) - 1)
    for kind in kinds:
        for span in spans:
            if span.kind == kind:
                first = bisect.bisect_left(edges, span.begin)
                last = bisect.bisect_left(edges, span.end)
                for k in range(first, min(last, len(colours))):
                    colours[k] = kind
    found = Counter()
    for k, colour in enumerate(colours):
        found[colour] += edges[k + 1] - edges[k]
    return found


def parts(trace):
    found = painted(trace, PARTS[-2::-1])
    return {part: found[None if part == "launch" else part] for part in PARTS}


def launch_gaps(trace):
    lanes = {}
    for span in trace.of("compute", "communication", "copy"):
        lanes.setdefault(span.lane, []).append(span)
    found = {}
    for lane, spans in lanes.items():
        free = [max(s.end for s in spans[: k + 1]) for k in range(len(spans))]
        late = [min(s.launched, s.begin) - e for s, e in zip(spans[1:], free, strict=False)]
        found[lane] = sum(ns for ns in late if ns > 0)
    return found


def growth(trace, changes):
    ends = sorted(span.end for span in trace.of("step"))
    grown = [0] * (len(ends) + 1)
    for change in changes:
        grown[bisect.bisect_left(ends, change.at)] += change.size
    return grown[1:-1]


def kept(trace, changes):
    ends = sorted(span.end for span in trace.of("step"))
    inside = [c for c in changes if ends[0] < c.at <= ends[-1]]
    seen, found = set(), {}
    for change in reversed(inside):
        if change.address not in seen and change.size > 0:
            found[change.site] = found.get(change.site, 0) + change.size
        seen.add(change.address)
    return found


def bottleneck(trace, changes=None, *, share=0.1, leak=2**20):
    if changes is None:
        changes = trace.changes
    changes = list(changes)
    grown = growth(trace, changes)
    if len(grown) >= 2 and min(grown) >= leak:
        sites = sorted(kept(trace, changes).items(), key=lambda item: (-item[1], item[0]))
        total = sum(size for _, size in sites)
        return Finding("memory", min(grown), total, len(grown) + 1, sites[0][0])
    lost = parts(trace)
    low, high = trace.window
    part = LOST[max(range(len(LOST)), key=lambda k: (lost[LOST[k]], -k))]
    if lost[part] < share * (high - low):
        part = "compute"
    detail = ""
    spans = [s for s in trace.spans if low <= s.launched < high]
    if part in ("optimizer", "launch"):
        updates = trace.of("optimizer")
        work = [s for s in spans if s.kind == "compute"]
        mine = [s for s in work if any(u.begin <= s.launched < u.end for u in updates)]
        count = len(mine) if part == "optimizer" else len(work) - len(mine)
    elif part == "communication":
        detail = exposed_operation(trace)
        count = sum(s.kind == part and files.operation(s.name) == detail for s in spans)
    else:
        count = sum(s.kind == part for s in spans)
    return Finding(part, lost[part], high - low, count, detail)


def exposed_operation(trace):
    names = sorted({files.operation(s.name) for s in trace.of("communication")})
    exposed = []
    for name in names:
        kinds = ("communication", "compute")
        mine = painted(
            trace, kinds, lambda s, n=name: s.kind == "compute" or files.operation(s.name) == n
        )
        exposed.append(mine["communication"])
    return names[exposed.index(max(exposed))]
