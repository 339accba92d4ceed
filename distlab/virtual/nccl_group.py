"""The process group of virtual ranks under NCCL's rules: communicators, batches and refusals.

``rules.py`` has the rules and their sources. Refusals raise what PyTorch raises there:

- a CPU tensor: ``Backend type`` of ``ProcessGroup.hpp`` (``getBackend``), RuntimeError;
- a receive from any rank: ``Backend.hpp`` (``recvAnysource``), RuntimeError;
- BAND, BOR, BXOR: ``ProcessGroupNCCL.cpp`` (``getNcclReduceOp``), ValueError;
- a dtype that NCCL lacks: ``ProcessGroupNCCL.cpp`` (``getNcclDataType``), TypeError; complex
  numbers are pairs of real ones in collectives only;
- a tensor with gaps: ``check_gpu_single_tensor`` there, ValueError.

NCCL ignores tags (``send``'s parameter is ``/* unused */``), so messages meet in the order of
issue. A tag other than 0 is refused here. A second ``wait`` returns, as on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ..observe.lines import names
from ..observe.log import P2P
from .communicators import Communicator, Gpu, Splits
from .devices import gpu_of
from .flight import poison
from .gloo_refusals import BITWISE
from .group import VirtualGroup
from .machine import Machine
from .order import Entry
from .part import Part
from .rules import Rules
from .work import VirtualWork

DTYPES = {
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
}


class BatchWork(dist.Work):
    """The one handle of a batch."""

    def __init__(self, works: Sequence[VirtualWork] = ()) -> None:
        super().__init__()
        self.works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block this rank until all operations of the batch are complete."""
        for work in self.works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Whether all are complete by now."""
        return all(work.is_completed() for work in self.works)

    def is_success(self) -> bool:
        """An operation either succeeds or ends the run."""
        return all(work.is_success() for work in self.works)

    def exception(self) -> None:
        """Failures end the run; none is kept in the handle."""

    def synchronize(self) -> None:
        """Virtual ranks have one stream: the same as waiting."""
        self.wait()

    def block_current_stream(self) -> None:
        """Virtual ranks have one stream: the same as waiting."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that were written."""
        return [tensor for work in self.works for tensor in work.outputs]


