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

Memory per rank, for Ψ parameters in fp32 with Adam: 16Ψ/W bytes, plus the unit at work and the root
in full. In backward their gradients are there, too. For P bytes of parameters a rank sends
3(W-1)/W·P bytes per step, in three messages per unit. Data parallelism sends 2(W-1)/W·P.
Invariant: outside of its forward and backward a unit's full vector has no storage. Autograd's saved
views of it point to a storage that is filled again before they are used.

Sources: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), sections 5.3 and 7.2.2 (stage 3). Zhao et
al. 2023 (PyTorch FSDP, arXiv 2304.11277), sections 3.2 (flat parameters) and 4 (hooks).
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

    - ``shard``: this rank's part (n,), a copy. It is the nn.Parameter that optimizers get. The last
      ranks' shards may be shorter than ``chunk``, or empty: padding exists in messages only.
    - ``full``: (W·chunk,) the gathered vector. While it is freed it has no storage.
    - ``leaves``: the parameters as views of ``full``'s storage, autograd's leaves. While the vector
      is gathered the modules' attributes (``places``) hold them, otherwise None.
    """

    gathering: dist.Work | None = None
    reducing: tuple[dist.Work, Tensor, Tensor] | None = None  # handle, output, input

    def __init__(self, parameters: Parameters, group: Group, device: torch.device) -> None:
        """Keep this rank's part of ``parameters``, of one dtype, all trainable or all frozen.

        The shard lies on ``device``, and is trainable if they are. If they are on meta it has no
        values yet. Elements are in row-major order, whatever the parameters' strides. All ranks
        must pass the same values. No communication.
        """
        self.group, self.places = group, list(parameters.values())
        self.shapes = [p.shape for p in parameters]
        self.numel = sum(p.numel() for p in parameters)
        first = next(iter(parameters))
        # Step 1: equal parts, the last ones shorter or empty. Copy the own part, because a view
        #         would keep the whole vector alive
        raise NotImplementedError("exercise 3.15")
        self.make_full(first.dtype, device)

    def make_full(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make ``full`` and its ``leaves``, and free the storage again."""
        # Step 2: make views that share the storage but not its version counter. Backward fills it
        #         again, and that must not look like a change of tensors that autograd has saved
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
        # Step 4: wait for the handle before the first use of a value
        raise NotImplementedError("exercise 3.15")

    def free(self) -> None:
        """Give the full vector's memory back, after any gather that is under way."""
        # Step 5: wait for a gather in flight; then clear the attributes, then free the storage
        raise NotImplementedError("exercise 3.15")

    def put(self, values: Sequence[Tensor | None]) -> None:
        """Set the modules' attributes; None makes an access to a freed parameter an error."""
        for value, attributes in zip(values, self.places, strict=True):
            for module, name, _ in attributes:
                setattr(module, name, value)

    def reduce_input(self) -> Tensor:
        """What this rank gives to the reduce-scatter: the gradients joined and padded."""
        # Step 6: join in the order of `full`, with zeros for missing gradients and as padding
        raise NotImplementedError("exercise 3.15")

    def start_reduce(self) -> None:
        """Issue the reduce-scatter of the leaves' gradients without waiting, and forget these.

        Sends (W-1)·chunk elements. A leaf without gradient counts as zero. If no leaf has a
        gradient, nothing is sent: that must be so on all ranks or on none.
        """
        # Step 7: rank r gets the sum of all ranks' chunks r
        raise NotImplementedError("exercise 3.15")

    def finish_reduce(self) -> None:
        """Wait for the reduce-scatter, if one is under way; add the mean to ``shard.grad``."""
        # Step 8: take the mean over the ranks, without the padding; add it to an earlier gradient
        raise NotImplementedError("exercise 3.15")

    def mean(self, chunk: Tensor) -> Tensor:
        """The mean over the ranks from their sum (chunk,); may change ``chunk``."""
        return chunk.div_(dist.get_world_size(self.group))


Unit = FlatUnit[FlatParameter]


class FSDP(HookedUnits[FlatParameter]):
    """``module``, trained like one process on all ranks' batches; a rank keeps only shards.

    ``units``: submodules that are gathered one at a time, none inside another. The root unit takes
    all other parameters. Tied parameters must lie in one unit. ``parameters()`` are the shards:
    give them to the optimizer, *after* wrapping. In a unit's forward its attributes hold the full
    parameters, with the values of the shards at that time. Outside of forward and backward they are
    None. Beside a unit only the root is gathered: a unit is freed before the next gets its memory.
    (In backward a unit whose inputs need no gradient may stay until the end.)

    ``backward()`` adds to the shards' ``grad`` the mean over the ranks of ``group``. All ranks must
    run the same units in the same order, also without autograd. A unit may run several times. A
    unit that no rank uses in a step gets no gradient. Outputs of a unit must not be parameters, nor
    views of them. If a forward or backward raised on all ranks, the next forward begins anew, also
    in an evaluation. Freeze, cast or move parameters before wrapping: later, forward raises
    ValueError. Training and evaluation mode make no difference. Forward and backward never let the
    host wait for a GPU.

    Raises ValueError, on every rank that sees it and before any communication, if units overlap or
    are not inside ``module``, or if a parameter is tied across units. The same holds if parameters
    are on several devices, if none is trainable, or if this rank is no member of ``group``.
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
        """``unit``'s forward begins; the root first drops the remains of a forward that raised."""
        # Step 9: four moments, and what to do at each
        raise NotImplementedError("exercise 3.15")

    def after_forward(self, unit: Unit) -> None:
        """``unit``'s forward is done: free it, also the views that autograd has saved."""
        raise NotImplementedError("exercise 3.15")

    def before_backward(self, unit: Unit) -> None:
        """A gradient of ``unit``'s output is there; called once for each output."""
        raise NotImplementedError("exercise 3.15")

    def after_backward(self, unit: Unit) -> None:
        """``unit``'s backward is done: free it, then reduce its gradients and wait."""
        # Step 10: free first, so that the joined gradient takes the place of the parameters
        raise NotImplementedError("exercise 3.15")

    def end_backward(self) -> None:
        """The whole backward is done, also that of units whose inputs need no gradient."""
        for unit in self.units:
            self.after_backward(unit)


def clip_by_global_norm(model: FSDP, max_norm: float) -> float:
    """Scale the shards' gradients in place by one factor: the whole gradient's 2-norm is at most
    ``max_norm`` then. Returns the norm before, a float, the same on every rank of ``model.group``.

    A norm that is not finite, or at most ``max_norm``, changes nothing. Squares are added in
    float64. One all-reduce of one number. The host waits for a GPU once, to read the norm. Shards
    may be on the CPU, also in a group of NCCL, which adds up on GPUs only. Raises ValueError first
    if ``max_norm`` is not positive.
    """
    # Step 11: every element is on exactly one rank: add the squares over the ranks, then take the
    #          root. Shards may be on the CPU, where NCCL adds nothing (`device_in`)
    raise NotImplementedError("exercise 3.15")
