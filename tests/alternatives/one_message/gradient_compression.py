# for: 4.6, 4.7
"""Written differently: memory by parameter, one message of bytes, places from a counted seed."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Memory:
    """(name, number of the parameter) -> tensor."""

    def __init__(self, parameters, *names, **settings):
        self.names, self.parameters, self.settings = names, [*parameters], settings
        self.numbers = {p: number for number, p in enumerate(self.parameters)}
        self.tensors = {}

    def read(self, bucket, name):
        strangers = [p.numel() for p in bucket.parameters if p not in self.numbers]
        if strangers:
            raise ValueError(f"{strangers} entries belong to nobody")
        parts = []
        for p in bucket.parameters:
            none = torch.zeros(p.numel(), dtype=p.dtype, device=p.device)
            parts.append(self.tensors.get((name, self.numbers[p]), none))
        return torch.cat(parts)

    def write(self, bucket, name, flat):
        for p, part in zip(
            bucket.parameters, flat.split([p.numel() for p in bucket.parameters]), strict=True
        ):
            self.tensors[name, self.numbers[p]] = part.clone()

    def state_dict(self):
        found = {name: {} for name in self.names}
        for (name, number), tensor in self.tensors.items():
            found[name][str(number)] = tensor.clone()
        return {**found, "sizes": [p.numel() for p in self.parameters], **self.settings}

    def load_state_dict(self, state):
        sizes = [p.numel() for p in self.parameters]
        if state["sizes"] != sizes:
            raise ValueError(f"{state['sizes']} entries were saved for {sizes}")
        for name, value in self.settings.items():
            if state[name] != value:
                raise ValueError(f"{name} was {state[name]}, and is {value}")
        self.tensors = {
            (name, int(number)): tensor.clone()
            for name in self.names
            for number, tensor in state[name].items()
        }


PerParameter = Memory


class Later:
    def __init__(self, work, finish):
        self.work, self.finish = work, finish

    def wait(self):
        self.work.wait()
        self.finish()


def number(ratio, numel):
    return max(1, round(ratio * numel))


class TopK:
    def __init__(self, parameters, ratio=0.01, momentum=0.0, group=None):
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio {ratio}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum {momentum}")
        self.ratio, self.momentum, self.group = ratio, momentum, group
        self.memory = Memory(parameters, "v", "u", momentum=momentum)

    def __call__(self, bucket):
        n = bucket.buffer.numel()
        if n == 0:
            return None
        u = bucket.buffer
        if self.momentum:
            u = self.memory.read(bucket, "u") * self.momentum + u
        v = self.memory.read(bucket, "v") + u
        order = v.abs().argsort(descending=True)[: number(self.ratio, n)].sort().values
        message = torch.cat([v[order].view(torch.uint8), order.int().view(torch.uint8)])
        sent = torch.zeros(n, dtype=torch.bool, device=v.device)
        sent[order] = True
        if self.momentum:
            self.memory.write(bucket, "u", u.masked_fill(sent, 0))
        self.memory.write(bucket, "v", v.masked_fill(sent, 0))
        everyone = [torch.empty_like(message) for _ in range(dist.get_world_size(self.group))]
        work = dist.all_gather(everyone, message, group=self.group, async_op=True)

        def finish():
            total = torch.zeros_like(bucket.buffer)
            border = len(order) * total.element_size()
            for theirs in everyone:
                dense = torch.zeros_like(total)
                places = theirs[border:].clone().view(torch.int32).long()
                dense[places] = theirs[:border].clone().view(total.dtype)
                total += dense
            bucket.buffer.copy_(total)

        return Later(work, finish)

    def state_dict(self):
        return self.memory.state_dict()

    def load_state_dict(self, state):
        self.memory.load_state_dict(state)


class RandomK:
    def __init__(self, parameters, ratio=0.01, seed=0, group=None):
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio {ratio}")
        self.ratio, self.seed, self.group, self.calls = ratio, seed, group, 0
        self.memory = Memory(parameters, "v")

    def __call__(self, bucket):
        n = bucket.buffer.numel()
        if n == 0:
            return None
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.calls)
        self.calls += 1
        scores = torch.rand(n, generator=generator)
        places = scores.topk(number(self.ratio, n)).indices.to(bucket.buffer.device)
        v = self.memory.read(bucket, "v") + bucket.buffer
        values = v[places]
        self.memory.write(bucket, "v", v.index_fill(0, places, 0))
        work = dist.all_reduce(values, group=self.group, async_op=True)
        new = bucket.buffer
        return Later(work, lambda: new.copy_(torch.zeros_like(new).index_put((places,), values)))

    def state_dict(self):
        return {**self.memory.state_dict(), "calls": self.calls}

    def load_state_dict(self, state):
        self.memory.load_state_dict(state)
        self.calls = state["calls"]
