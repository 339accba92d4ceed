"""The inside of one rank: set-up, the body, and reports to the parent over a pipe.

A frame on the pipe is 4 bytes of length, 1 byte of kind, and the content: JSON, or for results
what ``torch.save`` writes, which the parent reads with ``weights_only=True``.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import os
import random
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from .looks import Looks
from .ranks import Options, RankContext
from .recorder import Ledger

_PR_SET_PDEATHSIG = 1
_MAX_FRAME = 1 << 31


class Pipe:
    """The writing end of a rank's pipe; frames of several threads don't mix."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.lock = threading.Lock()

    def send(self, kind: bytes, content: bytes) -> None:
        """Write one frame."""
        if len(content) >= _MAX_FRAME:
            raise ValueError(f"a rank's result may have 2 GiB at most, this one has {len(content)}")
        data = memoryview(len(content).to_bytes(4, "little") + kind + content)
        with self.lock:
            while data:
                data = data[os.write(self.fd, data) :]

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Tell the parent that a communication began, is waited for, or ended."""
        self.send(b"E", json.dumps([kind, fields]).encode())


def rank_main(
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    options: Options,
    folder: str,
    pipe_fd: int,
    output_fd: int,
) -> None:
    """Run the body as ``rank`` in this fresh process and never return."""
    pipe = Pipe(pipe_fd)
    try:
        _detach(output_fd)
        _show_stack_when_asked(os.path.join(folder, f"{{}}{rank}"))
        ctx = _set_up(rank, world_size, options, folder)
        value = _run(ctx, fn, args, options, pipe)
        sys.stdout.flush()
        sys.stderr.flush()
        buffer = io.BytesIO()
        torch.save(value, buffer)
        content = buffer.getvalue()
        readable_content(content)
        pipe.send(b"R", content)
    except BaseException as error:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        pipe.send(b"X", json.dumps(describe(error, options.learner_files)).encode())
    while True:  # stay, so that a rank that still communicates with this one sees it wait
        signal.pause()


def _detach(output_fd: int) -> None:
    """Own session, own output, dies with its parent."""
    os.setsid()
    _die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(output_fd)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _show_stack_when_asked(file: str) -> None:
    """SIGUSR1 writes the stack to a file, also from inside an operator; as soon as Python code
    runs, a look at it (see ``looks.py``) to another."""
    looks = Looks()
    told = open(file.format("looks"), "w")  # noqa: SIM115 (must stay open for the handler)

    def look(_: int, frame: FrameType | None) -> None:
        looks.take(frame)
        told.write(json.dumps(looks.data()) + "\n")
        told.flush()

    signal.signal(signal.SIGUSR1, look)
    stack = open(file.format("stack"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False, chain=True)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _set_up(rank: int, world_size: int, options: Options, folder: str) -> RankContext:
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
        _die_with_parent()  # the kernel forgets it when a process enters a user namespace
    torch.set_num_threads(1)
    own_seed = options.seed * 1_000_003 + rank  # ranks that don't synchronise must differ
    torch.manual_seed(own_seed)
    random.seed(own_seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(own_seed % 2**32)
    device, backend = _device(rank, world_size, options.device)
    if options.process_group:
        loopback = "lo" if sys.platform == "linux" else "lo0"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        store = dist.FileStore(os.path.join(folder, "store"), world_size)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=options.timeout + 60),  # the parent's limit comes first
        )
    return RankContext(rank, world_size, device, options.seed)


def _device(rank: int, world_size: int, kind: str) -> tuple[torch.device, str]:
    """This rank's device and backend: several ranks share a GPU only over gloo."""
    if kind == "cpu":
        return torch.device("cpu"), "gloo"
    gpus = torch.cuda.device_count()
    if not gpus:
        raise ValueError("device 'cuda' was asked for, and this machine has no GPU")
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    return device, "nccl" if gpus >= world_size else "gloo"


def _run(
    ctx: RankContext, fn: Callable[..., Any], args: tuple[Any, ...], options: Options, pipe: Pipe
) -> Any:
    if not options.ledger:
        return fn(ctx, *args)
    pause = 0.01 if options.delays else 0.0
    own_seed = options.seed * 7919 + ctx.rank
    ctx.ledger = Ledger(options.learner_files, pipe.event, pause, own_seed)
    with ctx.ledger:
        value = fn(ctx, *args)
    spans = {"spans": ctx.ledger.raw_spans, "picture_from": ctx.ledger.picture_from}
    pipe.send(b"S", json.dumps(spans).encode())
    return value


def readable_content(content: bytes) -> None:
    """Refuse results that the parent would not read: it takes tensors and plain data only."""
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        raise TypeError(
            "a rank may return tensors, numbers, strings, None, lists, tuples and dicts only: "
            + str(error).splitlines()[0]
        ) from None


def describe(error: BaseException, learner_files: tuple[str, ...]) -> dict[str, Any]:
    """What the parent needs to know about an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename in learner_files]
    here = str(Path(__file__).parent)
    torch_folder = str(Path(torch.__file__).parent)
    outside = [f for f in frames if not f.filename.startswith((here, torch_folder, "<"))]
    shown = (own or outside or frames)[-1:]
    line = f"{shown[0].filename}:{shown[0].lineno}" if shown else ""
    if isinstance(error, SyntaxError) and error.filename in learner_files:
        line = f"{error.filename}:{error.lineno}"
    return {
        "type": type(error).__name__,
        "message": str(error),
        "line": line,
        "in_learner_code": bool(own),
        "cause": getattr(error, "cause", "") or "",
        "own_line": getattr(error, "line", "") or "",
        "is_import": isinstance(error, (ImportError, SyntaxError)),
        "kind": getattr(error, "kind", ""),
        "code": error.code if isinstance(error, SystemExit) else None,
    }


def spawned_main() -> None:
    """Entry of a rank that was started as a new Python: its task comes on standard input."""
    import cloudpickle

    task = cloudpickle.load(sys.stdin.buffer)
    rank_main(*task)


def make_folder() -> tempfile.TemporaryDirectory[str]:
    """A private folder for one run: the rendezvous store and the ranks' stacks."""
    return tempfile.TemporaryDirectory(prefix="distlab-")
