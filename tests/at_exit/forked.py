"""Run programs one after the other, each with its ranks forked from here, where torch is imported.

    python tests/at_exit/forked.py FOLDER '[[2, "package.program", "--option"], …]'

torchrun would import torch in every rank. What programs do from ``main()`` to their end is the
same: a rank joins by torchrun's environment, reports its threads to FOLDER/<program>, and Python
shuts down. The exit statuses of the ranks, by program, go to FOLDER/statuses.json.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
from pathlib import Path

import rich.progress  # noqa: F401
import sitecustomize as at_exit
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # noqa: F401 (optimizers import it)
from torch.distributed import distributed_c10d

from distlab.reference import workloads  # noqa: F401 (the digits)

LATE = "torch.distributed.nn.functional"


def rank_main(module: str, arguments: list[str], folder: Path) -> None:
    """The life of one rank; its last act is the report."""
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


def run(module: str, arguments: list[str], world_size: int, folder: Path) -> list[int] | None:
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
            rank_main(module, arguments, folder)
            return None
        pids.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    return statuses


def main() -> None:
    """All programs; a rank returns at the end of its own."""
    folder, statuses = Path(sys.argv[1]), {}
    assert LATE not in sys.modules, "a rank imports it before joining, or it keeps the group"
    gc.freeze()  # a rank's collections, and its end, then leave alone what they would copy
    for world_size, module, *arguments in json.loads(sys.argv[2]):
        statuses[module] = run(module, arguments, world_size, folder / module)
        if statuses[module] is None:
            return
    (folder / "statuses.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    main()
