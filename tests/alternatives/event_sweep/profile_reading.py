# for: 4.19
"""Written differently: a sweep over begins and ends, and a stack of open operators."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from given.profile_files import (
    Change,
    Finding,
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


def read_trace(path):
    events = trace_events(path)
    whole = [event for event in events if event.get("ph") == "X"]
    spans = [span_of(event, annotated(event)) for event in whole if annotated(event)]
    if "step" not in {span.kind for span in spans}:
        raise ValueError("no step")
    work = device_work(whole)
    return Trace((*spans, *(work if work else host_work(whole))), noted_changes(events))


def device_work(events):
    launches = {}
    for event in events:
        number = event.get("args", {}).get("correlation")
        if number is not None and event.get("cat", "").startswith(("cuda_runtime", "cuda_driver")):
            launches[number] = event["begin"]
    found = []
    for event in events:
        match event.get("cat"):
            case "kernel":
                kind = "communication" if event["name"][:4] == "nccl" else "compute"
            case "gpu_memcpy" | "gpu_memset":
                kind = "copy"
            case _:
                continue
        number = event.get("args", {}).get("correlation", "none")
        found.append(span_of(event, kind, launches.get(number, event["begin"])))
    return found


def host_work(events):
    lanes = defaultdict(list)
    for number, event in enumerate(events):
        loads = annotated(event) == "data"
        if loads or (event.get("cat") == "cpu_op" and event["name"].startswith("aten::")):
            place = (event["begin"], -event["end"], not loads, number)
            lanes[event["pid"], event["tid"]].append((place, loads, event))
    found = []
    for rows in lanes.values():
        open_ = []
        for _, loads, event in sorted(rows, key=lambda row: row[0]):
            while open_ and open_[-1] < event["end"]:
                open_.pop()
            if not open_ and not loads:
                found.append(span_of(event, "compute"))
            open_.append(event["end"])
    return found


def read_snapshot(path, device=0):
    found = []
    for entry in snapshot_entries(path, device):
        size = {"alloc": entry.get("size", 0), "free_completed": -entry.get("size", 0)}
        if entry["action"] in size:
            place = site_of(entry.get("frames") or [])
            found.append(
                Change(entry["time_us"] * 1000, size[entry["action"]], entry["addr"], place)
            )
    return tuple(found)


def sweep(spans, window):
    """(kinds with the number of their spans, ns) between two edges."""
    low, high = window
    edges = [(low, None, 0), (high, None, 0)]
    for span in spans:
        begin, end = max(span.begin, low), min(span.end, high)
        if begin < end:
            edges += [(begin, span, 1), (end, span, -1)]
    edges.sort(key=lambda edge: edge[0])
    running = defaultdict(int)
    for (at, span, more), (later, _, _) in pairwise(edges):
        if span is not None:
            running[span.kind] += more
            running[operation(span.name)] += more if span.kind == "communication" else 0
        yield running, later - at


def parts(trace):
    found = dict.fromkeys(PARTS, 0)
    for running, ns in sweep(trace.of(*PARTS[:-1]), trace.window):
        found[next((part for part in PARTS[:-1] if running[part]), "launch")] += ns
    return found


def launch_gaps(trace):
    found, last = {}, {}
    for span in trace.of("compute", "communication", "copy"):
        found.setdefault(span.lane, 0)
        ready = min(span.launched, span.begin)
        if span.lane in last and ready > last[span.lane]:
            found[span.lane] += ready - last[span.lane]
        last[span.lane] = max(last.get(span.lane, span.end), span.end)
    return found


def growth(trace, changes):
    changes = list(changes)
    held = [
        sum(change.size for change in changes if change.at <= end)
        for end in sorted(span.end for span in trace.of("step"))
    ]
    return [after - before for before, after in pairwise(held)]


def kept(trace, changes):
    ends = [span.end for span in trace.of("step")]
    first, last, owner = min(ends), max(ends), {}
    for change in changes:
        if change.at > last:
            break
        owner[change.address] = change
    found = {}
    for change in owner.values():
        if change.size > 0 and change.at > first:
            found[change.site] = found.get(change.site, 0) + change.size
    return found


def bottleneck(trace, changes=None, *, share=0.1, leak=2**20):
    changes = trace.changes if changes is None else tuple(changes)
    grown = growth(trace, changes)
    if len(grown) > 1 and all(size >= leak for size in grown):
        sites = kept(trace, changes)
        worst = sorted(sites, key=lambda site: (-sites[site], site))[0]
        return Finding("memory", min(grown), sum(sites.values()), len(grown) + 1, worst)
    found, (low, high) = parts(trace), trace.window
    part = sorted(LOST, key=lambda each: -found[each])[0]
    if found[part] < share * (high - low):
        part = "compute"
    detail = exposed_operation(trace) if part == "communication" else ""
    count = 0
    for span in trace.spans:
        updating = any(u.begin <= span.launched < u.end for u in trace.of("optimizer"))
        mine = span.kind == part
        if part in ("optimizer", "launch"):
            mine = span.kind == "compute" and updating is (part == "optimizer")
        elif part == "communication":
            mine = mine and operation(span.name) == detail
        count += mine and low <= span.launched < high
    return Finding(part, found[part], high - low, count, detail)


def exposed_operation(trace):
    names = {operation(span.name) for span in trace.of("communication")}
    exposed = dict.fromkeys(sorted(names), 0)
    for running, ns in sweep(trace.of("compute", "communication"), trace.window):
        for name in exposed:
            exposed[name] += ns if running[name] and not running["compute"] else 0
    return max(exposed, key=lambda name: exposed[name])
