# for: 4.8
"""Written differently: pieces joined to one message, the rest is unpacked first, QR in float64."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group
from given.bucket_hooks import Bucket, Handle, Then

from .gradient_compression import PerParameter, State

SEED = 1905  # of the first Q, the same on all ranks
Matrix = tuple[Tensor, Tensor, Tensor]  # M (m, n), its part of the bucket (m, n), Q (n, r)
Rest = tuple[Tensor, Tensor]  # the new values (numel,), their part of the bucket (numel,)


def matrix_shape(p: Tensor) -> tuple[int, int]:
    if p.dim() < 2 or not p.numel():
        return p.numel(), 1
    rows = p.shape[max(range(p.dim()), key=p.stride)]
    return rows, p.numel() // rows


class PowerSGD:
    def __init__(
        self, parameters: Iterable[nn.Parameter], rank: int = 2, group: Group = None
    ) -> None:
        if rank < 1:
            raise ValueError(f"the rank of the approximation must be positive, got {rank}")
        self.rank, self.group = rank, group
        self.residual = PerParameter(parameters)
        self.q = self._first_qs()  # (n, r) of every parameter that is compressed

    def width(self, p: Tensor) -> int:
        rows, columns = matrix_shape(p)
        r = self.rank
        if r > rows:
            r = rows
        if r > columns:
            r = columns
        worth = rows * columns - r * (rows + columns)
        return r if worth > 0 else 0

    def __call__(self, bucket: Bucket) -> Handle | None:
        owed = self.residual.beside(bucket)
        if owed.numel() == 0:
            return None
        owed += bucket.buffer
        matrices, rest = self._split(bucket, owed)
        pieces = [(m @ q).reshape(-1) for m, _, q in matrices] + [new for new, _ in rest]
        message = torch.cat(pieces)
        sizes = [piece.numel() for piece in pieces]
        del pieces
        group, share = self.group, 1.0 / dist.get_world_size(self.group)

        def finish() -> None:
            arrived = list(message.split(sizes))
            for (kept, out), whole in zip(rest, arrived[len(matrices) :], strict=True):
                out[:] = whole
                kept.fill_(0)
            if not matrices:
                return
            left = [
                orthonormal(flat.view(m.shape[0], -1))
                for flat, (m, _, _) in zip(arrived, matrices, strict=False)
            ]
            right = torch.cat(
                [(m.t() @ p).flatten() for (m, _, _), p in zip(matrices, left, strict=True)]
            )
            dist.all_reduce(right, group=group, async_op=True).wait()
            begin = 0
            for (m, out, q), p in zip(matrices, left, strict=True):
                q.copy_(right[begin : begin + q.numel()].view_as(q))
                begin += q.numel()
                out.copy_(p @ q.t())
                m -= out * share

        return Then(dist.all_reduce(message, group=group, async_op=True), finish)

    def _split(self, bucket: Bucket, residual: Tensor) -> tuple[list[Matrix], list[Rest]]:
        matrices: list[Matrix] = []
        rest: list[Rest] = []
        sizes = [p.numel() for p in bucket.parameters]
        parts = zip(residual.split(sizes), bucket.buffer.split(sizes), strict=True)
        for p, (part, out) in zip(bucket.parameters, parts, strict=True):
            if self.width(p):
                shape = matrix_shape(p)
                matrices.append((part.view(shape), out.view(shape), self.q[p]))
            else:
                rest.append((part, out))
        return matrices, rest

    def _first_qs(self) -> dict[nn.Parameter, Tensor]:
        generator = torch.Generator()
        generator.manual_seed(SEED)
        return {
            p: torch.empty(matrix_shape(p)[1], self.width(p), dtype=torch.float64)
            .uniform_(-1, 1, generator=generator)
            .to(dtype=p.dtype, device=p.device)
            for p in self.residual.parts
            if self.width(p)
        }

    def state_dict(self) -> State:
        qs = [q.detach().clone() for q in self.q.values()]
        return {"residual": self.residual.state_dict(), "qs": qs, "width": self.rank}

    def load_state_dict(self, state: State) -> None:
        if state["width"] != self.rank:
            raise ValueError("what was saved is of another rank of the approximation")
        mine = list(self.q.values())
        check_shapes(state["qs"], mine)
        self.residual.load_state_dict(state["residual"])
        for here, there in zip(mine, state["qs"], strict=True):
            here.copy_(there)


def check_shapes(saved: Sequence[Tensor], here: Sequence[Tensor]) -> None:
    shapes, wanted = ([tuple(q.shape) for q in qs] for qs in (saved, here))
    if shapes != wanted:
        raise ValueError(f"saved were Qs of {shapes}, but there are {wanted}")


def orthonormal(p: Tensor) -> Tensor:
    q, _ = torch.linalg.qr(p.double(), mode="reduced")
    return q.to(p.dtype)
