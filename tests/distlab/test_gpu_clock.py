"""Times of a GPU by its events: on a stand-in for ``torch.cuda`` that runs behind the host."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distlab.observe import gpu_clock
from distlab.observe.gpu_clock import GpuClock
from distlab.observe.log import Log
from distlab.observe.recorder import Ledger
from distlab.picture import chrome_trace, draw, spans_of
from distlab.picture.spans import covered, time_label
from distlab.ranks import RankContext, RankFailure, run_ranks
from distlab.ranks.member import Member
from tests.phase4.pretend_gpu import Gpu, Work

DEVICE = torch.device("cuda", 0)
NEAR = 1e-3  # seconds


class Clock:
    """The host's time: a microsecond passes when somebody looks, more when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def read(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """Every tensor is on the device; how busy this machine is changes nothing."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.read)
    monkeypatch.setattr(time, "perf_counter", clock.read)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(gpu_clock, "_future_of", lambda work: work.get_future())
    with Gpu().installed() as device:
        yield device


def test_a_moment_is_when_the_device_comes_there(gpu: Gpu) -> None:
    clock = GpuClock(DEVICE)
    begun = time.monotonic()
    first = clock.mark()
    gpu.launch(0.05)
    second = clock.mark()
    assert time.monotonic() - begun < NEAR, "a mark waits for nothing"
    clock.settle()
    assert clock.moment(first) == pytest.approx(begun, abs=NEAR)
    assert clock.moment(second) == pytest.approx(begun + 0.05, abs=NEAR)


class Group:
    """As much of a process group as an event asks for."""

    group_name = "world"


