# for: 2.22
"""Written differently: softmax of each part, keys and values interleaved, the own block in one
part, messages as objects, the next one begun when a block has come."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd import Function


def chunk_sizes(lengths, world_size):
    sizes = [(length + 2 * world_size - 1) // (2 * world_size) for length in lengths]
    if any(length <= 0 for length in lengths):
        raise ValueError(f"lengths {lengths}")
    return sizes


def own_positions(lengths, rank, world_size):
    found, first = [], 0
    for length, size in zip(lengths, chunk_sizes(lengths, world_size), strict=True):
        low, high = rank * size, (2 * world_size - 1 - rank) * size
        every = [*range(low, low + size), *range(high, high + size)]
        found += [first + i if i < length else -1 for i in every]
        first += length
    return torch.tensor(found, dtype=torch.int64)


def visible(rank, source, sizes):
    found, at = [], 0
    for n in sizes:
        if rank == source:
            found.append((slice(at, at + 2 * n), slice(at, at + 2 * n), True))
        elif rank > source:
            found.append((slice(at, at + 2 * n), slice(at, at + n), False))
        else:
            found.append((slice(at + n, at + 2 * n), slice(at, at + 2 * n), False))
        at += 2 * n
    return found


def scores(q, k, masked, scale):
    found = (q @ k.transpose(-2, -1)) * scale
    if masked:
        rows, columns = found.shape[-2:]
        hidden = torch.full((rows, columns), -torch.inf, dtype=found.dtype, device=found.device)
        found = found + hidden.triu(columns - rows + 1)
    return found


def attend(q, k, v, masked, scale):
    found = scores(q, k, masked, scale)
    return torch.softmax(found, -1) @ v, torch.logsumexp(found, -1).unsqueeze(-1)


def merge_(out, lse, more, more_lse):
    pair = torch.stack((lse, more_lse))
    shares = pair.softmax(0)
    lse.copy_(pair.logsumexp(0))
    out.copy_(shares[0] * out + shares[1] * more)


def gradients(q, grad, lse, rest, k, v, masked, scale):
    weights = torch.exp(scores(q, k, masked, scale) - lse)
    back = (torch.matmul(grad, v.transpose(-2, -1)) - rest) * weights * scale
    of_k, of_v = back.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ grad
    return back @ k, of_k.sum(2).unsqueeze(2), of_v.sum(2).unsqueeze(2)


class Passing:
    def __init__(self, block, group):
        self.block, self.incoming = block, torch.zeros_like(block)
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        me, count = dist.get_rank(group), len(members)
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, block, members[(me + 1) % count], group),
                dist.P2POp(dist.irecv, self.incoming, members[me - 1], group),
            ]
        )

    def __call__(self):
        while self.works:
            self.works.pop().wait()
        return self.incoming


def start_pass(block, group):
    return Passing(block, group)


def around(block, group):
    me, count = dist.get_rank(group), dist.get_world_size(group)
    coming = None
    for source in [(me - step) % count for step in range(count)]:
        block = coming() if coming else block
        coming = Passing(block, group) if source != (me + 1) % count else None
        yield source, block


class _Ring(Function):
    @staticmethod
    def forward(ctx, q, k, v, sizes, scale, group):
        me, total = dist.get_rank(group), None
        ctx.exact = torch.float32 if q.element_size() == 2 else q.dtype
        with torch.autocast(q.device.type, enabled=False):
            mine = q.to(ctx.exact)
            for source, block in around(torch.stack([k, v], -1), group):
                keys, values = block.to(ctx.exact).unbind(-1)
                if total is None:
                    total = torch.zeros_like(mine), torch.full_like(mine[..., :1], -torch.inf)
                for a, b, masked in visible(me, source, sizes):
                    part = mine[..., a, :], keys[..., b, :], values[..., b, :]
                    merge_(*(t[..., a, :] for t in total), *attend(*part, masked, scale))
        out = total[0].to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total[1])
        ctx.given = sizes, scale, group
        return out

    @staticmethod
    def backward(ctx, grad):
        (q, k, v, out, lse), (sizes, scale, group) = ctx.saved_tensors, ctx.given
        me, moving = dist.get_rank(group), True in ctx.needs_input_grad[1:3]
        with torch.autocast(q.device.type, enabled=False):
            mine = [q.to(ctx.exact), grad.to(ctx.exact), lse]
            mine.append((mine[1] * out.to(ctx.exact)).sum(-1, keepdim=True))
            of_q, sums, coming = torch.zeros_like(mine[0]), {}, None
            for source, block in around(torch.stack([k, v], -1), group):
                keys, values = block.to(ctx.exact).unbind(-1)
                term = torch.zeros_like(block, dtype=ctx.exact)
                for a, b, masked in visible(me, source, sizes):
                    part = [t[..., a, :] for t in mine] + [keys[..., b, :], values[..., b, :]]
                    x, y, z = gradients(*part, masked, scale)
                    of_q[..., a, :] += x
                    term[..., b, :, :] += torch.stack([y, z], -1)
                if source == me:
                    sums[me] = term
                elif moving:
                    coming = Passing(term + coming() if coming else term, group)
        whole = sums[me] + coming() if coming else sums[me]
        of_k, of_v = whole.to(q.dtype).unbind(-1)
        return of_q.to(q.dtype), of_k, of_v, None, None, None


def ring_attention(q, k, v, lengths=None, *, scale=None, group=None):
    if dist.get_rank(group) < 0:
        raise ValueError("this process is outside of the group")
    world_size = dist.get_world_size(group)
    if not (q.dim() == k.dim() == v.dim() == 4 and k.shape == v.shape):
        raise ValueError(f"shapes {q.shape}, {k.shape}, {v.shape}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] or q[:, :1].shape != k[:, :1].shape:
        raise ValueError(f"shapes {q.shape}, {k.shape}")
    if q.dtype != k.dtype or q.dtype != v.dtype or not torch.is_floating_point(q):
        raise ValueError("dtypes differ, or have no fractions")
    if lengths is None:
        lengths = [world_size * q.shape[2]]
    sizes = chunk_sizes(lengths, world_size)
    if sum(2 * size for size in sizes) != q.shape[2]:
        raise ValueError("the documents have another number of positions")
    heads = q.unflatten(1, (k.shape[1], q.shape[1] // k.shape[1]))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _Ring.apply(heads, k[:, :, None], v[:, :, None], sizes, scale, group).flatten(1, 2)
