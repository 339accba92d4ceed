# for: 3.13
"""Written differently: whole parameters, dealt out by size, each broadcast by its owner."""

from __future__ import annotations

import copy
import io

import torch
import torch.distributed as dist


class ZeroOptimizer(torch.optim.Optimizer):
    def __init__(self, params, optimizer_class, *, group=None, bucket_bytes=25 * 2**20, **defaults):
        if dist.get_rank(group) < 0:
            raise ValueError("this rank is not in the group")
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
        self.group = group
        self.owner, self.load = {}, [0] * dist.get_world_size(group)
        self.inner = optimizer_class([{"params": []}], **defaults)
        self.inner.param_groups.clear()
        super().__init__(params, self.inner.defaults)
        self.state = self.inner.state

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        users = self.param_groups[-1]
        if len(users["params"]) != len({id(p) for p in users["params"]}):
            raise ValueError("twice the same parameter")
        for p in sorted(users["params"], key=torch.numel, reverse=True):
            lightest = self.load.index(min(self.load))
            self.load[lightest] += p.numel() * p.requires_grad
            self.owner[p] = lightest
        rank = dist.get_rank(self.group)
        mine = [p for p in users["params"] if self.owner[p] == rank and p.requires_grad]
        self.inner.add_param_group(said(users) | {"params": mine})
        users.update(said(self.inner.param_groups[-1]))

    def before_step(self):
        """Gradients are there."""

    @torch.no_grad()
    def step(self, closure=None, **more):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.before_step()
        for mine, users in zip(self.inner.param_groups, self.param_groups, strict=True):
            mine.update(said(users))
        self.inner.step(**more)
        for mine, users in zip(self.inner.param_groups, self.param_groups, strict=True):
            users.update(said(mine))
        sent = [p for p in self.owner if p.requires_grad and p.numel()]
        packed = [p.detach().contiguous() for p in sent]
        works = [
            dist.broadcast(values, group=self.group, group_src=self.owner[p], async_op=True)
            for p, values in zip(sent, packed, strict=True)
        ]
        for work, p, values in zip(works, sent, packed, strict=True):
            work.wait()
            if not p.is_contiguous():
                p.detach().copy_(values)
        return loss

    def state_dict(self, to=None):
        world_size = dist.get_world_size(self.group)
        if to is not None and not 0 <= to < world_size:
            raise ValueError(f"no rank {to} in a group of {world_size}")
        index = {}
        for users in self.param_groups:
            for p in users["params"]:
                index[p] = len(index)
        buffer = io.BytesIO()
        torch.save({index[p]: dict(entry) for p, entry in self.state.items()}, buffer)
        merged = {}
        for rank in range(world_size):
            mine = rank == dist.get_rank(self.group)
            where = next(iter(index)).device
            size = torch.tensor([buffer.tell()], device=where)
            dist.broadcast(size, group=self.group, group_src=rank)
            if mine:
                raw = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to(where)
            else:
                raw = torch.empty(int(size), dtype=torch.uint8, device=where)
            dist.broadcast(raw, group=self.group, group_src=rank)
            told = io.BytesIO(raw.cpu().numpy().tobytes())
            merged |= torch.load(told, map_location="cpu", weights_only=True)
        if to not in (None, dist.get_rank(self.group)):
            return {}
        groups = [
            users | {"params": [index[p] for p in users["params"]]} for users in self.param_groups
        ]
        return {"state": merged, "param_groups": copy.deepcopy(groups)}

    def load_state_dict(self, state_dict):
        got = [len(g["params"]) for g in state_dict["param_groups"]]
        want = [len(g["params"]) for g in self.param_groups]
        if got != want:
            raise ValueError(f"groups of {got} parameters, expected {want}")
        self.state.clear()
        for users, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, key in zip(users["params"], saved["params"], strict=True):
                values = state_dict["state"].get(key)
                if values is not None and self.owner[p] == dist.get_rank(self.group):
                    self.state[p] = {
                        name: value.clone().to(value.device if name == "step" else p.device)
                        if isinstance(value, torch.Tensor)
                        else value
                        for name, value in values.items()
                    }
            users.update(copy.deepcopy(said(saved)))


def said(group):
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}
