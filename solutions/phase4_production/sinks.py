"""Sinks: where the numbers go, and which bottleneck they show.

A sink takes the metrics of a step: numbers by name, None where nothing is known. W ranks have the
same report (exercise 4.11), so *one* rank writes: W ranks would write every line W times, and torn.

    rank 0 ──┬─ JSON lines   metrics.jsonl, what the report reads; a line per record
             ├─ TensorBoard  event files in the same folder
             ├─ Prometheus   http://127.0.0.1:PORT/metrics, the last value of each
             └─ terminal     progress

A process that is killed while it writes leaves half a line. It also leaves numbers of steps that
the resumed run takes again (its checkpoint is older). Both are dropped before the file grows again.
Invariant: after any number of kills the file holds each step once, as without kills.

Cost: some µs per number. One message of 256 bytes, when the sinks are opened, tells all ranks if a
sink can't be. The endpoint has no password, so it listens on loopback unless told otherwise.
Sources: the exposition formats of Prometheus (prometheus.io/docs/instrumenting/exposition_formats);
jsonlines.org; Chrome's trace event format.
"""

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
    """The records of a file in order, without lines that are no JSON object (torn by a kill)."""
    # --- exercise 4.12: start
    # Step 1: parse line by line. Pass over lines that can't be parsed or decoded
    records = []
    for line in Path(path).read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # of JSON, and of UTF-8
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
    # --- exercise 4.12: end


class JsonLines:
    """A file with one JSON object per line: ``{"step": …, …}``. It grows; its folders are made.

    Reopened, it keeps the records of steps before ``first_step``, whole lines only. Torn lines and
    steps to be written again go. At any moment the file on disk has all records but the one being
    written. Once it is open, no other file is left. Numbers that JSON doesn't know (NaN, infinity)
    are written as null.
    """

    def __init__(self, path: str | Path, *, first_step: int = 0) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # --- exercise 4.12: start
        # Step 2: write the kept lines aside and put them in the file's place at once
        #         (`os.replace`): a second kill, now, must not lose them
        # Step 3: open to append, by lines: each is on its way to the disk when `write` returns
        if self.path.exists():
            kept = [r for r in read_json_lines(self.path) if r.get("step", -1) < first_step]
            aside = self.path.with_suffix(".aside")
            aside.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
            os.replace(aside, self.path)
        self.file = self.path.open("a", encoding="utf-8", buffering=1)
        # --- exercise 4.12: end

    def write(self, step: int, metrics: Metrics) -> None:
        """Append a line."""
        # --- exercise 4.12: start
        # Step 4: one object, one line
        known = {n: v if v is not None and math.isfinite(v) else None for n, v in metrics.items()}
        self.file.write(json.dumps({"step": step, **known}) + "\n")
        # --- exercise 4.12: end

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class TensorBoard:
    """Scalars for TensorBoard, in ``folder``; older ones from ``first_step`` on are hidden."""

    def __init__(self, folder: str | Path, *, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second, for users of it

        self.writer = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, step: int, metrics: Metrics) -> None:
        """Add a scalar for each number that is known."""
        # --- exercise 4.12: start
        # Step 5: a point per name, but none for None. One event holds all (`add_scalar` writes one
        #         each)
        from tensorboard.compat.proto.summary_pb2 import Summary

        known = [Summary.Value(tag=n, simple_value=v) for n, v in metrics.items() if v is not None]
        self.writer.file_writer.add_summary(Summary(value=known), step)
        # --- exercise 4.12: end

    def close(self) -> None:
        """Write the rest, and close."""
        self.writer.close()


class Prometheus:
    """An endpoint for Prometheus: ``training_NAME`` is a metric of the last ``write`` (NaN: None,
    or not in it), ``training_step`` its step. ``port`` 0: any free one; ``self.port`` says which.

    It listens on ``host`` only. Raises ValueError if the port is taken, or is no port.
    """

    def __init__(self, port: int, *, host: str = "127.0.0.1") -> None:
        self.registry = CollectorRegistry()
        self.gauges: dict[str, Gauge] = {}
        # --- exercise 4.12: start
        # Step 6: serve this registry (not the library's global one) on the host that was given
        # Step 7: the operating system's error becomes a sentence that says what to do
        try:
            self.server, self.thread = start_http_server(port, addr=host, registry=self.registry)
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"no metrics on {host}:{port} ({error}): choose another port, or 0 for any"
            ) from None
        self.port: int = self.server.server_address[1]
        # --- exercise 4.12: end

    def write(self, step: int, metrics: Metrics) -> None:
        """Set the gauges; a new name makes a new one."""
        # --- exercise 4.12: start
        # Step 8: gauges are made once and set many times. A metric that is unknown now, or is not
        #         there any more, must not keep an old value
        for name, value in {**dict.fromkeys(self.gauges), "step": step, **metrics}.items():
            if name not in self.gauges:
                self.gauges[name] = Gauge(f"training_{name}", name, registry=self.registry)
            self.gauges[name].set(math.nan if value is None else value)
        # --- exercise 4.12: end

    def close(self) -> None:
        """Stop serving: the port is free again, and no thread is left."""
        # --- exercise 4.12: start
        # Step 9: end the server's loop, close its socket, wait for its thread
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
        # --- exercise 4.12: end