class NcclGroup(VirtualGroup):
    """One rank's membership; ``channel.shared`` holds the communicators, the same for all.

    ``made``: the group's own communicator is there already, from a split. ``device``: the one given
    to ``init_process_group``; where a device is bound without it, the current one. ``host``: gloo
    beside NCCL, for tensors in the host's memory (``cpu:gloo,cuda:nccl``).
    """

    def __init__(
        self,
        world: Machine,
        ranks: tuple[int, ...],
        channel: Any,
        rank: int,
        rules: Rules,
        made: bool,
        device: torch.device | None,
        host: VirtualGroup | None = None,
    ) -> None:
        super().__init__(world, ranks, channel, rank)
        self.rules, self.host = rules, host
        self.batch: list[tuple[Part, Sequence[Tensor]]] | None = None
        self.made, self.bound = made, device
        if rules.bound:
            self.bound = device or torch.device("cuda", torch.cuda.current_device())
            self.bound_device_id = self.bound
        if rules.eager:
            self._communicator(None)

    def _gpu(self, part: Part | None) -> Gpu:
        """The node and the GPU of this rank that a communicator is made for."""
        tensors = () if part is None else (*part.gives, *part.gets)
        found = self.bound or next(filter(None, map(gpu_of, tensors)), None)
        node = self.world.network.cluster.node(self.member.index)
        return node, found or torch.device("cuda", torch.cuda.current_device())

    # -- communicators --------------------------------------------------------------------------
    def splits_for(self, backend: str, ranks: Sequence[int]) -> bool:
        """Whether a new group makes this rank split this one, the default group.

        For a gloo group torch 2.8 lets only the ranks outside of it split
        (``_new_process_group_helper``; ``_get_split_source`` of 2.15 knows better).
        """
        outside = self.member.index not in ranks
        return self.rules.bound and (backend != "gloo" or (self.rules.eager and outside))

    def split(self) -> None:
        """Take part in making a group, as a member or not (``perform_nocolor_split``)."""
        self._communicator(None)
        shared = self.channel.shared
        splits = shared.setdefault("splits", Splits(self.ranks))
        splits.come(self.world.scheduler, self._gpu(None))

    def _communicator(self, part: Part | None, batched: bool = False) -> Communicator:
        """The communicator of the part; this rank comes to it."""
        key = ranks = self.ranks
        if part is not None and part.op in P2P and self.rules.pairs and not batched:
            assert part.peer is not None
            ranks = tuple(sorted({self.member.index, part.peer}))
            key = *ranks, -1  # beside the group's, which may have two ranks as well
        found = self.channel.shared.get(key)
        if found is None:
            what = f"the first use of the communicator of {names(ranks)}: each of them must come"
            found = self.channel.shared[key] = Communicator(ranks, what)
        if not self.made or key != self.ranks:
            found.come(self.world.scheduler, self._gpu(part))
        return found

    # -- issuing --------------------------------------------------------------------------------
    def _get_backend(self, device: torch.device) -> VirtualGroup:
        return self.host if self.host is not None and device.type == "cpu" else self

    def _by_gloo(self, tensors: Sequence[Tensor]) -> bool:
        return self.host is not None and bool(tensors) and gpu_of(tensors[0]) is None

    def _issue(self, part: Part, outputs: Sequence[Tensor]) -> VirtualWork:
        if self._by_gloo((*part.gives, *part.gets)):
            return super()._issue(part, outputs)
        self._refuse(part)
        if self.batch is not None:
            self.batch.append((part, outputs))
            return BatchWork()
        communicator = self._communicator(part)
        part.entry = Entry()
        poison(part)
        return self._issue_on(communicator, part, outputs)

    def _issued(self) -> list[Part]:
        return super()._issued() + [part for part, _ in self.batch or ()]

    @property
    def supports_coalescing(self) -> bool:
        """Batches are issued at once."""
        return True

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a batch: all that is issued from here on."""
        self.batch = []

    def _end_coalescing(self, device: torch.device) -> BatchWork:
        """Issue the batch; its one handle."""
        batch, self.batch = self.batch or [], None
        works = []
        entry = Entry(len(batch))
        for part, outputs in batch:
            part.entry = entry
            poison(part)
            works.append(self._issue_on(self._communicator(part, True), part, outputs))
        return BatchWork(works)

    # -- what is refused ------------------------------------------------------------------------
    def _refuse(self, part: Part) -> None:
        if part.tag:
            raise ValueError(
                f"NCCL ignores tags, and this {part.op} has tag {part.tag}: messages between two "
                "ranks meet in the order of issue. gloo forgives it, for it matches tags"
            )
        for tensor in (*part.gives, *part.gets):
            self._refuse_device(tensor, part.op)
            if not tensor.is_contiguous():
                raise ValueError(
                    f"Tensors must be contiguous: {part.op} was given one of shape "
                    f"{tuple(tensor.shape)} with strides {tensor.stride()}. gloo's collectives "
                    "forgive it, if there are no gaps and all ranks have the same strides; use "
                    ".contiguous()"
                )
            dtype = tensor.dtype
            if dtype.is_complex and part.op not in P2P:
                continue  # a pair of real numbers
            if dtype not in DTYPES:
                name = str(dtype).removeprefix("torch.")
                raise TypeError(
                    f"Input tensor data type is not supported for NCCL process group: {name} "
                    f"({part.op}). gloo forgives it in messages, which are bytes to it"
                )

    def _refuse_device(self, tensor: Tensor, op: str) -> None:
        gpu = gpu_of(tensor)
        if gpu is None:
            raise RuntimeError(
                f"No backend type associated with device type cpu: {op} was given a tensor of the "
                "host, and NCCL moves what is on GPUs only. gloo forgives it, for it moves what is "
                "on the host; make it with device=…, or use .to(device)"
            )
        if self.bound is not None and gpu != self.bound:
            raise dist.DistBackendError(
                f"{op} was given a tensor on {gpu}, and this rank's GPU is {self.bound}: Attempt "
                "to perform collective on tensor not on device passed to init_process_group"
            )

    def _reduction(self, opts: Any, tensors: Sequence[Tensor]) -> Any:
        if self._by_gloo(tensors):
            return super()._reduction(opts, tensors)
        op = getattr(opts, "reduceOp", opts)
        op = ReduceOp.SUM if op is None else op
        for name, bitwise in BITWISE.items():
            if op == bitwise:
                raise ValueError(
                    f"Cannot use ReduceOp.{name} with NCCL. gloo forgives it, for it has bitwise "
                    "operators; of flags that are 0 or 1 MAX is their or, MIN their and"
                )
        if any(t.is_complex() for t in tensors) and op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ValueError(f"all_reduce does not support {op} on complex tensors")
        return op

    def recv_anysource(self, tensors: Any, tag: int = 0) -> VirtualWork:
        """NCCL has no receive from any rank."""
        if self._by_gloo(self._buffer(tensors)):
            return super().recv_anysource(tensors, tag)
        raise RuntimeError(
            "Backend nccl does not support recvAnysource: name the source rank. gloo forgives it, "
            "for it takes the first message that comes"
        )

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        """Only gloo has one."""
        raise ValueError("monitored_barrier is only implemented for GLOO backend.")
