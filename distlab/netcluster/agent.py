"""torchrun on one node of a cluster, as ``launch`` starts it.

The agents meet at a store that node 0's process serves. torchrun ends there as soon as all agents
have said that they are done, and the store ends with it. Often the other agents have not read that
yet. Then each of them prints a traceback after a run that went well. Here node 0 serves the store
itself (torchrun shares the server of its own process) and leaves last. A rank's failure is reported
without the agent's own traceback, and its exit status is the agent's.
"""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta

from torch.distributed import DistError, TCPStore

from given.parent import end_with_parent
from given.torchrun import torchrun

PATIENCE = timedelta(seconds=2)  # after a failure an agent may never say that it has left


def main(nodes: int, node: int, address: str, port: int, arguments: list[str]) -> int:
    """Run torchrun with ``arguments``; node 0 stays until the others have left."""
    store = None
    if node == 0:
        store = TCPStore(address, port, is_master=True, wait_for_workers=False, multi_tenant=True)
    status = torchrun(arguments, name=f"node {node}")
    with contextlib.suppress(DistError):
        if store is None:
            store = TCPStore(address, port, timeout=PATIENCE, wait_for_workers=False)
            store.set(f"left{node}", "")
        else:
            store.wait([f"left{other}" for other in range(1, nodes)], PATIENCE)
    return status


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5:]))
