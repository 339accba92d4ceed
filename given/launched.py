"""A program under a launcher (torchrun): from its environment to a group, and out of it again.

    with launched("trainer", options.device) as rank:
        train(rank.device)

Ranks that end in order leave their group together. A rank that raises gives it up at once
(``process_group``). With gloo the others' next operation fails, as the connection is closed. With
NCCL the launcher ends them. No rank waits for a time-out. An error of the user's, or of the
machine's, is told in one line by the first rank of each node that finds it. Every other error is a
bug and has its traceback.
"""

from __future__ import annotations

import contextlib
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from given.devices import place
from given.process_group import process_group

FAILED = {ValueError: 1, OSError: 1}  # exit statuses of errors that are told in a line


class Meeting(NamedTuple):
    """The ranks' common data before they have a group; ``attempt``: its name, if it has one."""

    store: dist.Store
    rank: int
    world_size: int
    attempt: str = ""


@dataclass(frozen=True)
class Launched:
    """Where this rank computes, and where it has met the others."""

    device: torch.device
    store: dist.Store
    rank: int
    world_size: int
    attempt: str


def as_launched() -> Meeting:
    """The meeting that the launcher's environment describes."""
    return Meeting(*next(dist.rendezvous("env://")))


@contextlib.contextmanager
def launched(
    program: str,
    wanted: str,
    *,
    point_to_point: bool = False,
    meet: Callable[[], Meeting] = as_launched,
    statuses: Mapping[type[Exception], int] = FAILED,
    timeout: timedelta = timedelta(minutes=10),
) -> Iterator[Launched]:
    """Be a member of the default group inside the block, on the device that all ranks agree on.

    ``wanted`` and ``point_to_point`` are as in ``place``; the first rank prints the choice. An
    error of ``statuses`` is told once, and ends the process with the status of the first type in it
    that fits. ``timeout``: that of the group.
    """
    meeting = None
    try:
        meeting = meet()
        store, rank, world_size, attempt = meeting
        found = place(wanted, store, rank, world_size, point_to_point=point_to_point)
        if rank == 0:
            print(f"{program}: {found.text}", file=sys.stderr, flush=True)
        where = {"store": store, "rank": rank, "world_size": world_size, "timeout": timeout}
        with process_group(**found.settings, **where):
            yield Launched(found.device, store, rank, world_size, attempt)
    except tuple(statuses) as error:
        tell_once(program, error, meeting and meeting.store)
        sys.exit(next(status for kind, status in statuses.items() if isinstance(error, kind)))


def tell_once(program: str, error: Exception, store: dist.Store | None) -> None:
    """A line on standard error, unless a rank of this node has said the same.

    Ranks that fail alike would all say it. A rank that fails alone is the only one that knows.
    ``store``: the store of all ranks; None before there is one.
    """
    node = os.environ.get("GROUP_RANK", "0")
    with contextlib.suppress(Exception):  # the store may have ended with its rank
        if store is not None and store.add(f"told/{node}/{zlib.crc32(str(error).encode())}", 1) > 1:
            return
    print(f"{program}: {error}", file=sys.stderr, flush=True)
