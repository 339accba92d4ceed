"""The ``torch.distributed`` backend of virtual ranks: a process group whose transport is in memory.

Every method turns its arguments into a ``Part`` and posts it; ``VirtualWork`` is the handle that
waits for it. Signatures are those that torch calls, from Python and from C++ (functional
collectives, DistributedDataParallel), old and new names.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ..observe.lines import learner_line, source_line
from ..observe.log import two_in_one_buffer
from ..observe.operators import share_memory
from .gloo_refusals import refuse
from .machine import Machine
from .moves import COMBINE
from .part import Part
from .shards import cut, wholes_of
from .work import VirtualWork


def _many(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _flat(tensor: Tensor, what: str) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"{what}: tensors must be contiguous")
    return tensor.detach().view(-1)


class VirtualGroup(dist.ProcessGroup):
    """One rank's membership in a group; ``channel`` is the same object for all its members."""

    def __init__(self, world: Machine, ranks: tuple[int, ...], channel: Any, rank: int) -> None:
        super().__init__(rank, len(ranks))
        self.world, self.ranks, self.channel = world, ranks, channel
        self.member = world.scheduler.me
        self.thread = threading.get_ident()
        self.name = channel.name

    # -- identity -------------------------------------------------------------------------------
    def getBackendName(self) -> str:
        """The name under which the backend is registered."""
        return "virtual"

    @property
    def pg_name(self) -> str:
        """The name under which torch keeps the group."""
        return self.name

    @property
    def group_name(self) -> str:
        """The same; functional collectives look the group up by it."""
        return self.name

    @property
    def supports_splitting(self) -> bool:
        """Sub-groups are made anew, not split from this one."""
        return False

    def _get_backend(self, device: torch.device) -> VirtualGroup:
        return self

    @property
    def supports_coalescing(self) -> bool:
        """Batches of messages are issued one by one."""
        return False

    # -- posting --------------------------------------------------------------------------------
    def _post(self, op: str, outputs: Sequence[Tensor], **fields: Any) -> VirtualWork:
        for tensor in (*wholes_of(fields.get("gives", ())), *wholes_of(fields.get("gets", ()))):
            if tensor.is_sparse or (tensor.is_cuda and not self.world.rules.nccl):
                kind = "sparse" if tensor.is_sparse else "CUDA"
                raise ValueError(f"virtual ranks can't communicate a {kind} tensor")
        return self._issue(Part(self.member, op, self.ranks, **fields), outputs)

    def _issue(self, part: Part, outputs: Sequence[Tensor]) -> VirtualWork:
        refuse(part)
        return self._issue_on(self.channel, part, outputs)

    def _issue_on(self, channel: Any, part: Part, outputs: Sequence[Tensor]) -> VirtualWork:
        if threading.get_ident() != self.thread:
            self.world.scheduler.me  # noqa: B018 (raises with an explanation)
        self.world.post(part, channel)
        work = VirtualWork(self.world, part, outputs)
        self.world.states[part.rank.index].works[id(work)] = work
        return work

    def _root(self, opts: Any, tensor: int = 0) -> int:
        root = opts if isinstance(opts, int) else opts.rootRank
        if not 0 <= root < len(self.ranks):
            raise ValueError(f"root {root} is not in a group of {len(self.ranks)}")
        return self.ranks[root]

    def _reduction(self, opts: Any, tensors: Sequence[Tensor]) -> Any:
        op = getattr(opts, "reduceOp", opts)
        if op is None:
            op = ReduceOp.SUM
        if not any(op == known for known, _ in COMBINE):
            raise ValueError(f"virtual ranks have no reduction {op}")
        return op

    # -- messages -------------------------------------------------------------------------------
    def send(self, tensors: Any, dst: int, tag: int = 0) -> VirtualWork:
        """One message to group rank ``dst``."""
        mine = self._buffer(tensors)
        part = Part(self.member, "send", self.ranks, mine, (), self._peer(dst), tag)
        part.payload = mine
        return self._issue(part, ())

    def recv(self, tensors: Any, src: int, tag: int = 0) -> VirtualWork:
        """One message from group rank ``src``."""
        mine = self._buffer(tensors)
        self._not_in_use(mine[0], f"rank {self._peer(src)}")
        part = Part(self.member, "recv", self.ranks, (), mine, self._peer(src), tag)
        part.payload = mine
        return self._issue(part, mine)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> VirtualWork:
        """One message from the rank that sends first."""
        mine = self._buffer(tensors)
        self._not_in_use(mine[0], "any rank")
        return self._post("recv", mine, gets=mine, payload=mine, tag=tag)

    def _buffer(self, tensors: Any) -> Sequence[Tensor]:
        mine = [tensors] if isinstance(tensors, Tensor) else tensors
        if len(mine) != 1:
            raise ValueError("a message is one tensor")
        return mine

    def _not_in_use(self, buffer: Tensor, source: str) -> None:
        """Refuse two messages that arrive in one memory: only luck decides
        which of them is read."""
        for part in self._issued():
            if part.op == "recv" and share_memory(part.gets[0], buffer):
                line = source_line(learner_line(sys._getframe(1), self.world.learner_files))
                raise two_in_one_buffer(part.describe(), source, self.member.index, line)

    def _issued(self) -> list[Part]:
        """The operations that the rank has issued and not waited for."""
        return [work.part for work in self.world.states[self.member.index].works.values()]

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < len(self.ranks):
            raise ValueError(f"rank {rank} is not in a group of {len(self.ranks)}")
        return self.ranks[rank]

    # -- collectives ----------------------------------------------------------------------------
    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> VirtualWork:
        """Every rank gets the reduction."""
        mine = _many(tensors)
        op = self._reduction(opts, mine)
        return self._post("all_reduce", mine, gives=mine, gets=mine, payload=mine, reduce_op=op)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any, *_: Any) -> VirtualWork:
        """Every rank gets the root's tensors."""
        mine = _many(tensors)
        return self._post(
            "broadcast", mine, gives=mine, gets=mine, payload=mine, peer=self._root(opts)
        )

    def reduce(self, tensors: Any, opts: Any, *more: Any) -> VirtualWork:
        """The root gets the reduction."""
        mine = _many(tensors)
        op = self._reduction(more[0] if more else getattr(opts, "reduceOp", None), mine)
        root = self._root(opts)
        return self._post(
            "reduce", mine, gives=mine, gets=mine, payload=mine, peer=root, reduce_op=op
        )

    def allgather(self, outputs: Any, inputs: Any, *_: Any) -> VirtualWork:
        """Every rank gets all inputs."""
        mine = _many(inputs)
        lists = [outputs] if isinstance(outputs[0], Tensor) else outputs
        gets = [tensor for out in lists for tensor in out]
        return self._post("all_gather", gets, gives=mine, gets=gets, payload=mine)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, *_: Any) -> VirtualWork:
        """Every rank gets all inputs, joined."""
        gives, wholes = _many(inputs), _many(outputs)
        gets = cut([_flat(out, "all_gather") for out in wholes], len(self.ranks))
        return self._post("all_gather", wholes, gives=gives, gets=gets, payload=gives)

    all_gather_single = all_gather_single_coalesced = allgather_into_tensor_coalesced
    _allgather_base = allgather_coalesced = allgather_into_tensor_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *_: Any) -> VirtualWork:
        """Rank r gets the reduction of everybody's r-th input."""
        mine = _many(outputs)
        lists = [inputs] if isinstance(inputs[0], Tensor) else inputs
        gives = [tensor for each in lists for tensor in each]
        op = self._reduction(opts, mine)
        return self._post(
            "reduce_scatter", mine, gives=gives, gets=mine, payload=gives, reduce_op=op
        )

    def reduce_scatter_tensor_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None, *_: Any
    ) -> VirtualWork:
        """Rank r gets the reduction of everybody's r-th chunk."""
        mine, wholes = _many(outputs), _many(inputs)
        gives = cut([_flat(whole, "reduce_scatter") for whole in wholes], len(self.ranks))
        op = self._reduction(opts, mine)
        return self._post(
            "reduce_scatter", mine, gives=gives, gets=mine, payload=wholes, reduce_op=op
        )

    reduce_scatter_single = reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    _reduce_scatter_base = reduce_scatter_tensor_coalesced

    def alltoall(self, outputs: Any, inputs: Any, *_: Any) -> VirtualWork:
        """Rank r gets everybody's r-th input."""
        gets, gives = list(outputs), list(inputs)
        return self._post("all_to_all", gets, gives=gives, gets=gets, payload=gives)

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any, *_: Any
    ) -> VirtualWork:
        """Rank r gets everybody's r-th part; the parts are ``splits`` rows, or equal."""
        gets = self._parts(output, output_splits)
        gives = self._parts(input, input_splits)
        return self._post("all_to_all", [output], gives=gives, gets=gets, payload=[input])

    all_to_all_single = alltoall_base

    def _parts(self, tensor: Tensor, splits: Any) -> list[Tensor]:
        _flat(tensor, "all_to_all")
        count = len(self.ranks)
        if not splits:
            if tensor.shape[0] % count:
                raise ValueError(f"all_to_all of {tensor.shape[0]} rows over {count} ranks")
            splits = [tensor.shape[0] // count] * count
        return list(tensor.detach().split(list(splits)))

    def gather(self, outputs: Any, inputs: Any, opts: Any, *_: Any) -> VirtualWork:
        """The root gets all inputs."""
        mine, root = _many(inputs), self._root(opts)
        gets = list(outputs[0]) if root == self.member.index else []
        return self._post("gather", gets, gives=mine, gets=gets, payload=mine, peer=root)

    def scatter(self, outputs: Any, inputs: Any, opts: Any, *_: Any) -> VirtualWork:
        """Rank r gets the root's r-th input."""
        mine, root = _many(outputs), self._root(opts)
        gives = list(inputs[0]) if root == self.member.index else []
        return self._post("scatter", mine, gives=gives, gets=mine, payload=mine, peer=root)

    def barrier(self, *_: Any, **__: Any) -> VirtualWork:
        """No rank goes on before all have come."""
        return self._post("barrier", [])

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        """A barrier that waits in the call."""
        self.barrier().wait()