# -- all of them, on one rank ----------------------------------------------------------------------
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
    """JSON lines (``folder/metrics.jsonl``), TensorBoard, terminal, and with a ``port`` Prometheus,
    on the first rank of the group; no sink on the others. It is collective: one broadcast.

    If one can't be opened, for whatever reason, *every* rank raises the same ValueError, and open
    sinks are closed. A first rank that dies alone would leave the others waiting in their next
    collective. The broadcast is 256 bytes, so it shortens reasons. ``device``: where the group
    communicates.
    """
    folder, sinks, problem = Path(folder), Sinks(), ""
    # --- exercise 4.12: start
    # Step 10: only the first rank opens, and keeps an error instead of raising it
    # Step 11: broadcast the sentence (empty: all is well) in LONGEST bytes; raise where it isn't
    if dist.get_rank(group) == 0:
        try:
            if port is not None:
                sinks.sinks.append(Prometheus(port, host=host))
            sinks.sinks.append(JsonLines(folder / "metrics.jsonl", first_step=first_step))
            sinks.sinks.append(TensorBoard(folder, first_step=first_step))
            sinks.sinks.append(Terminal(total_steps))
        except Exception as error:  # also a TensorBoard that is not installed
            sinks.close()
            problem = str(error) or type(error).__name__
    text = problem.encode()[:LONGEST].ljust(LONGEST, b"\0")
    message = torch.tensor(list(text), dtype=torch.uint8, device=device)
    dist.broadcast(message, group=group, group_src=0)
    problem = bytes(message.tolist()).rstrip(b"\0").decode(errors="ignore")
    if problem:
        raise ValueError(problem)
    return sinks
    # --- exercise 4.12: end


class ProfileWindow:
    """A profile of steps ``first`` to ``last``, both included, as a Chrome trace at ``path`` (see
    chrome://tracing or ui.perfetto.dev). ``step(n)`` is called at the beginning of step n.

    Outside of the window nothing is profiled, at no cost. A run that ends, or begins, inside of it
    writes the steps that it had. A run that never comes into it writes nothing. Folders are made.
    Raises ValueError if ``last`` is before ``first``.
    """

    def __init__(self, path: str | Path, first: int, last: int) -> None:
        if last < first:
            raise ValueError(f"a profile of steps {first} to {last} would be empty")
        self.path, self.first, self.last = Path(path), first, last
        self.profiler: torch.profiler.profile | None = None

    def step(self, step: int) -> None:
        """Step ``step`` begins."""
        # --- exercise 4.12: start
        # Step 12: past the window's end: write; inside for the first time: start
        if step > self.last:
            self.close()
        if self.profiler is None and self.first <= step <= self.last:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        # --- exercise 4.12: end

    def close(self) -> None:
        """End the profile, if there is one, and write its trace; nothing else happens twice."""
        # --- exercise 4.12: start
        # Step 13: stop and export; once
        if self.profiler is not None:
            self.profiler.stop()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.profiler.export_chrome_trace(str(self.path))
            self.profiler = None
        # --- exercise 4.12: end


# -- the bottleneck --------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """The limit of a run's speed: ``kind`` is straggler, data, communication, memory or compute.
    ``shares``: of the step time that goes into each (memory: of the memory in use)."""

    kind: str
    shares: dict[str, float]


def find_bottleneck(
    records: Sequence[Mapping[str, Any]], *, waste: float = 0.1, full: float = 0.9
) -> Bottleneck:
    """The thing to mend first, from the records of ``ClusterMetrics.as_dict`` (exercise 4.11).

    Shares of a step's time, medians over the records without the first (it warms up), if there are
    more:

        straggler       largest own time of a rank above the lower median of all; 0 where none was
                        found. The others spend it waiting, so it is no communication
        data            waiting for batches, mean over the ranks
        communication   exposed: the mean over the ranks; with a straggler the least of a rank
        compute         forward, backward and optimizer

    The largest of the first three is the bottleneck if its share is at least ``waste``. Else it is
    memory, if at least ``full`` of it is used (no larger batch fits), or else compute.

    Raises ValueError if there is no record.
    """
    if not records:
        raise ValueError("no records, so no bottleneck: the run wrote 0 of them")
    # --- exercise 4.12: start
    # Step 14: the shares of each record, then the median of each share
    # Step 15: waste comes first, then memory, then compute
    shares = [_shares(record) for record in records[1:] or records]
    median = {kind: statistics.median(s[kind] for s in shares) for kind in shares[0]}
    worst = max(("straggler", "data", "communication"), key=lambda kind: median[kind])
    needed = "memory" if median["memory"] >= full else "compute"
    return Bottleneck(kind=worst if median[worst] >= waste else needed, shares=median)
    # --- exercise 4.12: end


def _shares(record: Mapping[str, Any]) -> dict[str, float]:
    """The five shares of one record, by kind, for any order of its numbers."""
    # --- exercise 4.12: start
    # Step 16: the others wait for a straggler's own time: it counts once
    own = [value for name, value in record.items() if name.startswith("own_seconds_rank")]
    late = max(own) - statistics.median_low(own) if record["stragglers"] else 0.0
    exposed = "least_exposed" if record["stragglers"] else "exposed"
    seconds = {
        "straggler": late,
        "data": record["data_seconds"],
        "communication": record[f"{exposed}_communication_seconds"],
        "compute": sum(record[f"{p}_seconds"] for p in ("forward", "backward", "optimizer")),
    }
    shares = {kind: taken / record["step_seconds"] for kind, taken in seconds.items()}
    return shares | {"memory": record["memory_share"]}
    # --- exercise 4.12: end
