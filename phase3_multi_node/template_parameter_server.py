# Exercises 3.22, 3.23, 3.24: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.22
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""A server's end of a parameter server: it keeps its keys, answers pulls and applies pushes.

The three ways to serve differ in when the server answers:

    synchronous     all live workers read the same version; their mean gradient makes the next one
    asynchronous    a push is applied when it comes, a pull is answered when it comes
    bounded (SSP)   as asynchronous, but a worker that is too far ahead of the slowest waits

The protocol, the same for all three, is in ``parameter_client``. If each of W-S workers uses b
bytes of parameters, a server moves (W-S)·2b/S bytes per step. With one server its link is the
bottleneck, so keys are spread evenly. An update is never lost: one loop reads, changes and answers,
one request at a time.

If a worker dies, a receive from it *by name* raises. A server receives headers of asynchronous
workers from any rank: gloo can do that, NCCL can't, and gloo can't be polled.
Sources: Li et al. 2014 (OSDI, parameter server), sections 3.1, 3.4 and 3.5. Ho et al. 2013 (NIPS,
SSP).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group, expect_alike

from .template_parameter_client import (
    FIELDS,
    LEAVE,
    LOST,
    PULL,
    PUSH,
    Client,
    check_roles,
    cut,
    place_keys,
    train,
)


@dataclass
class Request:
    """A worker's request; ``gradients`` come with PUSH."""

    worker: int
    kind: int
    clock: int = 0
    samples: int = 0
    keys: list[str] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)


class Server:
    """A server's end: the values of its keys, and what it does with one request.

    ``values``: key to tensor, in the order of ``parameters``, copied from them to the CPU in their
    dtype. ``version``: updates so far. ``live``: workers that have neither left nor died. ``lost``:
    workers that died, and the error. Workers are named by their rank of ``group``. Raises
    ValueError as ``place_keys`` and ``check_roles`` do.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], *, servers: int, lr: float, group: Group = None
    ) -> None:
        server_of = place_keys(parameters, servers)
        workers = check_roles(servers, group)
        me = dist.get_rank(group)
        self.names, self.lr, self.group = list(parameters), lr, group
        self.values = {
            k: p.detach().cpu().clone() for k, p in parameters.items() if server_of[k] == me
        }
        self.live = list(range(servers, servers + workers))
        self.lost: dict[int, str] = {}
        self.version = 0

    def receive(self, worker: int | None) -> Request:
        """The next request of ``worker``, or of any (None); PUSH only with all of its gradients.

        ``keys`` and ``gradients`` are those that live here. A worker whose connection breaks is
        removed from ``live`` and noted in ``lost``, and the request is LOST. A worker that leaves
        is removed from ``live``. A broken receive from any worker raises RuntimeError.
        """
        # Step 1: the header says what follows; the gradients come from the same worker, by name
        # Step 2: a broken connection ends this worker, not the server
        raise NotImplementedError("exercise 3.22")

    def _drop(self, worker: int, error: RuntimeError) -> Request:
        self.live.remove(worker)
        self.lost[worker] = str(error)
        return Request(worker, LOST)

    def answer(self, request: Request) -> None:
        """Send the version and the values that a PULL asks for; a worker that is gone is lost,
        too."""
        # Step 3: one vector, a copy, so that an update can't change what is on its way
        raise NotImplementedError("exercise 3.22")

    def update(self, pushes: list[Request]) -> None:
        """One step of SGD: every key moves by its mean gradient over the samples of ``pushes``.

        Only workers that have pushed a key count in its mean, weighted by their samples. 0 samples
        count for nothing, whatever their gradients are. ``pushes`` make one version more. Without
        any push nothing happens.
        """
        # Step 4: for each key use the gradients that came, weighted by samples; one version more
        raise NotImplementedError("exercise 3.22")


def serve_synchronous(server: Server) -> None:
    """Serve until no worker is left, in rounds: all live workers pull, then all of them push.

    All pulls of a round see the same version. The mean of the round's pushes makes the next one.
    Workers may take different numbers of rounds, and may leave after a pull. The server no longer
    waits for a worker that left or died, and the worker does not count in the mean. On each server
    its push counts in full or not at all. A round without a push makes no version.
    """
    # Step 5: answer every live worker before taking the first push: they compute together
    # Step 6: wait for each by name, so that you notice a death; the workers that are left make the
    #         round
    raise NotImplementedError("exercise 3.22")


def serve_asynchronous(server: Server) -> None:
    """Serve until no worker is left: every request at once, from whichever worker.

    Each push is one update (a version). No push is lost, and none waits for another worker.
    """
    # Step 1: take the request that comes first; receive from the last worker by name, to notice its
    #         death
    # Step 2: answer a pull; apply a push on its own
    raise NotImplementedError("exercise 3.23")


def serve_bounded(server: Server, staleness: int) -> None:
    """Serve asynchronously, but hold a pull back while its worker is too far ahead.

    A worker at clock c has pushed c times. It is answered when every live worker has pushed at
    least c - ``staleness`` times. A worker that leaves or dies holds no other back. With 0 all
    workers compute their c-th gradients after all others' c-1-th. Raises ValueError, before
    anything is received, if ``staleness`` < 0.
    """
    # Step 1: refuse a negative bound; keep a clock per worker, and the pulls that wait
    # Step 2: held workers send nothing. If only one worker can send, receive from it by name, to
    #         notice its death
    # Step 3: a push moves its worker's clock; a worker that is gone has none
    # Step 4: then answer all pulls that the slowest live worker allows now
    raise NotImplementedError("exercise 3.24")


def fit(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    servers: int,
    lr: float,
    staleness: float | None = None,
    group: Group = None,
) -> dict[str, Tensor]:
    """Every rank calls it: the first ``servers`` ranks serve, the others train on their batches.

    ``staleness``: None for synchronous rounds, infinity for asynchronous, else the bound. Training
    begins with the servers' values of the keys. A server's batches are not read. Returns the final
    values of this server's keys, on a worker an empty dict. Only trainable parameters are keys. All
    other tensors stay each rank's own. Raises ValueError, on every rank and before any
    communication, for a negative staleness and as ``place_keys`` and ``check_roles`` do. Raises
    ValueError on every rank, after one all-reduce of 48 bytes, if the ranks' keys differ in shapes
    or dtypes.
    """
    # Step 5: every rank checks the settings and the models (`expect_alike`). A worker would wait
    #         for a server that has refused, and a message of another length would end a server
    # Step 6: this rank's role decides; trainable parameters are the keys
    raise NotImplementedError("exercise 3.24")
