"""Profiles of runs with a planted bottleneck: a file of a profiler, and the truth about it.

A small model of a host and its GPU runs: the host launches work and takes time for it, and a stream
does its work in order. All times are ns, drawn from a seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

ORIGIN = 1_790_000_000_000_000_000  # ns since 1970: above 2^53
CLOCK = 4_600_120_909_943_217  # ns: the trace's own clock, beyond a float of µs
HOST, LOADER, BACKWARD, GLOO = 4711, 4712, 4790, 4801  # the process, its threads
COMPUTE, NCCL = 7, 20  # streams
BOTTLENECKS = ("compute", "communication", "copy", "data", "optimizer", "launch", "memory")
NAMES = {"AllGather": "allgather", "AllReduce": "allreduce", "ReduceScatter": "reducescatter"}
SITES = ("/home/me/train.py:31", "/home/me/torch_models/net.py:7", "/home/me/log.py:12", "")
MIB = 2**20

Truth = tuple[str, str, tuple[int, int], int, int, int]  # a span's fields


@dataclass
class Profile:
    """Events as they will be written (times in ns), the spans that they mean, and the memory."""

    events: list[dict[str, Any]] = field(default_factory=list)
    spans: list[Truth] = field(default_factory=list)
    changes: list[tuple[int, int, int, str]] = field(default_factory=list)

    def event(
        self, cat: str, name: str, lane: tuple[int, int], begin: int, end: int, **args: Any
    ) -> None:
        """A complete event."""
        place = {"pid": lane[0], "tid": lane[1], "ts": begin, "dur": end - begin}
        self.events.append({"ph": "X", "cat": cat, "name": name, **place, "args": args})

    def span(
        self, kind: str, name: str, lane: tuple[int, int], begin: int, end: int, launched: int
    ) -> None:
        """A span that a reader must find."""
        self.spans.append((kind, name, lane, *(ORIGIN + t for t in (begin, end, launched))))

    def mark(self, kind: str, name: str, begin: int, end: int, tid: int = HOST) -> None:
        """An annotation with a kind."""
        self.event("user_annotation", name, (HOST, tid), begin, end)
        self.span(kind, name, (HOST, tid), begin, end, begin)

    def change(self, at: int, size: int, address: int, site: str = "") -> None:
        """Memory is taken (or given back, below 0)."""
        at = at // 1000 * 1000  # a snapshot counts µs
        self.changes.append((ORIGIN + at, size, address, site))

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Begin and end of each step."""
        return sorted((s[3], s[4]) for s in self.spans if s[0] == "step")


def sizes_of(planted: str, draw: random.Random) -> dict[str, Any]:
    """Times in ns and counts of a step in which ``planted`` is the bottleneck."""
    sizes = {
        "operators": (draw.randint(12, 18), 5_000, 90_000),  # how many, the host's, the device's
        "updates": (draw.randint(2, 3), 6_000, 70_000),
        "loader": 20_000,
        "copy": 30_000,
        "collective": (80_000, False),  # its time, exposed
        "kept": 0,
    }
    planted_sizes = {
        "launch": {"operators": (draw.randint(70, 90), 12_000, 2_000)},
        "optimizer": {"updates": (draw.randint(220, 250), 15_000, 2_000)},
        "data": {"loader": draw.randint(2_000_000, 3_000_000)},
        "copy": {"copy": draw.randint(2_000_000, 3_000_000)},
        "communication": {"collective": (draw.randint(900_000, 1_200_000), True)},
        "memory": {"kept": draw.randint(2, 5) * MIB},
        "compute": {},
    }
    return sizes | planted_sizes[planted]


