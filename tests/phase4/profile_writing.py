"""Planted profiles become files: a trace as the profiler exports it, a snapshot of memory."""

from __future__ import annotations

import gzip
import json
import pickle
import random
from pathlib import Path
from typing import Any

from tests.phase4.planted_profiles import HOST, MIB, ORIGIN, Profile


def write_trace(profile: Profile, path: Path, *, memory: int | None = None) -> None:
    """Write the events as a profiler does, in no order; ``memory``: the device of the changes."""
    events = [*profile.events, *noise(profile.events)]
    if memory is not None:
        events += [note(at - ORIGIN, size, place, memory) for at, size, place, _ in profile.changes]
    if memory == 1:
        events += [note(at - ORIGIN, 512, place, 0) for at, _, place, _ in profile.changes]
    # what begins together keeps its order
    events.sort(key=lambda e: random.Random(e["ts"]).random())
    micros = [{**e, **{k: e[k] / 1000 for k in ("ts", "dur") if k in e}} for e in events]
    content = {"schemaVersion": 1, "baseTimeNanoseconds": ORIGIN, "traceEvents": micros}
    data = json.dumps(content).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def note(at: int, size: int, address: int, device: int) -> dict[str, Any]:
    """The event of a change of memory."""
    args = {"Bytes": size, "Addr": address, "Device Type": device, "Device Id": device - 1}
    place = {"pid": HOST, "tid": HOST, "ts": at}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", **place, "args": args}


def noise(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events of a trace that no reader needs: names, arrows, Python's calls, the profiler's own."""
    first, last = (pick(e["ts"] for e in events) for pick in (min, max))
    whole = {"ts": first - 7_000, "dur": last - first + 9_000}
    return [
        {"ph": "M", "name": "process_name", "ts": first, "pid": HOST, "tid": 0},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 3, "ts": first, "pid": HOST, "tid": HOST},
        {"ph": "i", "cat": "user_annotation", "name": "Optimizer.step#moment", "ts": first}
        | {"pid": HOST, "tid": HOST},
        {"ph": "i", "name": "Record Window End", "s": "g", "ts": last, "pid": "", "tid": ""},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "P"}
        | whole,
        {"ph": "X", "cat": "python_function", "name": "train.py(3): main", "pid": HOST, "tid": HOST}
        | whole,
        {"ph": "X", "cat": "user_annotation", "name": "nccl:all_gather", "pid": HOST, "tid": HOST}
        | whole,
        {"ph": "X", "cat": "user_annotation", "name": "my part", "pid": HOST, "tid": HOST} | whole,
    ]


def write_snapshot(profile: Profile, path: Path) -> None:
    """Write the changes as those of device 1 of a snapshot, among other actions."""
    inside = {"filename": "/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py"}
    entries: list[dict[str, Any]] = []
    for number, (at, size, address, site) in enumerate(profile.changes):
        entry = {"addr": address, "size": abs(size), "stream": 0, "time_us": at // 1000}
        file, _, line = site.rpartition(":")
        frames = [{"filename": "??", "line": 0, "name": "malloc"}, {**inside, "line": 134}]
        frames += [{"filename": file, "line": int(line or 0)}] * bool(site)
        frames += [{"filename": "/home/me/main.py", "line": 99}] * bool(site)
        if size > 0:
            if number % 5 == 1:
                segment = {"action": "segment_alloc", "size": 20 * MIB}
                entries.append({**entry, **segment, "frames": frames})
            entries.append({"action": "alloc", **entry, "frames": frames})
        else:
            asked = {**entry, "time_us": at // 1000 - 2}  # another stream still uses it
            entries.append({"action": "free_requested", **asked, "frames": []})
            entries.append({"action": "free_completed", **entry, "frames": []})
    entries.insert(9, {"action": "oom", "size": MIB, "device_free": 0, "stream": 0, "time_us": 1})
    other = [entry for entry in entries if entry["action"] == "segment_alloc"]
    content = {"segments": [], "device_traces": [other, entries], "allocator_settings": {}}
    path.write_bytes(pickle.dumps(content))
