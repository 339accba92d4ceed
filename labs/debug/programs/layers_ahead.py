"""Three steps of ten layers. Each layer's weights are gathered while the layer before it computes.

The profile of the steps is written as a file and read again.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LAYERS, STEPS, WEIGHTS = 10, 3, 60_000
COMPUTES = 1.5e-3  # seconds of a layer


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """What the reading finds: the parts of the window in µs, and the bottleneck."""
    mine = torch.ones(WEIGHTS)
    whole = [torch.empty(ctx.world_size * WEIGHTS) for _ in range(2)]
    events: list[dict[str, Any]] = []

    def note(cat: str, name: str, lane: tuple[int, int], begin: float, end: float) -> None:
        times = {"ts": begin * 1e6, "dur": (end - begin) * 1e6}
        place = {"pid": lane[0], "tid": lane[1], "args": {}}
        events.append({"ph": "X", "cat": cat, "name": name, **times, **place})

    for step in range(STEPS):
        begin, sent = time.monotonic(), len(ctx.ledger.events)
        coming = dist.all_gather_into_tensor(whole[0], mine, async_op=True)
        for layer in range(LAYERS):
            coming.wait()
            if layer + 1 < LAYERS:
                target = whole[(layer + 1) % 2]
                coming = dist.all_gather_into_tensor(target, mine, async_op=True)
            started = time.monotonic()
            with ctx.span("layer", str(layer)):
                time.sleep(COMPUTES)
            note("kernel", "gemm", (0, 7), started, time.monotonic())
        for event in ctx.ledger.events[sent:]:
            note("kernel", "ncclDevKernel_AllGather_RING_LL(…)", (0, 20), event.start, event.end)
        note("user_annotation", f"ProfilerStep#{step}", (1, 1), begin, time.monotonic())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        path.write_text(json.dumps({"traceEvents": events}))
        trace = code.read_trace(path)
    parts = {f"{part} (µs)": ns / 1e3 for part, ns in code.parts(trace).items()}
    found = code.bottleneck(trace)
    return {**parts, "bottleneck": found.part, "operation": found.detail}
