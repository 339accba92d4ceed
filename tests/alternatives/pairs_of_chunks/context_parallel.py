# for: 2.22
"""Written differently: one pair of chunks at a time, flat messages, sends first, no shared loop."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.autograd import Function


def chunk_sizes(lengths, world_size):
    if min(lengths, default=1) <= 0:
        raise ValueError("an empty document")
    return [math.ceil(length / (2 * world_size)) for length in lengths]


def own_positions(lengths, rank, world_size):
    every, first = [], 0
    for length, size in zip(lengths, chunk_sizes(lengths, world_size), strict=True):
        numbers = torch.full((2 * world_size * size,), -1)
        numbers[:length] = torch.arange(first, first + length)
        chunks = numbers.split(size)
        every += [chunks[rank], chunks[-1 - rank]]
        first += length
    return torch.cat(every)


def visible(rank, source, sizes):
    parts, begin, last = [], 0, 10**6
    for size in sizes:
        places = slice(begin, begin + size), slice(begin + size, begin + 2 * size)
        for ours, place in zip((rank, last - rank), places, strict=True):
            for theirs, other in zip((source, last - source), places, strict=True):
                if theirs <= ours:
                    parts.append((place, other, theirs == ours))
        begin += 2 * size
    return parts


def scores(q, k, masked, scale):
    found = torch.matmul(q * scale, k.transpose(-1, -2))
    if not masked:
        return found
    rows, columns = found.shape[-2:]
    late = torch.arange(columns)[None] > torch.arange(rows)[:, None] + columns - rows
    return found.masked_fill(late.to(found.device), -torch.inf)


def attend(q, k, v, masked, scale):
    found = scores(q, k, masked, scale)
    largest = found.amax(-1, keepdim=True)
    weights = (found - largest).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / total @ v, largest + total.log()


def merge_(out, lse, more, more_lse):
    share = torch.sigmoid(more_lse - lse)
    out += share * (more - out)
    largest = torch.maximum(lse, more_lse)
    lse.copy_(largest + ((lse - largest).exp() + (more_lse - largest).exp()).log())


def gradients(q, grad, lse, rest, k, v, masked, scale):
    weights = (scores(q, k, masked, scale) - lse).exp()
    of_scores = scale * weights * (grad @ v.transpose(-1, -2) - rest)
    of_k = torch.einsum("...hqk,...hqd->...kd", of_scores, q).unsqueeze(2)
    return of_scores @ k, of_k, torch.einsum("...hqk,...hqd->...kd", weights, grad).unsqueeze(2)


def start_pass(block, group):
    me, count = dist.get_rank(group), dist.get_world_size(group)
    flat = block.flatten()
    incoming = torch.empty_like(flat)
    ops = [
        dist.P2POp(dist.isend, flat, group=group, group_peer=(me + 1) % count),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=(me + count - 1) % count),
    ]
    works = dist.batch_isend_irecv(ops)
    return lambda: ([work.wait() for work in works], incoming.view(block.shape), flat)[1]


def around(block, group):
    source, count = dist.get_rank(group), dist.get_world_size(group)
    for left in reversed(range(count)):
        coming = start_pass(block, group) if left else None
        yield source, block
        source = (source - 1) % count
        if coming:
            block = coming()


class _Ring(Function):
    @staticmethod
    def forward(ctx, q, k, v, sizes, scale, group):
        exact = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=exact, device=q.device)
        lse = torch.full((*q.shape[:-1], 1), -torch.inf, dtype=exact, device=q.device)
        with torch.autocast(q.device.type, enabled=False):
            for source, block in around(torch.cat((k, v), -1), group):
                keys, values = block.to(exact).chunk(2, -1)
                for ours, theirs, masked in visible(dist.get_rank(group), source, sizes):
                    mine = q[..., ours, :].to(exact)
                    more = attend(mine, keys[..., theirs, :], values[..., theirs, :], masked, scale)
                    merge_(out[..., ours, :], lse[..., ours, :], *more)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.rest = sizes, scale, group
        return result

    @staticmethod
    def backward(ctx, grad):
        with torch.autocast(grad.device.type, enabled=False):
            return (*_backward(ctx, grad), None, None, None)


def _backward(ctx, grad):
    q, k, v, result, lse = ctx.saved_tensors
    sizes, scale, group = ctx.rest
    exact, me = lse.dtype, dist.get_rank(group)
    rest = torch.linalg.vecdot(grad.to(exact), result.to(exact)).unsqueeze(-1)
    of_q, coming, own = torch.zeros(q.shape, dtype=exact, device=q.device), None, None
    for source, block in around(torch.cat((k, v), -1), group):
        keys, values = block.to(exact).chunk(2, -1)
        term = torch.zeros(block.shape, dtype=exact, device=q.device)
        of_keys, of_values = term.chunk(2, -1)
        for ours, theirs, masked in visible(me, source, sizes):
            mine = [t[..., ours, :].to(exact) for t in (q, grad, lse, rest)]
            other = keys[..., theirs, :], values[..., theirs, :]
            a, b, c = gradients(*mine, *other, masked, scale)
            of_q[..., ours, :] += a
            of_keys[..., theirs, :] += b
            of_values[..., theirs, :] += c
        if source == me:
            own = term
        elif ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            coming = start_pass(term if coming is None else term + coming(), group)
    own = own if coming is None else own + coming()
    return of_q.to(q.dtype), *(t.to(q.dtype) for t in own.chunk(2, -1))


def ring_attention(q, k, v, lengths=None, *, scale=None, group=None):
    if dist.get_rank(group) == -1:
        raise ValueError("not in the group")
    count = dist.get_world_size(group)
    if {q.ndim, k.ndim, v.ndim} != {4} or k.shape != v.shape:
        raise ValueError("four dimensions each, and values like keys")
    samples, groups, positions, features = k.shape
    if q.shape != (samples, q.shape[1], positions, features) or not groups or q.shape[1] % groups:
        raise ValueError("queries and keys don't fit")
    if len({q.dtype, k.dtype, v.dtype}) > 1 or not q.dtype.is_floating_point:
        raise ValueError("dtypes")
    sizes = chunk_sizes(lengths if lengths is not None else [count * positions], count)
    if sum(sizes) != positions / 2:
        raise ValueError("lengths don't fit")
    each = q.shape[1] // groups
    grouped = q.reshape(samples, groups, each, positions, features)
    scale = 1 / math.sqrt(features) if scale is None else scale
    result = _Ring.apply(grouped, k[:, :, None], v[:, :, None], sizes, scale, group)
    return result.reshape(q.shape)
