# for: 3.13
"""Written differently: vectors joined and split by torch, gathered into rows."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group, rank_in

from .buckets import partition


@dataclass(eq=False)
class Piece:
    whole: nn.Parameter
    start: int
    stop: int
    part: nn.Parameter


class FlatVector:
    gradient: Tensor | None = None  # (shard,) ZeRO-2's mean gradient

    def __init__(self, parameters: list[nn.Parameter], group: Group) -> None:
        self.parameters = parameters
        self.pieces: list[Piece] = []
        world_size, rank = dist.get_world_size(group), dist.get_rank(group)
        sizes = [p.numel() for p in parameters]
        missing = -sum(sizes) % world_size
        values = [p.detach().reshape(-1) for p in parameters]
        self.flat = torch.cat([*values, values[0].new_zeros(missing)])
        shards = self.flat.view(world_size, -1)
        self.own = shards[rank]
        begin = rank * shards.shape[1]
        stop = begin + shards.shape[1]
        offset = 0
        for p, whole in zip(parameters, self.flat.split([*sizes, missing]), strict=False):
            p.data = whole.view(p.shape)
            mine = range(max(begin - offset, 0), min(stop - offset, len(whole)))
            if len(mine):
                part = nn.Parameter(whole[mine.start : mine.stop], requires_grad=True)
                self.pieces.append(Piece(p, mine.start, mine.stop, part))
            offset += len(whole)


class ZeroOptimizer(torch.optim.Optimizer):
    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        group: Group = None,
        bucket_bytes: int = 25 * 2**20,
        **defaults: Any,
    ) -> None:
        rank_in(group)
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
        self.group, self.bucket_bytes = group, bucket_bytes
        self.vectors: list[FlatVector] = []
        self.inner = optimizer_class([{"params": []}], **defaults)
        self.inner.param_groups.clear()
        super().__init__(params, self.inner.defaults)
        self.state = self.inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if len(set(group["params"])) != len(group["params"]):
            del self.param_groups[-1]
            raise ValueError("some parameter is in this group more than once")
        backwards = [p for p in group["params"] if p.requires_grad and p.numel() > 0][::-1]
        lists = partition(backwards, self.bucket_bytes, self.bucket_bytes)
        new = [FlatVector([backwards[k] for k in each], self.group) for each in lists]
        self.vectors.extend(new)
        parts = [piece.part for vector in new for piece in vector.pieces]
        self.inner.add_param_group(dict(options_of(group), params=parts))

    @property
    def pieces(self) -> list[Piece]:
        return [piece for vector in self.vectors for piece in vector.pieces]

    def give_gradients(self) -> None:
        for vector in self.vectors:
            for piece in vector.pieces:
                g = piece.whole.grad
                piece.part.grad = None
                if g is not None:
                    flat = g.detach().view(-1) if g.is_contiguous() else g.detach().flatten()
                    piece.part.grad = flat.narrow(0, piece.start, piece.stop - piece.start)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **more: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for k in range(len(self.param_groups)):
            self.inner.param_groups[k].update(options_of(self.param_groups[k]))
        self.give_gradients()
        self.inner.step(**more)
        waiting = []
        for vector in self.vectors:
            rows = list(vector.flat.view(dist.get_world_size(self.group), -1).unbind())
            waiting.append(dist.all_gather(rows, vector.own, group=self.group, async_op=True))
        for k in range(len(self.param_groups)):
            self.param_groups[k].update(options_of(self.inner.param_groups[k]))
        for piece in self.pieces:
            if piece.whole.grad is not None:
                piece.part.grad = None
        while waiting:
            waiting.pop(0).wait()
        return loss

    def state_dict(self, to: int | None = None) -> dict[str, Any]:
        world_size = dist.get_world_size(self.group)
        if to is not None and not 0 <= to < world_size:
            raise ValueError(f"no rank {to} in a group of {world_size}")
        order: list[nn.Parameter] = []
        for users in self.param_groups:
            order.extend(users["params"])
        number = {p: k for k, p in enumerate(order)}
        mine: dict[int, tuple[int, int, dict[str, Any], dict[str, Any]]] = {}
        for piece in self.pieces:
            if piece.part not in self.inner.state:
                continue
            cut, common = {}, {}
            for name, value in self.inner.state[piece.part].items():
                into = cut if is_cut(name, value, piece.part) else common
                into[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
            names = list(self.inner.state[piece.part])
            mine[number[piece.whole]] = (piece.start, piece.stop, cut, common, names)
        told = gather_values(mine, order[0].device, self.group, to)
        if not told:
            return {}
        state: dict[int, dict[str, Any]] = {}
        for k in sorted({k for of_rank in told for k in of_rank}):
            parts = [of_rank[k] for of_rank in told if k in of_rank]
            parts.sort(key=lambda part: part[0])
            _, _, _, common, names = parts[0]
            state[k] = {
                name: common[name]
                if name in common
                else torch.cat([cut[name] for _, _, cut, _, _ in parts]).view(order[k].shape)
                for name in names
            }
        groups = []
        for users in self.param_groups:
            group = {}
            for name, v in users.items():
                if name == "params":
                    group[name] = [number[p] for p in v]
                else:
                    group[name] = copy.deepcopy(v)
            groups.append(group)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = [len(each["params"]) for each in state_dict["param_groups"]]
        sizes = [len(users["params"]) for users in self.param_groups]
        if saved != sizes:
            raise ValueError(f"the state is of groups of {saved} parameters, not of {sizes}")
        saved_groups = state_dict["param_groups"]
        where: dict[nn.Parameter, tuple[Any, dict[str, Any]]] = {}
        for users, group in zip(self.param_groups, saved_groups, strict=True):
            for p, number in zip(users["params"], group["params"], strict=True):
                where[p] = (number, group)
        self.inner.state.clear()
        for piece in self.pieces:
            number, group = where[piece.whole]
            if number not in state_dict["state"]:
                continue
            mine: dict[str, Any] = {}
            for name, value in state_dict["state"][number].items():
                if not isinstance(value, Tensor):
                    mine[name] = copy.deepcopy(value)
                    continue
                value = value.detach()
                if is_cut(name, value, piece.whole):
                    value = value.reshape(-1)[piece.start : piece.stop]
                if name == "step":
                    if group.get("capturable") or group.get("fused"):
                        value = value.to(piece.part.device, torch.float32)
                elif piece.part.is_floating_point():
                    value = value.to(piece.part.device, piece.part.dtype)
                else:
                    value = value.to(piece.part.device)
                mine[name] = value.clone()
            self.inner.state[piece.part] = mine
        for inner, users, group in zip(
            self.inner.param_groups, self.param_groups, saved_groups, strict=True
        ):
            for name in set(options_of(users)) - set(options_of(group)) - set(self.defaults):
                users.pop(name)
                inner.pop(name, None)
            users.update(copy.deepcopy(options_of(group)))
            inner.update(options_of(users))


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in group.items() if name not in ("params", "param_names")}


def is_cut(name: str, value: Any, part: Tensor) -> bool:
    return isinstance(value, Tensor) and name != "step" and value.shape == part.shape


def gather_values(value: Any, device: torch.device, group: Group, to: int | None) -> list[Any]:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    sent = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to(device)
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = sent.new_empty(world_size, dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(sent)], device=device), group=group)
    padded = sent.new_zeros(int(sizes.max()))
    padded[: len(sent)] = sent
    rows = [torch.empty_like(padded) for _ in range(world_size)] if to in (None, rank) else None
    if to is None:
        dist.all_gather(rows, padded, group=group)
    else:
        dist.gather(padded, rows, group=group, group_dst=to)
    told = [
        io.BytesIO(row[:size].cpu().numpy().tobytes())
        for row, size in zip(rows or (), sizes.tolist(), strict=rows is not None)
    ]
    return [torch.load(each, map_location="cpu", weights_only=True) for each in told]
