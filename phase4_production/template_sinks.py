# Exercises 4.12: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase4.py 4.12
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
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
    # Step 1: parse line by line. Pass over lines that can't be parsed or decoded
    raise NotImplementedError("exercise 4.12")


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
        # Step 2: write the kept lines aside and put them in the file's place at once
        #         (`os.replace`): a second kill, now, must not lose them
        # Step 3: open to append, by lines: each is on its way to the disk when `write` returns
        raise NotImplementedError("exercise 4.12")

    def write(self, step: int, metrics: Metrics) -> None:
        """Append a line."""
        # Step 4: one object, one line
        raise NotImplementedError("exercise 4.12")

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
        # Step 5: a point per name, but none for None. One event holds all (`add_scalar` writes one
        #         each)
        raise NotImplementedError("exercise 4.12")

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
        # Step 6: serve this registry (not the library's global one) on the host that was given
        # Step 7: the operating system's error becomes a sentence that says what to do
        raise NotImplementedError("exercise 4.12")

    def write(self, step: int, metrics: Metrics) -> None:
        """Set the gauges; a new name makes a new one."""
        # Step 8: gauges are made once and set many times. A metric that is unknown now, or is not
        #         there any more, must not keep an old value
        raise NotImplementedError("exercise 4.12")

    def close(self) -> None:
        """Stop serving: the port is free again, and no thread is left."""
        # Step 9: end the server's loop, close its socket, wait for its thread
        raise NotImplementedError("exercise 4.12")


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
    # Step 10: only the first rank opens, and keeps an error instead of raising it
    # Step 11: broadcast the sentence (empty: all is well) in LONGEST bytes; raise where it isn't
    raise NotImplementedError("exercise 4.12")


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
        # Step 12: past the window's end: write; inside for the first time: start
        raise NotImplementedError("exercise 4.12")

    def close(self) -> None:
        """End the profile, if there is one, and write its trace; nothing else happens twice."""
        # Step 13: stop and export; once
        raise NotImplementedError("exercise 4.12")


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
    # Step 14: the shares of each record, then the median of each share
    # Step 15: waste comes first, then memory, then compute
    raise NotImplementedError("exercise 4.12")


def _shares(record: Mapping[str, Any]) -> dict[str, float]:
    """The five shares of one record, by kind, for any order of its numbers."""
    # Step 16: the others wait for a straggler's own time: it counts once
    raise NotImplementedError("exercise 4.12")
