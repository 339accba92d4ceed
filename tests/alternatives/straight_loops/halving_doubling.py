# for: 3.6
"""Written from the docstrings alone."""

from __future__ import annotations

from torch import Tensor

from given.agreement import Group

from .ring_allreduce import COMBINE, Op, check_arguments, exchange, flattened, wait


def halving_doubling_all_reduce(tensor: Tensor, op: Op = "sum", group: Group = None) -> None:
    rank, size = check_arguments(tensor, op, group)
    power = 1
    while 2 * power <= size:
        power *= 2
    with flattened(tensor) as flat:
        none = flat.new_empty(0)
        if rank >= power:
            wait(exchange(flat, rank - power, none, rank - power, group))
            wait(exchange(none, rank - power, flat, rank - power, group))
        else:
            serves = rank + power < size
            if serves:
                spare = flat.new_empty(flat.numel())
                wait(exchange(none, rank + power, spare, rank + power, group))
                COMBINE[op](flat, spare)
                del spare
            begin, end, way, distance = (0, flat.numel(), [], 1)
            while distance < power:
                middle = (begin + end) // 2
                low, high = ((begin, middle), (middle, end))
                mine, theirs = (high, low) if rank & distance else (low, high)
                came = flat.new_empty(mine[1] - mine[0])
                wait(exchange(flat[slice(*theirs)], rank ^ distance, came, rank ^ distance, group))
                COMBINE[op](flat[slice(*mine)], came)
                del came
                way.insert(0, (rank ^ distance, mine, theirs))
                (begin, end), distance = (mine, 2 * distance)
            if op == "mean":
                flat[begin:end] /= size
            for partner, mine, theirs in way:
                wait(exchange(flat[slice(*mine)], partner, flat[slice(*theirs)], partner, group))
            if serves:
                wait(exchange(flat, rank + power, none, rank + power, group))
