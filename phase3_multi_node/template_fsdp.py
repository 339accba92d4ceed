# Exercises 3.15: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.15
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Fully sharded data parallelism: parameters, gradients and optimizer state in 1/W each.

The model is divided into *units* (for a transformer its blocks; the root unit takes what is left).
The parameters of a unit are joined in one flat vector, of which every rank keeps a shard. Only
while a unit computes does it have its full parameters:

    forward     all-gather unit | compute | free
    backward    all-gather unit | compute | free, reduce-scatter its gradient
    optimizer   steps on the shards: any optimizer, because each element is updated on its own

Memory per rank, for Ψ parameters in fp32 with Adam: 16Ψ/W bytes, plus the unit at work and the
root in full, and in backward their gradients. Bytes sent per rank and step, for P bytes of
parameters: 3(W-1)/W·P, in three messages per unit; data parallelism sends 2(W-1)/W·P. Invariant:
outside of its forward and backward a unit's full vector has no storage; autograd's saved views of
it point to a storage that comes back before they are used.

Sources: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), sections 5.3 and 7.2.2 (stage 3); Zhao
et al. 2023 (PyTorch FSDP, arXiv 2304.11277), sections 3.2 (flat parameters) and 4 (hooks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from given.agreement import Group, device_in
from given.fsdp_units import FlatUnit, HookedUnits, Parameters, owned_parameters


class FlatParameter:
    """Parameters of one dtype as one vector, cut into equal parts over the ranks of ``group``.

    Element i of the vector belongs to rank i // chunk, with chunk = ceil(numel / W).

    - ``shard``: this rank's part (n,), the nn.Parameter that optimizers get, a copy. The last
      ranks' shards may be shorter than ``chunk``, or empty: padding exists on the wire only.
    - ``full``: (W·chunk,) the gathered vector; without storage while it is freed.
    - ``leaves``: the parameters as views of ``full``'s storage, autograd's leaves; while the vector
      is gathered they stand in the modules' attributes (``places``), else None does.
    """

    gathering: dist.Work | None = None
    reducing: tuple[dist.Work, Tensor, Tensor] | None = None  # handle, output, input

    def __init__(self, parameters: Parameters, group: Group, device: torch.device) -> None:
        """Keep this rank's part of ``parameters``, of one dtype, all trainable or all frozen.

        The shard lies on ``device`` and is trainable if they are; of parameters on meta it has no
        values yet. Elements are in row-major order, whatever the parameters' strides. The ranks
        must come with the same values. No communication.
        """
        self.group, self.places = group, list(parameters.values())
        self.shapes = [p.shape for p in parameters]
        self.numel = sum(p.numel() for p in parameters)
        first = next(iter(parameters))
        # Step 1: equal parts, the last ones shorter or empty; a copy of the own part, because a
        #         view would keep the whole vector alive
        raise NotImplementedError("exercise 3.15")
        self.make_full(first.dtype, device)

    def make_full(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make ``full`` and its ``leaves``, and take the storage away again."""
        # Step 2: views that share the storage but not its version counter: filling it again in
        #         backward must not look like a change of what autograd has saved
        raise NotImplementedError("exercise 3.15")

    def gather_input(self) -> Tensor:
        """What this rank gives to the all-gather: the shard, padded to (chunk,)."""
        missing = self.chunk - self.shard.numel()
        shard = self.shard.detach()
        return F.pad(shard, (0, missing)) if missing else shard

    def start_gather(self) -> None:
        """Give ``full`` its storage and issue the all-gather, without waiting for it.

        Sends (W-1)·chunk elements; nothing if the vector is there, or on its way.
        """
        # Step 3: storage first, then one collective; keep its handle
        raise NotImplementedError("exercise 3.15")

    def finish_gather(self) -> None:
        """Wait for the all-gather, if one is under way, and put the leaves into the modules."""
        # Step 4: the handle before the first use of a value
        raise NotImplementedError("exercise 3.15")

    def free(self) -> None:
        """Give the full vector's memory back; waits for a gather that is under way."""
        # Step 5: nothing may be in flight; then the attributes, then the storage
        raise NotImplementedError("exercise 3.15")

    def put(self, values: Sequence[Tensor | None]) -> None:
        """Set the modules' attributes; None makes an access to a freed parameter an error."""
        for value, attributes in zip(values, self.places, strict=True):
            for module, name, _ in attributes:
                setattr(module, name, value)

    def reduce_input(self) -> Tensor:
        """What this rank gives to the reduce-scatter: the gradients joined and padded."""
        # Step 6: in the order of `full`, zeros where there is no gradient and as padding
        raise NotImplementedError("exercise 3.15")

    def start_reduce(self) -> None:
        """Issue the reduce-scatter of the leaves' gradients without waiting, and forget these.

        Sends (W-1)·chunk elements. A leaf without gradient counts as zero; if none has one, which
        must be so on all ranks or on none, nothing is sent.
        """
        # Step 7: rank r gets the sum of everybody's chunk r
        raise NotImplementedError("exercise 3.15")

    def finish_reduce(self) -> None:
        """Wait for the reduce-scatter, if one is under way; add the mean to ``shard.grad``."""
        # Step 8: the mean over the ranks, without the padding, added to a gradient that is there
        raise NotImplementedError("exercise 3.15")

    def mean(self, chunk: Tensor) -> Tensor:
        """The mean over the ranks from their sum (chunk,); may change ``chunk``."""
        return chunk.div_(dist.get_world_size(self.group))


Unit = FlatUnit[FlatParameter]


class FSDP(HookedUnits[FlatParameter]):
    """``module``, trained like one process on all ranks' batches; nothing but shards is kept.

    ``units``: submodules that are gathered one at a time, none inside another; the root unit takes
    all other parameters. Tied parameters must lie in one unit. ``parameters()`` are the shards:
    give them to the optimizer, *after* wrapping. In a unit's forward its attributes hold the full
    parameters, with the values of the shards at that time; outside of forward and backward they are
    None. Beside a unit only the root is gathered: a unit is freed before the next gets its memory
    (in backward a unit whose inputs need no gradient may stay until the end).

    ``backward()`` leaves in the shards' ``grad`` the mean over the ranks of ``group``, added to
    what is there. All ranks must run the same units in the same order, also without autograd; one
    may run several times. A unit that no rank uses in a step gets no gradient. Outputs of a unit
    must not be parameters, nor views of them. After a forward or backward that raised on all ranks
    the next forward, an evaluation's too, begins anew. Freeze, cast or move parameters before
    wrapping: later, forward raises ValueError. Training and evaluation mode make no difference.
    Forward and backward never let the host wait for a GPU.

    Raises ValueError, on every rank that sees it and before any communication: if units overlap
    or are not inside ``module``, if a parameter is tied across units, if parameters are on several
    devices, if none is trainable, or if this rank is no member of ``group``.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module] = (),
        *,
        group: Group = None,
        device: torch.device | str | None = None,
        flat_type: Callable[[Parameters, Group, torch.device], FlatParameter] = FlatParameter,
    ) -> None:
        """Shard ``module`` in place; its values must be the same on all ranks.

        ``device``: where shards and full parameters are, by default where the module is.
        ``flat_type`` makes a FlatParameter.
        """
        super().__init__()
        owned = owned_parameters(module, units, group)
        first = next(iter(p for kinds in owned for same in kinds for p in same))
        where = first.device if device is None else torch.device(device)
        self.module, self.group = module, group
        for owner, kinds in zip((module, *units), owned, strict=True):
            flats = [flat_type(same, group, where) for same in kinds]
            self.units.append(Unit(owner, flats))
        self.shards = nn.ParameterList(f.shard for unit in self.units for f in unit.flats)
        self.watch_units()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; a collective call."""
        return self.module(*args, **kwargs)

    def before_forward(self, unit: Unit) -> None:
        """``unit``'s forward begins; with the root's, what one that raised has left is dropped."""
        # Step 9: four moments and what happens then
        raise NotImplementedError("exercise 3.15")

    def after_forward(self, unit: Unit) -> None:
        """``unit``'s forward is done: free it, what autograd has saved of it as well."""
        raise NotImplementedError("exercise 3.15")

    def before_backward(self, unit: Unit) -> None:
        """A gradient of ``unit``'s output is there; called once for each output."""
        raise NotImplementedError("exercise 3.15")

    def after_backward(self, unit: Unit) -> None:
        """``unit``'s backward is done: free it, then reduce its gradients and wait."""
        # Step 10: free first, so that the joined gradient takes the place of the parameters
        raise NotImplementedError("exercise 3.15")

    def end_backward(self) -> None:
        """The whole backward is done; units whose inputs need no gradient have not been told."""
        for unit in self.units:
            self.after_backward(unit)


def clip_by_global_norm(model: FSDP, max_norm: float) -> float:
    """Scale the shards' gradients in place by one factor: the whole gradient's 2-norm is at most
    ``max_norm`` then. Returns the norm before, a float, the same on every rank of ``model.group``.

    A norm that is not finite, or at most ``max_norm``, changes nothing. Squares are added in
    float64. One all-reduce of one number. The host waits for a GPU once, to read the norm. Shards
    may be on the CPU, also in a group of NCCL, which adds up on GPUs alone. Raises ValueError first
    if ``max_norm`` is not positive.
    """
    # Step 11: every element is on exactly one rank: add the squares over the ranks, then the root.
    #          Shards may be on the CPU, where NCCL adds nothing (`device_in`)
    raise NotImplementedError("exercise 3.15")
