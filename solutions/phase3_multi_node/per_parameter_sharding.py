"""Per-parameter sharding: every rank keeps its rows of every parameter (the FSDP2 way).

A flat vector forgets which parameter an element belongs to. So weight decay by group, freezing and
state dicts need a map back. Here each parameter is cut on its own, along dimension 0. With W ranks
and n rows, rank r keeps rows r·R to (r+1)·R, where R = ceil(n / W). The last ranks keep fewer rows,
or none. The shards of a unit still travel together, each padded to R rows:

    all-gather       [w rows 0-1 | b 0] [w rows 2-3 | b 1] [w row 4, padding | b 2]   one message
    copy             w = rows 0-4       b = 0-2
    reduce-scatter   gradients in the order of the all-gather                          one message

The copies cost time, and buy tensors that are parameters. Memory per rank for Ψ parameters in fp32
with Adam: 16Ψ/W bytes if all rows divide by W, plus the root, the unit at work and one ahead. With
P bytes of parameters, padding included, a rank sends (W-1)/W·(3P - P_root) bytes per step.

Invariant: outside of forward and backward the modules hold the shards, under the parameters' names.

Sources: Liang et al. 2024 (TorchTitan, arXiv 2410.06511), section 2.1.2 (FSDP2). Zhao et al. 2023
(PyTorch FSDP, arXiv 2304.11277), section 3.3 (prefetching, and 3.3.4 accumulation).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from given.agreement import Group
from given.fsdp_order import OrderedUnits
from given.fsdp_units import Attribute, FlatUnit, Parameters, alike, placed_parameters


def own_rows(whole: Tensor, rank: int, world_size: int) -> Tensor:
    """The rows of ``whole`` that ``rank`` of ``world_size`` keeps: a view, with all dimensions.

    Rows r·R to (r+1)·R belong to rank r, with R = ceil(rows / world_size). The last ranks have
    fewer rows, or none. A tensor without dimensions counts as one row, and comes back as (1,) or
    (0,). Joined along dimension 0 in the order of ranks, the parts are the whole again.
    """
    # --- exercise 3.32: start
    # Step 1: round the rows of a rank up; a slice ends where the tensor ends
    rows = whole.reshape(whole.shape or (1,))
    most = -(-len(rows) // world_size)
    return rows[rank * most : (rank + 1) * most]
    # --- exercise 3.32: end


class ShardedParameter:
    """One parameter: this rank's rows, and all rows while its unit is gathered.

    - ``shard``: a copy of this rank's rows. Modules and optimizers get it, as an nn.Parameter.
    - ``full``: the rows of all ranks with the padding, flat. While it is freed it has no storage.
    - ``leaf``: the parameter in its own shape, a view of ``full``'s storage. It is autograd's leaf.
    - ``numel``: the elements of one rank in a message, R rows.
    """

    def __init__(self, parameter: nn.Parameter, attributes: list[Attribute], group: Group) -> None:
        """Keep this rank's rows of ``parameter``, in row-major order. No communication."""
        self.attributes = attributes
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        # --- exercise 3.32: start
        # Step 2: copy the own rows, because a view would keep all rows alive. Rank 0 has most rows
        # Step 3: the leaf shares the storage but not its version counter (`data`). Backward fills
        #         it again, and that must not look like a change of tensors that autograd has saved
        whole, trainable = parameter.detach(), parameter.requires_grad
        own = own_rows(whole, self.rank, self.world_size)
        own = own.clone(memory_format=torch.contiguous_format)
        self.shard = nn.Parameter(own, requires_grad=trainable)
        self.numel = own_rows(whole, 0, self.world_size).numel()
        self.full = own.new_empty(self.world_size * self.numel)
        view = self.full.data[: whole.numel()].view(whole.shape)
        self.leaf = nn.Parameter(view, requires_grad=trainable)
        # --- exercise 3.32: end
        self.free()

    def gather_input(self) -> Tensor:
        """What this rank gives to the all-gather: its rows, padded at the end to (numel,)."""
        # --- exercise 3.32: start
        # Step 4: padding exists in messages only
        flat = self.shard.detach().flatten()
        return F.pad(flat, (0, self.numel - flat.numel()))
        # --- exercise 3.32: end

    def fill(self, by_rank: Tensor) -> None:
        """Copy all ranks' rows, ``by_rank`` (W, numel), into the leaf, and give it to the modules.

        The leaf is trainable if the shard is trainable now.
        """
        # --- exercise 3.32: start
        # Step 5: give the storage its memory back first, then one copy for all ranks
        self.full.untyped_storage().resize_(self.full.nbytes)
        self.full.view(by_rank.shape).copy_(by_rank)
        self.leaf.requires_grad_(self.shard.requires_grad)
        self.put(self.leaf)
        # --- exercise 3.32: end

    def free(self) -> None:
        """Give the memory of ``full`` back, and the shard to the modules."""
        self.put(self.shard)
        self.full.untyped_storage().resize_(0)

    def put(self, value: nn.Parameter) -> None:
        """Let the modules' attributes be ``value``."""
        for module, name, _ in self.attributes:
            setattr(module, name, value)

    def reduce_input(self) -> Tensor:
        """The leaf's gradient as (W, numel): row r belongs to rank r. Zeros if there is none."""
        # --- exercise 3.32: start
        # Step 6: row-major order, padded at the end as in the all-gather
        grad = torch.zeros_like(self.leaf) if self.leaf.grad is None else self.leaf.grad
        flat = grad.flatten()
        missing = self.world_size * self.numel - flat.numel()
        return F.pad(flat, (0, missing)).view(self.world_size, self.numel)
        # --- exercise 3.32: end

    def take(self, mean: Tensor) -> None:
        """Add this rank's part (numel,) of the mean gradient to ``shard.grad``."""
        # --- exercise 3.32: start
        # Step 7: without the padding, in the shard's shape
        own = mean[: self.shard.numel()].view(self.shard.shape)
        self.shard.grad = own.clone() if self.shard.grad is None else self.shard.grad + own
        # --- exercise 3.32: end


