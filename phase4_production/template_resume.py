# Exercises 4.2: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase4.py 4.2
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Exact resume: interrupted and resumed equals uninterrupted, to the last bit.

The next step of training is a function of everything that it reads. A part that a checkpoint leaves
out begins anew, and the loss curve has a kink:

    left out                          what happens
    optimizer's moments               a spike: the first steps are those of a new optimizer
    schedule, loss scale              warm-up again; overflows until the scale is found again
    random streams of the rank        another dropout, another mixup
    position in the data              samples seen twice, others never

*Shared* state is alike on all ranks, and rank 0 writes it once: model, optimizer, schedule … *Own*
state is a rank's: sampler and random streams, and shards (ZeRO) if you say so.

Cost: reading and copying the state; no communication. Invariant: after ``restore`` the objects are
as they were at ``capture``. ``batches`` then goes on with the batch after the last one that was
trained on.

Sources: PyTorch's notes on reproducibility; Mohan et al. 2021, "CheckFreq" (FAST), section 5.1: a
resumable data iterator.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from given.agreement import Group
from given.safe_format import Tree

from .template_sample_seeds import random_state, set_random_state


@dataclass
class Position:
    """Where training is: how many batches were trained on in all (``step``) and in the ``epoch``
    (``batch``)."""

    step: int = 0
    epoch: int = 0
    batch: int = 0


def batches(loader: DataLoader[Any], position: Position, epochs: int) -> Iterator[Any]:
    """The batches from ``position`` to the end of epoch ``epochs`` - 1, as ``loader`` gives them.

    ``loader.batch_sampler`` is as in exercise 1.2, and its sampler is restored if ``position`` is
    within an epoch. It is told every epoch before its batches are drawn. A data set with
    ``set_epoch`` (``SampleSeeds``) is told the epoch, too. ``position`` is advanced as each batch
    is handed out, however many were read ahead. It counts that batch, so capture after training on
    it. After the last batch it is at batch 0 of epoch ``epochs``. No batch comes if it is there
    already. To begin within an epoch leaves ``loader.generator`` (None: torch's stream) where it
    is: ``iter(loader)`` draws from it, and an uninterrupted run has drawn these numbers before.
    """
    # Step 1: name the epoch before iterating: the first one goes on from the restored position.
    #         iter(loader) draws from a generator. Put it back if an uninterrupted run has drawn
    #         before
    # Step 2: count the batches handed out, not those that the sampler drew: workers read ahead
    # Step 3: at the end of an epoch the next one begins with batch 0
    raise NotImplementedError("exercise 4.2")


class Restorable(Protocol):
    """The input of ``TrainingState.restore``: a checkpoint, or one that was adapted (4.4)."""

    @property
    def world_size(self) -> int:
        """The number of ranks that saved it, or to which it was adapted."""

    @property
    def shared(self) -> Tree:
        """The state that is alike on all ranks."""

    def own(self, rank: int) -> Tree:
        """The state that ``rank`` alone has."""


class TrainingState:
    """Everything that the next step of training depends on, to be captured and restored as one.

    ``parts``: by name, objects with ``state_dict`` and ``load_state_dict`` (optimizer, schedule,
    scaler, average …), models, and ``torch.Generator``s. ``sampler``: a ``ShardedBatchSampler`` as
    in exercise 1.2. ``own``: the names of those parts that differ from rank to rank (shards);
    generators always do. ``device``: the random stream of this device is saved, too.
    """

    def __init__(
        self,
        *,
        sampler: Any,
        own: Collection[str] = (),
        device: torch.device | None = None,
        group: Group = None,
        **parts: Any,
    ) -> None:
        unknown = sorted(set(own) - parts.keys())
        if unknown:
            raise ValueError(f"own names {unknown}, but the parts are {sorted(parts)}")
        self.sampler, self.parts, self.device, self.group = sampler, parts, device, group
        generators = {name for name, part in parts.items() if isinstance(part, torch.Generator)}
        self.own = set(own) | generators

    def capture(self, position: Position) -> tuple[Tree, Tree]:
        """(shared, own) for ``CheckpointStore.save``. The parts' tensors are live, not copies.

        Shared has ``"position"`` (its fields by name, as they are now) and ``"parts"``: by name the
        states of the parts that are not own. Own has ``"parts"``, ``"random"`` (``random_state``)
        and ``"sampler"``: its state dict with the entries consumed by this rank, which follow from
        ``position``. ``position`` counts batches that were trained on. A model's state has the
        names of the plain module. Nothing changes: no part, no random stream, no sampler. No
        message.
        """
        # Step 4: the sampler is told how many entries of this rank were consumed
        # Step 5: the model under the plain names; everything else by its own state_dict
        raise NotImplementedError("exercise 4.2")

    def restore(self, saved: Restorable) -> Position:
        """Put everything back to the captured state; returns the position of training then.

        Every object stays the same object, also each parameter: values are copied into it. No part
        shares memory with ``saved``. So further training does not change ``saved``, and it can be
        restored again. Random streams are put back last: ``load_state_dict`` may draw numbers. Only
        the own state of this rank of ``group`` is read. No message.

        Raises ValueError if the checkpoint is of another world size than the group (see exercise
        4.4), has other parts, or is of another model (names or shapes differ). Then nothing has
        changed.
        """
        # Step 6: refuse before anything is changed: an intact checkpoint may still not fit
        # Step 7: random streams last: the other parts may draw numbers as they load
        raise NotImplementedError("exercise 4.2")


def state_of(part: Any) -> Any:
    """A part's state: a generator's, a model's ``model_state``, or the part's state dict."""
    # Step 8: three kinds of parts
    raise NotImplementedError("exercise 4.2")


def load_into(part: Any, state: Any) -> None:
    """The opposite of ``state_of``. The part keeps nothing of ``state`` itself."""
    # Step 9: the same three; an optimizer would keep the very tensors that it is given
    raise NotImplementedError("exercise 4.2")


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict under the names of the plain module, as if nothing were wrapped around it.

    DDP and similar wrappers put ``module.`` before every name, ``torch.compile`` puts
    ``_orig_mod.``. Such a wrapper has that one child. A module with more children is no wrapper.
    Wrappers can be wrapped.
    """
    # Step 10: leave out the prefix that all names have
    raise NotImplementedError("exercise 4.2")


def check_model_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Raise ValueError if ``state`` has other names than ``model``, or another shape of any."""
    # Step 11: names that are missing, unknown names, other shapes
    raise NotImplementedError("exercise 4.2")


def wrapper_prefix(model: nn.Module) -> str:
    """The prefix that wrappers put before every name in ``model``'s state dict."""
    # Step 12: a wrapper has one child, which has a known name; wrappers can be wrapped
    raise NotImplementedError("exercise 4.2")


def first_few(names: Collection[str]) -> str:
    """Three of the names, for a message of one line."""
    return ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
