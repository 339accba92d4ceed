"""The inside of one rank: set-up, the body, and reports to the parent over a pipe.

A frame on the pipe is 4 bytes of length, 1 byte of kind, and the content. The content is JSON, for
results with the memory of tensors behind it (``content.py``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..host import gpus, system
from ..host.processes import die_with_parent
from ..observe.defaults import notice_changes
from ..observe.gpu_clock import GpuClock
from ..observe.looks import Looks
from ..observe.notices import Notice, listen
from ..observe.raised import describe
from ..observe.recorder import Ledger
from .content import packed
from .context import RankContext
from .options import Options
from .results import PIPE_LOST

MAX_FRAME = 1 << 31
GLOO_TIMEOUT = 1800.0  # seconds; that of groups for which none is given
# bound before learner code runs, which may replace them in their modules
_write, _exit, _dumps = os.write, os._exit, json.dumps


class Pipe:
    """The writing end of a rank's pipe; frames of several threads don't mix.

    A process that the learner's code forks does not have it: only the rank reports.
    """

    def __init__(self, fd: int) -> None:
        self.fd: int | None = fd
        self.lock = threading.Lock()
        os.register_at_fork(after_in_child=self._give_up)

    def _give_up(self) -> None:
        if self.fd is not None:
            with contextlib.suppress(OSError):
                os.close(self.fd)
        self.fd, self.lock = None, threading.Lock()

    def send(self, kind: bytes, content: bytes) -> None:
        """Write one frame."""
        if len(content) >= MAX_FRAME:
            raise ValueError(f"a rank's result may have 2 GiB at most, this one has {len(content)}")
        data = memoryview(len(content).to_bytes(4, "little") + kind + content)
        with self.lock:
            while data and self.fd is not None:
                data = data[_write(self.fd, data) :]

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Tell the parent that a communication began, is waited for, or ended."""
        self.send(b"E", _dumps([kind, fields]).encode())


def rank_main(
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    options: Options,
    parent: int,
    store: str,
    stack_fd: int,
    looks_fd: int,
    pipe_fd: int,
    output_fd: int,
) -> NoReturn:
    """Run the body as ``rank`` in this fresh process and never return."""
    try:
        pipe = Pipe(pipe_fd)
        try:
            _detach(parent, output_fd)
            _show_stack_when_asked(stack_fd, looks_fd)
            ctx = _set_up(rank, world_size, options, store, parent)
            pipe.event("ready", {})
            _report(pipe, _run(ctx, fn, args, options, pipe))
        except BaseException as error:
            _flush()
            pipe.send(b"X", _dumps(describe(error, options.learner_files)).encode())
        while pipe.fd is not None:  # stay, so that a rank that still communicates sees it wait
            signal.pause()
    except OSError:
        _exit(PIPE_LOST)
    finally:  # a fork of the parent must not go on as the parent
        _exit(1)


def _report(pipe: Pipe, value: Any) -> None:
    _flush()
    pipe.send(b"R", packed(value))


