# for: 4.12
"""Written differently: the file is cut where the first line is that must go, an HTTP server of its
own writes Prometheus' text, ranks agree by an all-gather, the profiler follows its own schedule."""

from __future__ import annotations

import http.server
import json
import math
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist


def parsed(line):
    try:
        record = json.loads(line.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError):
        return None
    return record if type(record) is dict else None


def read_json_lines(path):
    with open(path, "rb") as file:
        return [record for record in map(parsed, file) if record is not None]


class JsonLines:
    """Steps ascend, so what must go is the file's tail: it is cut off, nothing is written anew."""

    def __init__(self, path, *, first_step=0):
        self.path = Path(path)
        os.makedirs(self.path.parent, exist_ok=True)
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        good = 0
        with open(self.path, "rb") as file:
            for line in file:
                record = parsed(line)
                torn = not line.endswith(b"\n") or record is None
                if torn or record.get("step", -1) >= first_step:
                    break
                good += len(line)
        os.ftruncate(self.fd, good)
        os.lseek(self.fd, 0, os.SEEK_END)

    def write(self, step, metrics):
        record = {"step": step}
        for name, value in metrics.items():
            bad = value is None or math.isnan(value) or math.isinf(value)
            record[name] = None if bad else value
        os.write(self.fd, (json.dumps(record) + "\n").encode())

    def close(self):
        os.close(self.fd)


class TensorBoard:
    def __init__(self, folder, *, first_step=0):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(os.fspath(folder), purge_step=first_step)

    def write(self, step, metrics):
        known = [(name, value) for name, value in metrics.items() if value is not None]
        for name, value in known:
            self.writer.add_scalar(name, float(value), global_step=step)

    def close(self):
        self.writer.flush()
        self.writer.close()


class Prometheus:
    def __init__(self, port, *, host="127.0.0.1"):
        self.text = b""
        sink = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(sink.text)

            def log_message(self, *_):
                """Quiet."""

        try:
            self.server = http.server.HTTPServer((host, port), Handler)
        except (OSError, OverflowError):
            raise ValueError(f"port {port} of {host} can't be had for metrics") from None
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def write(self, step, metrics):
        lines = [f"training_step {step}"]
        for name, value in metrics.items():
            lines += [f"# TYPE training_{name} gauge"]
            lines += [f"training_{name} {'NaN' if value is None else float(value)}"]
        self.text = ("\n".join(lines) + "\n").encode()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


class Terminal:
    def __init__(self, total_steps, *, stream=None):
        self.total = total_steps

    def write(self, step, metrics):
        print(f"step {step + 1} of {self.total}: loss {metrics.get('loss')}", flush=True)

    def close(self):
        """Nothing is open."""


class Sinks(list):
    def write(self, step, metrics):
        for sink in self:
            sink.write(step, metrics)

    def close(self):
        while self:
            self.pop().close()


def open_sinks(
    folder, *, total_steps, first_step=0, port=None, host="127.0.0.1", group=None, device="cpu"
):
    sinks, failed = Sinks(), 0
    if dist.get_rank(group) == 0:
        makers = [
            lambda: Terminal(total_steps),
            lambda: JsonLines(Path(folder) / "metrics.jsonl", first_step=first_step),
            lambda: TensorBoard(folder, first_step=first_step),
            lambda: Prometheus(port, host=host) if port is not None else Terminal(0),
        ]
        for make in makers[: 4 if port is not None else 3]:
            try:
                sinks.append(make())
            except Exception:
                failed = 1
                sinks.close()
                break
    flags = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    mine = torch.tensor([failed], device=device)
    dist.all_gather_into_tensor(flags, mine, group=group)
    if flags.any():
        raise ValueError(f"the first rank can't write to {folder} or serve port {port} of {host}")
    return sinks


class ProfileWindow:
    def __init__(self, path, first, last):
        if not first <= last:
            raise ValueError(f"no steps between {first} and {last}")
        self.path, self.steps, self.running = Path(path), range(first, last + 1), None

    def step(self, step):
        inside = step in self.steps
        if inside and not self.running:
            os.makedirs(self.path.parent, exist_ok=True)
            self.running = torch.profiler.profile(
                on_trace_ready=lambda p: p.export_chrome_trace(os.fspath(self.path))
            )
            self.running.__enter__()
        elif self.running and not inside:
            self.close()

    def close(self):
        running, self.running = self.running, None
        if running:
            running.__exit__(None, None, None)


def find_bottleneck(records, *, waste=0.1, full=0.9):
    if len(records) == 0:
        raise ValueError("0 records say nothing")
    used = records if len(records) == 1 else records[1:]
    columns = {"straggler": [], "data": [], "communication": [], "compute": [], "memory": []}
    for r in used:
        own = sorted(v for k, v in r.items() if k.startswith("own_seconds_rank"))
        slow, whole = r["stragglers"] > 0, r["step_seconds"]
        lost = own[-1] - own[(len(own) - 1) // 2]
        waits = r[("least_" if slow else "") + "exposed_communication_seconds"]
        busy = r["forward_seconds"] + r["backward_seconds"] + r["optimizer_seconds"]
        columns["straggler"].append(lost * slow / whole)
        columns["data"].append(r["data_seconds"] / whole)
        columns["communication"].append(waits / whole)
        columns["compute"].append(busy / whole)
        columns["memory"].append(r["memory_share"])
    shares = {
        kind: torch.tensor(values, dtype=torch.float64).quantile(0.5).item()
        for kind, values in columns.items()
    }
    kind = "memory" if shares["memory"] >= full else "compute"
    wasted = {name: shares[name] for name in ("straggler", "data", "communication")}
    if max(wasted.values()) >= waste:
        kind = max(wasted, key=wasted.get)
    return SimpleNamespace(kind=kind, shares=shares)
