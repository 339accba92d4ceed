# for: 4.2
"""Written differently: every kind of part has an adapter, names are matched by their ends, and the
loop iterates by hand."""

from __future__ import annotations

import io

import torch
import torch.distributed as dist
from torch import nn

from .sample_seeds import random_state, set_random_state


class Position:
    def __init__(self, step: int = 0, epoch: int = 0, batch: int = 0) -> None:
        self.step, self.epoch, self.batch = step, epoch, batch


def batches(loader, position, epochs):
    for epoch in range(position.epoch, epochs):
        position.epoch = epoch
        for each in (loader.batch_sampler, loader.dataset):
            getattr(each, "set_epoch", lambda _: None)(epoch)
        generator = loader.generator or torch.default_generator
        before, iterator = generator.get_state(), iter(loader)
        if position.batch:
            generator.set_state(before)
        while (batch := next(iterator, None)) is not None:
            position.step, position.batch = position.step + 1, position.batch + 1
            yield batch
        position.epoch, position.batch = epoch + 1, 0


def plain(names: list[str]) -> list[str]:
    heads = {name.partition(".")[0] for name in names}
    if heads in ({"module"}, {"_orig_mod"}):
        return plain([name.partition(".")[2] for name in names])
    return names


class ModelPart:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def names(self) -> dict[str, str]:
        full = list(self.model.state_dict())
        return dict(zip(plain(full), full, strict=True))

    def state(self):
        full = self.model.state_dict()
        return {short: full[name] for short, name in self.names.items()}

    def check(self, state) -> None:
        mine, problems = self.state(), []
        missing, unknown = sorted(set(mine) - set(state)), sorted(set(state) - set(mine))
        for what, names in (("missing", missing), ("unknown", unknown)):
            if names:
                problems.append(f"{len(names)} {what} ({', '.join(names[:3])})")
        for name in set(mine) & set(state):
            got, want = list(state[name].shape), list(mine[name].shape)
            if got != want:
                problems.append(f"{name} {got} for {want}")
        if problems:
            raise ValueError("this is the checkpoint of another model: " + ", ".join(problems))

    def load(self, state) -> None:
        self.model.load_state_dict({self.names[short]: value for short, value in state.items()})


def check_model_state(model, state):
    ModelPart(model).check(state)


class GeneratorPart:
    def __init__(self, generator: torch.Generator) -> None:
        self.state, self.load = generator.get_state, generator.set_state


class OtherPart:
    def __init__(self, part) -> None:
        self.state, self.take = part.state_dict, part.load_state_dict

    def load(self, state) -> None:
        stream = io.BytesIO()
        torch.save(state, stream)
        stream.seek(0)
        self.take(torch.load(stream, weights_only=False))


def adapter(part):
    if isinstance(part, nn.Module):
        return ModelPart(part)
    return (GeneratorPart if isinstance(part, torch.Generator) else OtherPart)(part)


class TrainingState:
    def __init__(self, *, sampler, own=(), device=None, group=None, **parts) -> None:
        if not set(own) <= set(parts):
            raise ValueError(f"{sorted(set(own) - set(parts))} are no parts")
        self.sampler, self.device, self.group = sampler, device, group
        self.parts = {name: adapter(part) for name, part in parts.items()}
        self.private = {
            name
            for name, part in self.parts.items()
            if name in own or isinstance(part, GeneratorPart)
        }

    def capture(self, position):
        shared, own = {}, {}
        for name, part in self.parts.items():
            (own if name in self.private else shared)[name] = part.state()
        inner = self.sampler.sampler
        return (
            {"parts": shared, "position": dict(vars(position))},
            {
                "parts": own,
                "sampler": inner.state_dict(self.sampler.batch_size * position.batch),
                "random": random_state(self.device),
            },
        )

    def restore(self, saved):
        together = dist.is_initialized()
        ranks = dist.get_world_size(self.group) if together else 1
        if ranks != saved.world_size:
            raise ValueError(f"this is a checkpoint of {saved.world_size} ranks, not of {ranks}")
        own = saved.own(dist.get_rank(self.group) if together else 0)
        states = {**saved.shared["parts"], **own["parts"]}
        odd = set(states) ^ set(self.parts)
        if odd:
            raise ValueError(f"the checkpoint and this run differ in {sorted(odd)}")
        for name, part in self.parts.items():
            getattr(part, "check", lambda _: None)(states[name])
        for name, part in self.parts.items():
            part.load(states[name])
        self.sampler.sampler.load_state_dict(own["sampler"])
        set_random_state(own["random"], self.device)
        return Position(**saved.shared["position"])