def _flush() -> None:
    """Flush the output; the streams may be the learner's own by now."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()


def _detach(parent: int, output_fd: int) -> None:
    """Give the rank its own session and output, and let it die with its parent."""
    os.setsid()
    die_with_parent(parent)
    gc.freeze()  # the parent's objects are not searched again, and their pages stay shared
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(output_fd)
    closed = open(0, closefd=False)  # noqa: SIM115
    own = {"stdin": closed, "stdout": _printer(1), "stderr": _printer(2)}
    for name, stream in own.items():
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if "fork" in multiprocessing.get_all_start_methods():
        # for a loader's workers: new processes (macOS, Python 3.14) could not import the learner's
        # file, which was loaded by its path
        multiprocessing.set_start_method("fork", force=True)


def _show_stack_when_asked(stack_fd: int, looks_fd: int) -> None:
    """SIGUSR1 writes the stack to a file, also from inside an operator. As soon as Python code
    runs, it writes a look at the stack (see ``looks.py``) to another file."""
    looks = Looks()

    def look(_: int, frame: FrameType | None) -> None:
        looks.take(frame)
        _write(looks_fd, _dumps(looks.data()).encode() + b"\n")

    signal.signal(signal.SIGUSR1, look)
    faulthandler.register(signal.SIGUSR1, file=stack_fd, all_threads=False, chain=True)


def _printer(fd: int) -> Any:
    """A stream that prints any text: invalid Unicode is shown as an escape."""
    encoding, errors = "utf-8", "backslashreplace"
    return open(fd, "w", buffering=1, encoding=encoding, errors=errors, closefd=False)


def _set_up(rank: int, world_size: int, options: Options, store: str, parent: int) -> RankContext:
    """Environment, seeds, device and process group, as a launcher would give them."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
    )
    os.environ.pop("MASTER_PORT", None)
    if options.enter is not None:
        options.enter(rank)
        die_with_parent(parent)  # the kernel forgets it when a process enters a user namespace
    torch.set_num_threads(1)
    if options.device == "cpu":
        keep_no_stacks()
    own_seed = options.seed * 1_000_003 + rank  # ranks that don't synchronise must differ
    torch.manual_seed(own_seed)
    random.seed(own_seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(own_seed % 2**32)
    device, backend = _device(rank, world_size, options.device)
    if options.process_group:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", system.loopback())
        dist.init_process_group(
            backend,
            # unbound, NCCL takes a batch of messages as a group's first call only if all ranks take
            # part
            device_id=device if backend == "nccl" else None,
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=group_timeout(options),
        )
    return RankContext(rank, world_size, device, options.seed)


def keep_no_stacks() -> None:
    """``torch.manual_seed`` keeps the caller's stack, with its lines, for each kind of device that
    may come to be: 4 ms. Nobody asks for it in a process that computes on the CPU."""
    nothing = types.SimpleNamespace(**vars(traceback) | {"format_stack": list})
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        kind.traceback = nothing


def group_timeout(options: Options) -> timedelta:
    """gloo's own limit. The parent's limit comes first; one that a learner
    asks for may come before."""
    return timedelta(seconds=min(11 * options.timeout + 60, GLOO_TIMEOUT))


def _device(rank: int, world_size: int, kind: str) -> tuple[torch.device, str]:
    """This rank's device and backend: several ranks share a GPU only over gloo."""
    if kind == "cpu":
        return torch.device("cpu"), "gloo"
    gpus.show()
    count = gpus.count()
    if not count:
        raise ValueError("device 'cuda' was asked for, and this machine has no GPU")
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    torch.backends.cudnn.allow_tf32 = False  # references and expected values are exact float32
    return device, "nccl" if count >= world_size else "gloo"


def _run(
    ctx: RankContext, fn: Callable[..., Any], args: tuple[Any, ...], options: Options, pipe: Pipe
) -> Any:
    def tell(what: str, notice: Notice) -> None:
        pipe.event("notice", {"what": what, "notice": notice})

    listen(tell)
    notice_changes(lambda: options.learner_files)
    if not options.ledger:
        return fn(ctx, *args)
    pause = 0.01 if options.delays else 0.0
    own_seed = options.seed * 7919 + ctx.rank
    ctx.ledger = Ledger(options.learner_files, pipe.event, pause, own_seed)
    ctx.ledger.values = options.values
    if ctx.device.type == "cuda":
        ctx.ledger.gpu = GpuClock(ctx.device)
    with ctx.ledger:
        value = fn(ctx, *args)
    spans: dict[str, Any] = {"spans": ctx.ledger.raw_spans}
    spans["picture_from"] = ctx.ledger.picture_from
    if ctx.ledger.gpu is not None:
        spans["gpu"] = ctx.ledger.gpu.times()
    pipe.send(b"S", _dumps(spans).encode())
    return value


def spawned_main(output_fd: int) -> None:
    """Entry of a rank that was started as a new Python: its task comes on standard input."""
    os.dup2(output_fd, 1)  # a failure here is shown as the rank's, too
    os.dup2(output_fd, 2)
    import cloudpickle

    rank_main(*cloudpickle.load(sys.stdin.buffer))
