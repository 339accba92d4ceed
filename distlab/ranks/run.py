"""Run a function on W ranks: W results, or one clear failure.

Ranks are forked from a process that has already imported torch, so a check with 4 ranks takes about
0.1 s where ``torch.multiprocessing.spawn`` takes seconds. Each rank reports every communication as
it begins, is waited for and ends. So the parent knows at any time where each rank is. It names a
mismatch of collectives at once. It proves a deadlock without a time-out: every rank waits for a
message that no rank has issued. And for a hang it can name the call in which each rank waits.
Results come back as tensors and plain data; nothing from a rank is unpickled as code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .noticed import notices_named
from .options import Options
from .parent import Parent
from .results import RankResults


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> RankResults:
    """Run ``fn(ctx, *args)`` on ``world_size`` ranks and return the result of each.

    ``fn`` may be a closure; it returns tensors and plain data (numbers, strings, None, lists,
    tuples, dicts). ``options``: the fields of ``Options``. GPUs are hidden from this process from
    now on, unless it uses them already (see ``host.gpus``).

    Raises RankFailure when a rank raises, dies, or does not end within ``timeout`` seconds, which
    begin when all are ready. It also raises it when ranks are in different collectives, or when all
    wait for each other. Leaves no process behind.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    chosen = Options(**options)
    sys.stdout.flush()
    sys.stderr.flush()
    with Parent(fn, world_size, args, chosen) as parent, notices_named(parent.members, chosen):
        return parent.run()