class Machine:
    """A host that launches work on two streams of a GPU."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.profile = Profile()
        self.host = CLOCK + self.draw.randrange(10**6)
        self.free = {COMPUTE: 0, NCCL: 0}
        self.calls = 100
        self.given_back: list[int] = []

    def about(self, time: int) -> int:
        """A time within a tenth of ``time``."""
        return time + self.draw.randint(-time // 10, time // 10)

    def launch(self, kind: str, name: str, takes: int, *, call: int = 5_000, after: int = 0) -> int:
        """The host launches work of ``kind``; the moment at which it will be done."""
        lane = (0, NCCL if kind == "communication" else COMPUTE)
        began, self.host = self.host, self.host + self.about(call)
        self.calls += 1
        word = "cudaMemcpyAsync" if kind == "copy" else "cudaLaunchKernel"
        driver = self.draw.random() < 0.3
        category = "cuda_driver" if driver else "cuda_runtime"
        self.profile.event(
            category, "cuLaunchKernel" if driver else word, (HOST, HOST), began,
            began + self.about(call) * 2 // 3, correlation=self.calls,
        )  # fmt: skip
        begin = max(began + self.about(4_000), self.free[lane[1]], after)
        end = self.free[lane[1]] = begin + self.about(takes)
        cats = {"copy": "gpu_memcpy"}
        cat = "gpu_memset" if name == "Memset (Device)" else cats.get(kind, "kernel")
        self.profile.event(cat, name, lane, begin, end, stream=lane[1], correlation=self.calls)
        self.profile.span(kind, name, lane, begin, end, began)
        return end

    def operator(self, call: int, takes: int) -> None:
        """An operator of the host launches one kernel."""
        began = self.host
        self.launch("compute", f"void at::native::kernel{self.calls % 3}(…)", takes, call=call)
        self.profile.event("cpu_op", "aten::mul", (HOST, HOST), began, self.host)

    def take(self, size: int, site: str) -> int:
        """Take memory; its address."""
        again = self.given_back and self.draw.random() < 0.5
        address = self.given_back.pop() if again else 0x7F0000000000 + 512 * self.calls
        self.calls += 1
        self.profile.change(self.host, size, address, site)
        return address

    def give_back(self, size: int, address: int) -> None:
        """Memory that will be taken again."""
        self.profile.change(self.host, -size, address)
        self.given_back.append(address)

    def graph_kernel(self, **args: int) -> None:
        """A kernel that no call of the host launched."""
        lane, begin = (0, COMPUTE), max(self.host, self.free[COMPUTE]) + 300
        self.free[COMPUTE] = begin + self.about(1_500)
        self.profile.event("kernel", "replayed", lane, begin, self.free[COMPUTE], **args)
        self.profile.span("compute", "replayed", lane, begin, self.free[COMPUTE], begin)

    def wait(self) -> None:
        """The host waits until the device has done all."""
        began, self.host = self.host, max(self.host, *self.free.values()) + 3_000
        self.profile.event("cuda_runtime", "cudaStreamSynchronize", (HOST, HOST), began, self.host)


def step_of(
    machine: Machine, number: int, sizes: dict[str, Any], collectives: list[str], state: int
) -> None:
    """One training step; ``state``: bytes that its optimizer takes and keeps."""
    profile, began = machine.profile, machine.host
    loading = machine.host
    machine.host += machine.about(sizes["loader"])
    name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    profile.mark("data", name, loading, machine.host)
    held = [(machine.take(size, SITES[1]), size) for size in (8 * MIB, 3 * MIB)]
    machine.launch("copy", "Memcpy HtoD (Pinned -> Device)", sizes["copy"])
    count, call, takes = sizes["operators"]
    length, exposed = sizes["collective"]
    for k in range(count):
        if k in (3, 6, 9):
            name = collectives[k // 3 - 1]
            annotated = machine.host
            kernel = f"ncclDevKernel_{name}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            share = 3 if name != collectives[0] else 1
            done = machine.launch("communication", kernel, length // share)
            profile.event("gpu_user_annotation", f"nccl:{name}", (0, NCCL), annotated, done)
            if exposed:
                machine.free[COMPUTE] = max(machine.free[COMPUTE], done)
        machine.operator(call, takes)
    if sizes["kept"]:
        machine.take(sizes["kept"], SITES[0])
        machine.take(sizes["kept"] // 4 + 512, SITES[2])
    if state:
        machine.take(state, SITES[2])
    machine.launch("copy", "Memset (Device)", 1_000)
    updating = machine.host
    count, call, takes = sizes["updates"]
    for _ in range(count):
        machine.operator(call, takes)
    profile.mark("optimizer", "Optimizer.step#AdamW.step", updating, machine.host)
    for address, size in held:
        machine.give_back(size, address)
    machine.graph_kernel()
    machine.graph_kernel(correlation=7)
    machine.wait()
    profile.mark("step", f"ProfilerStep#{number}", began, machine.host)
    profile.event(
        "gpu_user_annotation", f"ProfilerStep#{number}", (0, COMPUTE), began + 9_000,
        machine.host + 40_000,
    )  # fmt: skip


def gpu_profile(planted: str, seed: int, steps: int = 4) -> tuple[Profile, str]:
    """A run on a GPU with a planted bottleneck, and the collective that takes the longest."""
    machine = Machine(seed)
    sizes, collectives = sizes_of(planted, machine.draw), list(NAMES)
    machine.draw.shuffle(collectives)
    first = machine.draw.randint(3, 90)
    machine.operator(5_000, 40_000)  # before the first step, and beside the window
    machine.wait()
    machine.take(40 * MIB, SITES[3])
    for number in range(first, first + steps):
        step_of(machine, number, sizes, collectives, state=20 * MIB * (number == first))
    machine.operator(5_000, 40_000)
    return machine.profile, NAMES[collectives[0]]


# -- a run on a CPU --------------------------------------------------------------------------------
class Threads:
    """The threads of a run on a CPU: operators that call each other, and gloo's thread."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.profile = Profile()
        self.now = CLOCK + self.draw.randrange(10**6)
        self.calls = 0

    def about(self, time: int) -> int:
        """A time within a tenth of ``time``."""
        return time + self.draw.randint(-time // 10, time // 10)

    def operator(self, takes: int, python: int, *, counts: bool = True, tid: int = HOST) -> None:
        """Python's time, then an operator that calls three others: one has all of its time."""
        self.now += self.about(python)
        begin, end = self.now, self.now + self.about(takes)
        lane, middle = (HOST, tid), (2 * begin + end) // 3
        if tid == BACKWARD:  # no operator of aten, and not all of its time is work
            begin, end = begin + 400, end - 300
            wrapper = "autograd::engine::evaluate_function: MmBackward0"
            self.profile.event("cpu_op", wrapper, lane, begin - 400, end + 300)
            self.profile.event("cpu_op", "MmBackward0", lane, begin - 200, end + 100)
        self.profile.event("cpu_op", "aten::t", lane, begin, middle)  # before what calls it
        self.profile.event("cpu_op", "aten::linear", lane, begin, end)
        self.profile.event("cpu_op", "aten::addmm", lane, begin, end)
        self.profile.event("cpu_op", "aten::copy_", lane, begin + 100, middle)
        if counts:
            self.profile.span("compute", "aten::linear", lane, begin, end, begin)
        self.now = max(self.now, end)

    def change(self, size: int, address: int) -> None:
        """Memory of the CPU, noted by the profiler."""
        self.profile.changes.append((ORIGIN + self.now, size, address, ""))


def cpu_step(threads: Threads, number: int, sizes: dict[str, Any]) -> None:
    """One training step on a CPU: the loader runs in the same thread."""
    profile, began = threads.profile, threads.now
    loading = threads.now
    for _ in range(2):
        threads.operator(sizes["loader"] // 2, 500, counts=False)
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    profile.mark("data", name, loading, threads.now)
    threads.change(8 * MIB, 64 * number)
    count, python, takes = sizes["operators"]
    python, length = min(python, 2_000 + 10 * (takes < 5_000) * python), sizes["collective"]
    for k in range(count):
        threads.operator(takes, python, tid=HOST if k < count // 2 else BACKWARD)
        if k == count // 3:
            called = threads.now
            end = called + threads.about(length[0])
            profile.event("cpu_op", "c10d::allgather_", (HOST, HOST), called, called + 900)
            profile.mark("communication", "gloo:all_gather", called + 300, end, GLOO)
            threads.now = end if length[1] else threads.now + 900
    threads.change(-8 * MIB, 64 * number)
    if sizes["kept"]:
        threads.change(sizes["kept"], 64 * number + 8)
    updating = threads.now
    count, python, takes = sizes["updates"]
    for _ in range(count):
        threads.operator(takes, python // 2 if takes > 5_000 else python)
    profile.mark("optimizer", "Optimizer.step#SGD.step", updating, threads.now)
    profile.mark("step", f"ProfilerStep#{number}", began, threads.now)


def cpu_profile(planted: str, seed: int, steps: int = 4) -> tuple[Profile, str]:
    """A run on a CPU with a planted bottleneck, and its collective."""
    threads = Threads(seed)
    sizes = sizes_of(planted, threads.draw)
    threads.operator(40_000, 2_000)
    for number in range(1, steps + 1):
        cpu_step(threads, number, sizes)
    threads.operator(40_000, 2_000)
    return threads.profile, "allgather"
