"""Groups that the checks of this phase share."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch.distributed as dist

UNSORTED = "sort_ranks" in inspect.signature(dist.new_group).parameters


def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A group whose ranks stand in the order given, where this torch can do so."""
    return dist.new_group(list(ranks), **({"sort_ranks": False} if UNSORTED else {}))


def order_in(ranks: Sequence[int]) -> list[int]:
    """The global ranks of ``group_of(ranks)``, in the order of their rank of the group."""
    return list(ranks) if UNSORTED else sorted(ranks)
