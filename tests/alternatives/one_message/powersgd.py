# for: 4.8
"""Written differently: projections by SVD, residuals of each rank's own projection, futures."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist


def as_matrix(p):
    """Rows and columns of ``p``, outermost dimension in memory first; None if it has too few."""
    if p.dim() < 2 or p.numel() == 0:
        return None
    first = p.stride().index(max(p.stride()))
    return p.shape[first], math.prod(s for d, s in enumerate(p.shape) if d != first)


class PowerSGD:
    def __init__(self, parameters, rank=2, group=None):
        if rank <= 0:
            raise ValueError(f"rank {rank} is not positive")
        self.rank, self.group, self.owed, self.q = rank, group, {}, {}
        for place, p in enumerate(parameters):
            self.owed[p] = torch.zeros(p.numel(), dtype=p.dtype, device=p.device)
            self.q[p] = torch.zeros(0, dtype=p.dtype, device=p.device)
            if self.compressed(p):
                n = as_matrix(p)[1]
                generator = torch.Generator().manual_seed(17 + place)
                q = torch.rand(n, min(self.rank, *as_matrix(p)), generator=generator) - 0.5
                self.q[p] = q.to(p.dtype).to(p.device)

    def width(self, p):
        shape = as_matrix(p)
        if shape is None:
            return 0
        r = min(self.rank, *shape)
        return r * (r * sum(shape) < shape[0] * shape[1])

    def compressed(self, p):
        return self.width(p) > 0

    def __call__(self, bucket):
        if bucket.buffer.numel() == 0:
            return None
        sizes = [p.numel() for p in bucket.parameters]
        cut = dict(zip(bucket.parameters, bucket.buffer.split(sizes), strict=True))
        thin, first = {}, []
        for p, part in cut.items():
            if self.compressed(p):
                thin[p] = (part + self.owed[p]).view(as_matrix(p))
                first.append((thin[p] @ self.q[p]).flatten())
            else:
                first.append(part.clone())
        flat = torch.cat(first)
        future = dist.all_reduce(flat, group=self.group, async_op=True).get_future()

        def second(_):
            ps, own = {}, {}
            for p, piece in zip(cut, flat.split([len(x) for x in first]), strict=True):
                if p not in thin:
                    cut[p].copy_(piece)
                    continue
                ps[p] = orthonormal(piece.view(len(thin[p]), -1))
                own[p] = thin[p].T @ ps[p]
                self.owed[p] = (thin[p] - ps[p] @ own[p].T).flatten()
            if not own:
                return
            both = torch.cat([q.flatten() for q in own.values()])
            dist.all_reduce(both, group=self.group)
            for p, q in zip(own, both.split([q.numel() for q in own.values()]), strict=True):
                self.q[p] = q.view(own[p].shape).clone()
                cut[p].copy_((ps[p] @ self.q[p].T).flatten())

        return Last(future, second)

    def state_dict(self):
        return {
            "owed": [t.clone() for t in self.owed.values()],
            "q": [t.clone() for t in self.q.values()],
        }

    def load_state_dict(self, state):
        if [t.numel() for t in state["owed"]] != [p.numel() for p in self.owed]:
            raise ValueError("saved for other parameters")
        for p, q in zip(self.owed, state["q"], strict=True):
            if q.shape != self.q[p].shape:
                raise ValueError(f"saved was a Q of {q.shape}")
        for p, owed, q in zip([*self.owed], state["owed"], state["q"], strict=True):
            self.owed[p], self.q[p] = owed.clone(), q.clone()


def orthonormal(p):
    wide = p.float() if p.element_size() < 4 else p
    return torch.linalg.svd(wide, full_matrices=False).U.to(p.dtype)


class Last:
    def __init__(self, future, then):
        self.future, self.then = future, then

    def wait(self):
        self.then(self.future.wait())
