# for: 4.9
"""Written differently: pieces travel as lists, rounding compares with the fraction, bits are packed
by columns, the mean is taken in float64."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group
from given.bucket_hooks import Bucket, Handle, Then

from .gradient_compression import PerParameter, State

STEPS = 127  # of int8 to each side of zero; -128 is not used
SCALE_BYTES = 4  # a float32


class Int8:
    def __init__(self, group: Group = None, seed: int = 0) -> None:
        self.group = group
        self.generator = torch.Generator().manual_seed(
            seed * dist.get_world_size(group) + dist.get_rank(group)
        )

    def __call__(self, bucket: Bucket) -> Handle | None:
        size = dist.get_world_size(self.group)
        n = bucket.buffer.numel()
        if n == 0:
            return None
        width = (n + size - 1) // size
        table = torch.nn.functional.pad(bucket.buffer.float(), (0, size * width - n)).view(
            size, width
        )
        out = list(pack_int8(table, self.generator).unbind(0))
        come = [torch.empty_like(row) for row in out]
        first = dist.all_to_all(come, out, group=self.group, async_op=True)

        def finish() -> None:
            total = torch.zeros(1, width, device=bucket.buffer.device)
            for row in come:
                total += unpack_int8(row[None], torch.float32)
            mine = pack_int8(total, self.generator)[0]
            dist.all_gather(come, mine, group=self.group)
            for k, row in enumerate(come):
                piece = bucket.buffer[k * width : (k + 1) * width]
                piece.copy_(unpack_int8(row[None], bucket.buffer.dtype)[0, : piece.numel()])

        return Then(first, finish)

    def state_dict(self) -> State:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: State) -> None:
        self.generator.set_state(state["generator"])


class OneBit:
    def __init__(self, parameters: Iterable[nn.Parameter], group: Group = None) -> None:
        self.group = group
        self.residual = PerParameter(parameters)

    def __call__(self, bucket: Bucket) -> Handle | None:
        owed = self.residual.beside(bucket)
        count = owed.numel()
        if count == 0:
            return None
        owed += bucket.buffer
        s = (owed.abs().sum(dtype=torch.float64) / count).to(torch.float32).reshape(1)
        signs = pack_signs(owed)
        message = torch.empty(SCALE_BYTES + signs.numel(), dtype=torch.uint8, device=owed.device)
        message[:SCALE_BYTES] = s.view(torch.uint8)
        message[SCALE_BYTES:] = signs
        come = [torch.empty_like(message) for _ in range(dist.get_world_size(self.group))]
        work = dist.all_gather(come, message, group=self.group, async_op=True)
        size = s.to(owed.dtype)
        owed -= torch.where(owed >= 0, size, -size)

        def decode() -> None:
            total = torch.zeros_like(bucket.buffer)
            for theirs in come:
                scale = theirs[:SCALE_BYTES].view(torch.float32).to(total.dtype)
                total += unpack_signs(theirs[SCALE_BYTES:], count, total.dtype) * scale
            bucket.buffer.copy_(total)

        return Then(work, decode)

    def state_dict(self) -> State:
        return {"owed": self.residual.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.residual.load_state_dict(state["owed"])


def pack_int8(x: Tensor, generator: torch.Generator) -> Tensor:
    y = x.to(torch.float32)
    scale = torch.linalg.vector_norm(y, float("inf"), dim=1, keepdim=True) / 127.0
    broken = ~torch.isfinite(scale)
    scale = torch.where(broken, torch.full_like(scale, float("nan")), scale)
    y = torch.where(broken | (scale == 0), torch.zeros_like(y), y / scale)
    low = y.floor()
    u = torch.rand(y.shape, dtype=torch.float64, generator=generator).to(y.device)
    q = low + (u < (y - low))
    out = torch.empty(x.shape[0], x.shape[1] + SCALE_BYTES, dtype=torch.int8, device=x.device)
    out[:, : x.shape[1]] = q.clamp(-STEPS, STEPS).to(torch.int8)
    out[:, x.shape[1] :] = scale.contiguous().view(torch.int8)
    return out


def unpack_int8(packed: Tensor, dtype: torch.dtype) -> Tensor:
    c = packed.shape[1] - SCALE_BYTES
    tail = torch.empty(packed.shape[0], SCALE_BYTES, dtype=torch.int8, device=packed.device)
    tail.copy_(packed[:, c:])
    numbers = packed[:, :c].to(torch.float32).mul_(tail.view(torch.float32))
    return numbers.to(dtype)


def pack_signs(v: Tensor) -> Tensor:
    n = v.numel()
    out = torch.zeros((n + 7) // 8, dtype=torch.uint8, device=v.device)
    for j in range(8):
        column = v[j::8] >= 0
        out[: column.numel()] |= column.to(torch.uint8) << j
    return out


def unpack_signs(packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    signs = torch.full((n,), -1, dtype=dtype, device=packed.device)
    for j in range(8):
        column = signs[j::8]
        column.masked_fill_((packed[: column.numel()] & (1 << j)) != 0, 1)
    return signs
