# for: 3.4
"""Written differently: all segments of a step on their way up to a limit of three, receives posted
far ahead."""

from __future__ import annotations

from .ring_allreduce import _add, _bounds, _check, exchange


class Hop:
    def __init__(self, *facts):
        self.outgoing, self.target, self.combines, self.completes = facts


def ring_hops(rank, segments):
    w = len(segments)
    hops = []
    for step in range(2 * w - 2):
        for k, outgoing in enumerate(segments[rank - step % w - 1]):
            target = segments[(rank - step - 2) % w][k]
            hops.append(Hop(outgoing, target, step + 1 < w, step + 2 == w))
    return iter(hops)


def segmented_ring_all_reduce(tensor, op="sum", group=None, *, segment_bytes=1 << 18):
    """Handles by number of the hop; a hop waits for what it sends and for its buffer."""
    rank, w = _check(tensor, op, group)
    if segment_bytes <= 0:
        raise ValueError("a segment of no bytes")
    flat = tensor.detach().contiguous().view(-1)
    at = _bounds(flat.numel(), w)
    size = max(1, segment_bytes // tensor.element_size())
    segments = max(1, -(-at[1] // size))
    ahead = min(3, segments)
    rooms = [flat.new_empty(size if at[1] > size else at[1]) for _ in range(ahead)]
    hops = []
    for step in range(2 * (w - 1)):
        for k in range(segments):
            places = []
            for chunk in (rank - step - 1) % w, (rank - step - 2) % w:
                cuts = _bounds(at[chunk + 1] - at[chunk], segments)
                places.append(slice(at[chunk] + cuts[k], at[chunk] + cuts[k + 1]))
            hops.append((*places, step))
    open_hops = {}

    def complete(number):
        _, into, step = hops[number]
        for handle in open_hops.pop(number):
            handle.wait()
        if step < w - 1:
            _add(flat[into], rooms[number % ahead][: into.stop - into.start], op)
            if step == w - 2 and op == "mean":
                flat[into] /= w

    for number, (out, into, step) in enumerate(hops):
        if number - ahead in open_hops:
            complete(number - ahead)
        room = flat[into]
        if step < w - 1:
            room = rooms[number % ahead][: into.stop - into.start]
        ends = (rank + 1) % w, (rank - 1) % w
        open_hops[number] = exchange(flat[out], ends[0], room, ends[1], group)
    for number in sorted(open_hops):
        complete(number)
    tensor.detach().copy_(flat.view_as(tensor))
