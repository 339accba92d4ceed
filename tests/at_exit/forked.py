"""Run programs one after the other, each with its ranks forked from here, where torch is imported.

    python tests/at_exit/forked.py FOLDER '[["name", 2, "fault", "package.program", "--option"], …]'

torchrun would import torch in every rank, and would end ranks when one has failed. What programs do
from ``main()`` to their end is the same: a rank joins by torchrun's environment, reports its
threads to FOLDER/<name>, where its output goes as well, and Python shuts down. The exit statuses of
the ranks, by name, go to FOLDER/statuses.json. ``fault`` is empty, or the type of an error that
rank 1 raises in its ``FAILS_AT``-th call of torch.distributed.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import itertools
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import rich.progress  # noqa: F401
import sitecustomize as at_exit
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # noqa: F401 (optimizers import it)
from torch.distributed import distributed_c10d

from distlab.reference import workloads  # noqa: F401 (the digits)

LATE = "torch.distributed.nn.functional"
FAILS_AT = 20
CALLS = (
    *("all_reduce", "broadcast", "barrier", "all_gather_into_tensor", "reduce_scatter_tensor"),
    *("all_to_all_single", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
)


def fail_on_purpose(kind: str) -> None:
    """Let this rank raise in one of its calls, whichever that is."""
    error = getattr(builtins, kind)
    calls = itertools.count(1)

    def counted(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if threading.current_thread() is threading.main_thread() and next(calls) == FAILS_AT:
                raise error("rank 1 fails on purpose")
            return original(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(dist, name, counted(getattr(dist, name)))


def rank_main(module: str, arguments: list[str], rank: str, fault: str, folder: Path) -> None:
    """The life of one rank; its last act is the report."""
    with open(folder / f"output{rank}", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    if fault:
        socket.gethostname = lambda: f"node{rank}"  # some programs want several nodes
        os.environ |= {"GROUP_RANK": rank, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    if fault and rank == "1":
        fail_on_purpose(fault)
    sys.argv = [module, *arguments]
    watch = at_exit.Watch()
    watch.start(distributed_c10d)
    importlib.import_module(module).main()
    watch.write(str(folder))


def serve() -> tuple[int, int]:
    """A process that serves a store, as torchrun's agent does, and the port."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        os.close(writing)
        signal.pause()
    os.close(writing)
    with open(reading) as pipe:
        return pid, int(pipe.read())


def run(
    world_size: int, fault: str, module: str, arguments: list[str], folder: Path
) -> list[int] | None:
    """The ranks' exit statuses; None in a rank, which is to end."""
    server, port = serve()
    folder.mkdir()
    pids = []
    for rank in map(str, range(world_size)):
        pid = os.fork()
        if not pid:
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0"}
            os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
            rank_main(module, arguments, rank, fault, folder)
            return None
        pids.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    return statuses


def main() -> None:
    """All programs; a rank returns at the end of its own."""
    folder, statuses = Path(sys.argv[1]), {}
    wanted = json.loads(sys.argv[2])
    assert LATE not in sys.modules, "a rank imports it before joining, or it keeps the group"
    if all(fault for _, _, fault, *_ in wanted):  # nobody looks at what such ranks keep
        importlib.import_module("torch._dynamo")  # optimizers import it, with the module above
    gc.freeze()  # a rank's collections, and its end, then leave alone what they would copy
    for name, world_size, fault, module, *arguments in wanted:
        statuses[name] = run(world_size, fault, module, arguments, folder / name)
        if statuses[name] is None:
            return
    (folder / "statuses.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    main()
