# for: 3.1, 3.2, 3.3
"""Written differently: a batch for each step, running sums that travel, a recursive agreement,
all segments of a step on their way up to a limit of three, receives posted far ahead."""

from __future__ import annotations

import contextlib
import itertools

import torch
import torch.distributed as dist

OPS = ("sum", "mean", "max")


def _check(tensor, op, group):
    if op not in OPS:
        raise ValueError(f"there is no operator {op}")
    if op == "mean" and tensor.dtype not in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ):
        raise ValueError(f"integers ({tensor.dtype}) have no mean here")
    if dist.get_rank(group) == -1:
        raise ValueError("not in the group")
    return dist.get_rank(group), dist.get_world_size(group)


def _add(into, other, op):
    if op == "max":
        into.copy_(torch.where((other > into) | other.isnan(), other, into))
    else:
        into += other


def _bounds(n, w):
    """First element of each chunk, and n."""
    base, more = divmod(n, w)
    return [c * base + min(c, more) for c in range(w)] + [n]


def reduce_scatter_steps(rank, world_size):
    chunks = [*range(rank - 1, -1, -1), *range(world_size - 1, rank - 1, -1)]
    return [*itertools.pairwise(chunks)]


def all_gather_steps(rank, world_size):
    chunks = [*range(rank, -1, -1), *range(world_size - 1, rank, -1)]
    return [*itertools.pairwise(chunks)]


def exchange(outgoing, to, incoming, source, group):
    """Global ranks; whatever is empty stays at home."""
    members = dist.get_process_group_ranks(group)
    pair = (dist.irecv, incoming, members[source]), (dist.isend, outgoing, members[to])
    both = [dist.P2POp(*each, group) for each in pair if each[1].numel() > 0]
    return dist.batch_isend_irecv(both) if len(both) > 0 else []


def wait(handles):
    for handle in handles:
        handle.wait()


@contextlib.contextmanager
def flattened(tensor):
    whole = tensor.detach()
    rows = whole.view(-1) if whole.is_contiguous() else whole.clone().flatten().contiguous()
    yield rows
    with torch.no_grad():
        tensor.copy_(rows.view_as(tensor))


def ring_reduce_scatter(tensor, op="sum", group=None):
    """A chunk's sum travels in the chunk; the last rank on its way is its owner."""
    rank, w = _check(tensor, op, group)
    flat = tensor.detach().contiguous().view(-1)
    at = _bounds(flat.numel(), w)
    inbox = flat.new_empty(at[1])  # the first chunk is a longest one
    for step in range(w - 1, 0, -1):
        out, into = (rank + step) % w, (rank + step - 1) % w
        room, outgoing = inbox[: at[into + 1] - at[into]], flat[at[out] : at[out + 1]]
        handles = exchange(outgoing, (rank + 1) % w, room, (rank - 1) % w, group)
        while handles:
            handles.pop().wait()
        _add(flat[at[into] : at[into + 1]], room, op)
    if op == "mean":
        flat[at[rank] : at[rank + 1]] /= w
    tensor.detach().copy_(flat.view_as(tensor))


def ring_all_gather(tensor, group=None):
    """The sends are left alone until the end: nothing is written to what they send."""
    rank, w = _check(tensor, "sum", group)
    flat = tensor.detach().contiguous().view(-1)
    at = _bounds(flat.numel(), w)
    sent = []
    for step in range(w - 1):
        out, into = (rank - step) % w, (rank - step - 1) % w
        part, room = flat[at[out] : at[out + 1]], flat[at[into] : at[into + 1]]
        handles = exchange(part, (rank + 1) % w, room, (rank - 1) % w, group)
        first = 1 if room.numel() else 0
        wait(handles[:first])
        sent.extend(handles[first:])
    wait(sent)
    tensor.detach().copy_(flat.view_as(tensor))


def agree(tensor, op, group=None):
    """Least and most of two numbers: the length, and a hash of dtype and operator."""
    if dist.get_rank(group) == -1:
        raise ValueError("not in the group")
    rank, w = dist.get_rank(group), dist.get_world_size(group)
    kind = sum(k * ord(c) for k, c in enumerate(f"{tensor.dtype} {op}", 1))
    low = torch.tensor([tensor.numel(), kind], device=tensor.device)
    high = low.clone()

    def spread(distance):
        if distance >= w:
            return
        mine, theirs = torch.cat([low, high]), torch.empty(4, dtype=torch.int64)
        theirs = theirs.to(tensor.device)
        wait(exchange(mine, (rank - distance) % w, theirs, (rank + distance) % w, group))
        low.copy_(torch.minimum(low, theirs[:2]))
        high.copy_(torch.maximum(high, theirs[2:]))
        spread(2 * distance)

    spread(1)
    if not torch.equal(low, high):
        raise ValueError(f"unequal: {low.tolist()} and {high.tolist()} (length, kind)")


def ring_all_reduce(tensor, op="sum", group=None, *, check=False):
    if check:
        agree(tensor, op, group)
    _check(tensor, op, group)
    work = tensor.detach().contiguous()
    ring_reduce_scatter(work, op, group)
    ring_all_gather(work, group)
    if work.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(work)