@pytest.fixture
def ledger(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr("distlab.observe.recording.patience_of", lambda *_: None)
    made = Ledger()
    made.gpu = GpuClock(DEVICE)
    return made


def reported(ledger: Ledger) -> Log:
    """What the parent makes of the rank's report."""
    member = Member(0, 0, 0, 0)
    member.events = ledger.events
    assert ledger.gpu is not None
    data = {"spans": ledger.raw_spans, "picture_from": 0.0, "gpu": ledger.gpu.times()}
    member.take(b"S", json.dumps(data).encode())
    return member.log()


def overlapped(gpu: Gpu, ledger: Ledger, futures: bool, op: str = "all_reduce") -> Log:
    """A kernel of 20 ms, a communication of 100 ms that runs beside a kernel of 250 ms."""
    group: Any = Group()
    gpu.launch(0.02)
    event = ledger.begin(op, group, [torch.ones(4)], None, {})
    work: Any = Work(gpu, 0.1)
    if futures:
        ledger.follow(event, work)
    with ledger.span("backward"):
        gpu.launch(0.25)
    work.wait()
    ledger.end(event)
    return reported(ledger)


def test_an_overlap_is_seen_where_the_host_sees_none(gpu: Gpu, ledger: Ledger) -> None:
    """The host is through in microseconds; the device takes 20 + 250 ms, the last 250 beside it."""
    begun = time.monotonic()
    log = overlapped(gpu, ledger, futures=True)
    (event,), (host,) = log.events, ledger.events
    assert host.end is not None
    assert event.end is not None
    assert host.end - host.start < NEAR
    assert (event.clock, host.clock) == ("GPU", "host")
    assert event.start == pytest.approx(begun + 0.02, abs=NEAR)
    assert event.end - event.start == pytest.approx(0.1, abs=NEAR)
    spans = spans_of([log])
    assert [(s.name, s.clock) for s in spans] == [("all_reduce", "GPU"), ("backward", "GPU")]
    assert covered(spans) == pytest.approx(0.25, abs=NEAR), "hidden behind the kernel"


def test_without_a_future_the_end_is_where_the_stream_waited(gpu: Gpu, ledger: Ledger) -> None:
    """An upper bound: the program's stream was busy when the communication ended. So are messages:
    they travel in batches, of which the futures of the parts know nothing."""
    overlapped(gpu, ledger, futures=False)
    for event in overlapped(gpu, ledger, futures=True, op="send").events:
        assert event.end is not None
        assert event.end - event.start == pytest.approx(0.25, abs=NEAR)


def test_a_handle_without_a_future_is_no_error(
    gpu: Gpu, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(work: Any) -> None:
        raise RuntimeError("Work::getFuture not implemented")

    monkeypatch.setattr(gpu_clock, "_future_of", none)
    (event,) = overlapped(gpu, ledger, futures=True).events
    assert event.clock == "GPU"


def test_gloo_and_what_never_ends_stay_with_the_host(
    gpu: Gpu, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gloo the host waits itself; a handle that nobody awaits has no end."""
    group: Any = Group()
    unwaited = ledger.begin("all_reduce", group, [torch.ones(4)], None, {})
    ledger.follow(unwaited, Work(gpu, 0.01))  # type: ignore[arg-type]
    endless = ledger.begin("all_reduce", group, [torch.ones(4)], None, {})
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    waited = ledger.begin("broadcast", group, [torch.ones(4)], 0, {})
    ledger.end(waited)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(gpu_clock, "PATIENCE", 0.1)
    work: Any = Work(gpu, 600)
    work.wait()
    ledger.end(endless)
    begun = time.monotonic()
    log = reported(ledger)
    assert time.monotonic() - begun < 1, "a rank that is done reports"
    assert [e.clock for e in log.events] == ["host"] * 3
    assert log.unwaited == [unwaited]


def test_operators_by_the_device_and_the_rest_by_the_host(
    gpu: Gpu, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neighbours are one span if they are on the same clock; pictures say whose it is."""
    x = torch.ones(4)
    gpu.launch(0.05)
    with ledger:
        x = x + 1
        x = x + 1
        monkeypatch.setattr(torch.Tensor, "is_cuda", False)
        x = x + 1
    log = reported(ledger)
    assert [i in log.on_gpu for i in range(len(log.spans))] == [True, False]
    (_, begin, _), (_, other, _) = log.spans
    assert begin - other > 0.04, "the host was there before the device"
    spans = spans_of([log])
    assert time_label(spans) == "milliseconds by CUDA events; host time: other"
    assert time_label([s for s in spans if s.clock == "GPU"]) == "milliseconds by CUDA events"
    assert time_label([]) == "milliseconds"
    trace = json.loads(chrome_trace(spans, tmp_path / "trace.json").read_text())
    shown = [e["args"]["clock"] for e in trace["traceEvents"] if e["ph"] == "X"]
    assert sorted(shown) == ["GPU", "host"]
    picture = draw(spans, tmp_path / "picture.svg").read_text()
    assert "milliseconds by CUDA events; host time: other" in picture


def test_a_picture_begins_when_the_device_is_done(gpu: Gpu, ledger: Ledger) -> None:
    ctx = RankContext(0, 2, DEVICE, 0, ledger)
    gpu.launch(0.05)
    begun = time.monotonic()
    ctx.start_picture()
    assert ledger.picture_from - begun > 0.04


def test_a_hang_on_a_gpu_says_that_lines_are_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlab.ranks.process._device", lambda *_: (torch.device("cpu"), "gloo"))

    def body(ctx: RankContext) -> None:
        if ctx.rank:
            dist.all_reduce(torch.ones(1))

    for device, said in (("cuda", True), ("cpu", False)):
        with pytest.raises(RankFailure) as caught:
            run_ranks(body, 2, device=device)
        assert caught.value.kind == "hang"
        assert ("lines are where the host is" in caught.value.message) == said


def test_ranks_report_the_devices_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the rank's own process to the log that its parent has."""
    monkeypatch.setattr("distlab.ranks.process._device", lambda *_: (DEVICE, "gloo"))

    def body(ctx: RankContext) -> None:
        with ctx.span("forward", "F0"):
            gpu.launch(0.05)
        dist.all_reduce(torch.ones(2))

    with Gpu().installed() as gpu:
        results = run_ranks(body, 2, device="cuda")
    for log in results.logs:
        ((name, start, end),) = (log.spans[index] for index in log.on_gpu)
        assert (name, end - start >= 0.049) == ("forward F0", True)
        assert [event.clock for event in log.events] == ["host"]