class RowShards:
    """The parameters of a unit that have one dtype. They travel in one message."""

    gathered = False  # the leaves are filled, and in the modules
    gathering: tuple[dist.Work, Tensor] | None = None  # handle, rows of all ranks
    reducing: tuple[dist.Work, Tensor, Tensor] | None = None  # handle, output, input

    def __init__(self, parameters: Parameters, group: Group) -> None:
        """Cut each of ``parameters``. No communication."""
        self.group, self.world_size = group, dist.get_world_size(group)
        self.parts = [ShardedParameter(p, where, group) for p, where in parameters.items()]
        self.leaves: list[Tensor] = [part.leaf for part in self.parts]
        self.sent: list[ShardedParameter] = []  # those whose gradients are under way

    def start_gather(self) -> None:
        """Issue one all-gather of all parameters, without waiting for it.

        Sends (W-1) times a rank's rows; nothing if the parameters are there, or on their way.
        """
        # --- exercise 3.32: start
        # Step 8: join the rows of all parameters where the all-gather leaves them, which saves a
        #         copy of a shard; keep the handle
        if self.gathered or self.gathering is not None:
            return
        rows = [part.gather_input() for part in self.parts]
        everyone = rows[0].new_empty(self.world_size * sum(row.numel() for row in rows))
        mine = everyone.chunk(self.world_size)[dist.get_rank(self.group)]
        torch.cat(rows, out=mine)
        work = dist.all_gather_into_tensor(everyone, mine, group=self.group, async_op=True)
        self.gathering = work, everyone
        # --- exercise 3.32: end

    def finish_gather(self) -> None:
        """Wait for the all-gather, if one is under way, and fill each parameter."""
        # --- exercise 3.32: start
        # Step 9: what comes has a row for each rank. A parameter is the same columns of all rows
        if self.gathering is None:
            return
        work, everyone = self.gathering
        work.wait()
        self.gathering, self.gathered = None, True
        columns = everyone.view(self.world_size, -1).split([p.numel for p in self.parts], dim=1)
        for part, by_rank in zip(self.parts, columns, strict=True):
            part.fill(by_rank)
        # --- exercise 3.32: end

    def free(self) -> None:
        """Give the full parameters' memory back, after any gather that is under way."""
        # --- exercise 3.32: start
        # Step 10: a gather in flight still writes: wait for it
        if self.gathering is not None:
            self.gathering[0].wait()
            self.gathering = None
        for part in self.parts if self.gathered else []:
            part.free()
        self.gathered = False
        # --- exercise 3.32: end

    def start_reduce(self) -> None:
        """Issue one reduce-scatter of the gradients without waiting, and forget these.

        Parameters that are frozen now are not sent, and keep the ``grad`` of their shards. A
        trainable one without a gradient counts as zero. If none of them has a gradient, nothing is
        sent: that must be so on all ranks or on none.
        """
        # --- exercise 3.32: start
        # Step 11: the columns are in the order of the all-gather, so rank r gets its own rows
        self.sent = [part for part in self.parts if part.shard.requires_grad]
        if all(part.leaf.grad is None for part in self.sent):
            return
        joined = torch.cat([part.reduce_input() for part in self.sent], dim=1).flatten()
        for leaf in self.leaves:
            leaf.grad = None
        own = joined.new_empty(joined.numel() // self.world_size)
        work = dist.reduce_scatter_tensor(own, joined, group=self.group, async_op=True)
        self.reducing = work, own, joined
        # --- exercise 3.32: end

    def finish_reduce(self) -> None:
        """Wait for the reduce-scatter, if one is under way; add the mean to ``shard.grad``."""
        # --- exercise 3.32: start
        # Step 12: divide once, by W, then cut
        if self.reducing is None:
            return
        work, own, _ = self.reducing
        work.wait()
        self.reducing = None
        means = own.div_(self.world_size).split([part.numel for part in self.sent])
        for part, mean in zip(self.sent, means, strict=True):
            part.take(mean)
        # --- exercise 3.32: end


Unit = FlatUnit[RowShards]


class PerParameterFSDP(OrderedUnits[RowShards]):
    """``module``, trained like one process on all ranks' batches; a rank keeps rows of parameters.

    ``units``: submodules that are gathered one at a time, none inside another. The root unit takes
    all other parameters. Tied parameters must lie in one unit. Outside of forward and backward
    ``module.named_parameters()`` are the shards, with the names and the order of the plain module.
    So groups for an optimizer are made as for the plain module, but after wrapping.
    ``module.state_dict()`` and the optimizer's state have this rank's rows of each parameter. In a
    unit's forward its attributes are the full parameters, with the shards' values at that time.

    ``given/fsdp_order.py`` says when a unit is gathered. At most one is gathered ahead, and at most
    one unit's reduce-scatters are under way. When ``backward()`` returns, nothing is under way, and
    it has added to the shards' ``grad`` the mean over the ranks of ``group``. All ranks must run
    the same units in the same order. A unit that no rank uses gets no gradient. ``requires_grad``
    of a shard may change between two steps, on all ranks alike. If a shard was cast or moved, the
    next forward raises ValueError. If a forward or backward raised on all ranks, the next forward
    begins anew; until then modules may hold full parameters. Forward and backward never let the
    host wait for a GPU.

    Raises ValueError, before any communication, if units overlap or are not inside ``module``, or
    if a parameter is tied across units. The same holds if parameters are on several devices, if
    none is trainable, or if this rank is no member of ``group``.
    """

    def __init__(
        self, module: nn.Module, units: Sequence[nn.Module] = (), *, group: Group = None
    ) -> None:
        """Shard ``module`` in place; its values must be the same on all ranks. No communication."""
        super().__init__()
        owned = placed_parameters(module, units, group)
        self.module, self.group, self.sync = module, group, True
        for owner, mine in zip((module, *units), owned, strict=True):
            flats = [RowShards(same, group) for same in alike(mine, lambda p: p.dtype)]
            self.units.append(Unit(owner, flats))
        self.watch_units()

    def fixed(self) -> list[object]:
        """Dtypes and devices. Unlike in a flat vector, parameters may be frozen at any time."""
        return [(p.dtype, str(p.device)) for p in self.parameters()]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; a collective call."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A backward in this context sends nothing but gathers: a later one outside sends the sum.

        Until then each rank keeps full gradients. Contexts may be nested. At the end of a context,
        also by an exception, the earlier setting is back. If a backward raises, the next forward
        forgets what was not sent.
        """
        # --- exercise 3.32: start
        # Step 13: a setting that `after_backward` reads; remember the earlier one
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before
        # --- exercise 3.32: end

    def after_backward(self, unit: Unit) -> None:
        """``unit``'s backward is done: free it, wait for the earlier reduction, issue its own."""
        # --- exercise 3.32: start
        # Step 14: what is not sent stays in the leaves, and autograd adds to it
        unit.free()
        if self.sync:
            for other in self.units:
                other.finish_reduce()
            unit.start_reduce()
        # --- exercise 3.32: end
