# for: 4.12
"""Written differently: lines are kept byte for byte, all gauges are NaN before each write."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from given.agreement import Group
from given.sinks import Metrics, Sinks, Terminal

LONGEST = 256  # bytes of the sentence that tells all ranks why a sink can't be opened


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    def parsed(line: bytes) -> Any:
        try:
            return json.loads(str(line, "utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError):
            return None

    lines = Path(path).read_bytes().split(b"\n")
    return [record for record in map(parsed, lines) if isinstance(record, dict)]


class JsonLines:
    def __init__(self, path: str | Path, *, first_step: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        before = self.path.read_bytes() if self.path.is_file() else b""
        lines = []
        for line in before.split(b"\n"):
            try:
                record = json.loads(line)
                if isinstance(record, dict) and record["step"] < first_step:
                    lines.append(line + b"\n")
            except (ValueError, KeyError, TypeError):
                pass
        after = b"".join(lines)
        other = self.path.parent / f".{self.path.name}.new"
        other.unlink(missing_ok=True)  # of one that was killed here
        if after != before:
            try:
                with open(other, "wb") as file:
                    file.write(after)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(other, self.path)
            finally:
                other.unlink(missing_ok=True)
        self.file = self.path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Metrics) -> None:
        line = {"step": step}
        for name, value in metrics.items():
            if name != "step":
                line[name] = value if value is not None and math.isfinite(value) else None
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    def __init__(self, folder: str | Path, *, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second, for those who want it

        self.writer = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, step: int, metrics: Metrics) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard.summary import scalar

        event = Summary()
        for name, value in metrics.items():
            if value is not None:
                event.MergeFrom(scalar(name, value))
        if len(event.value):
            self.writer.file_writer.add_summary(event, global_step=step)

    def close(self) -> None:
        self.writer.close()


class Prometheus:
    def __init__(self, port: int, *, host: str = "127.0.0.1") -> None:
        self.registry = CollectorRegistry()
        self.gauges: dict[str, Gauge] = {}
        try:
            served = start_http_server(port, host, self.registry)
        except (OSError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(
                f"no endpoint on {host}, port {port}: {error}; take another port"
            ) from None
        self.server, self.thread = served
        self.port = self.server.server_address[1]

    def write(self, step: int, metrics: Metrics) -> None:
        for gauge in self.gauges.values():
            gauge.set(float("nan"))
        for name, value in [*metrics.items(), ("step", step)]:
            gauge = self.gauges.get(name)
            if gauge is None:
                gauge = Gauge("training_" + name, "of the last step", registry=self.registry)
                self.gauges[name] = gauge
            gauge.set(float("nan") if value is None else value)

    def close(self) -> None:
        if self.thread.is_alive():
            self.server.shutdown()
            self.thread.join()
        self.server.server_close()


def open_sinks(
    folder: str | Path,
    *,
    total_steps: int,
    first_step: int = 0,
    port: int | None = None,
    host: str = "127.0.0.1",
    group: Group = None,
    device: torch.device | str = "cpu",
) -> Sinks:
    folder, sinks, problem = Path(folder), Sinks(), ""
    if dist.get_rank(group) == 0:
        makers = [
            lambda: JsonLines(folder / "metrics.jsonl", first_step=first_step),
            lambda: TensorBoard(folder, first_step=first_step),
            lambda: Terminal(total_steps),
        ]
        if port is not None:
            makers.append(lambda: Prometheus(port, host=host))
        for make in makers:
            try:
                sinks.sinks.append(make())
            except Exception as error:
                problem = f"no sink for this run: {error!r}"
                break
        if problem:
            sinks.close()
            sinks = Sinks()
    raw = problem.encode("utf-8", "backslashreplace")
    if len(raw) > LONGEST:
        raw = raw[: LONGEST - 3].decode("utf-8", "ignore").encode() + b"..."
    told = torch.tensor(list(raw.ljust(LONGEST, b" ")), dtype=torch.uint8, device=device)
    source = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast(told, source, group)
    problem = bytes(told.cpu().tolist()).decode().strip()
    if problem:
        raise ValueError(problem)
    return sinks


class ProfileWindow:
    def __init__(self, path: str | Path, first: int, last: int) -> None:
        if last < first:
            raise ValueError(f"a profile of steps {first} to {last} would be empty")
        self.path, self.first, self.last = Path(path), first, last
        self.profiler: torch.profiler.profile | None = None
        self.written = False

    def step(self, step: int) -> None:
        if self.profiler is not None and step > self.last:
            self.close()
        if not self.written and self.profiler is None and self.first <= step <= self.last:
            self.profiler = torch.profiler.profile()
            self.profiler.__enter__()

    def close(self) -> None:
        running, self.profiler = self.profiler, None
        if running is not None:
            self.written = True
            running.__exit__(None, None, None)
            os.makedirs(self.path.parent, exist_ok=True)
            running.export_chrome_trace(os.fspath(self.path))


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    kind: str
    shares: dict[str, float]


def find_bottleneck(
    records: Sequence[Mapping[str, Any]], *, waste: float = 0.1, full: float = 0.9
) -> Bottleneck:
    if not records:
        raise ValueError("no records, so no bottleneck: the run wrote 0 of them")
    later = list(records)[1:] or list(records)
    table = [_shares(record) for record in later]
    shares = {kind: statistics.median([row[kind] for row in table]) for kind in table[0]}
    wasted = sorted(("straggler", "data", "communication"), key=shares.__getitem__)[-1]
    if shares[wasted] >= waste:
        kind = wasted
    elif shares["memory"] >= full:
        kind = "memory"
    else:
        kind = "compute"
    return Bottleneck(shares=shares, kind=kind)


def _shares(record: Mapping[str, Any]) -> dict[str, float]:
    ranks = int(record["ranks"])
    own = sorted(record[f"own_seconds_rank{n}"] for n in range(ranks))
    found = bool(record["stragglers"])
    network = record[
        "least_exposed_communication_seconds" if found else "exposed_communication_seconds"
    ]
    seconds = {
        "straggler": own[-1] - own[(ranks - 1) // 2] if found else 0.0,
        "data": record["data_seconds"],
        "communication": network,
        "compute": record["forward_seconds"]
        + record["backward_seconds"]
        + record["optimizer_seconds"],
    }
    shares = {kind: taken / record["step_seconds"] for kind, taken in seconds.items()}
    return shares | {"memory": record["memory_share"]}
