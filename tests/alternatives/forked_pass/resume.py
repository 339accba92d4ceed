# for: 4.2
"""Written differently: a pass that was begun before is begun with the streams put aside."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from given.agreement import Group
from given.safe_format import Tree

from .sample_seeds import random_state, set_random_state


@dataclass
class Position:
    step: int = 0
    epoch: int = 0
    batch: int = 0


def batches(loader: DataLoader[Any], position: Position, epochs: int) -> Iterator[Any]:
    for epoch in range(position.epoch, epochs):
        for told in (loader.batch_sampler, loader.dataset):
            tell = getattr(told, "set_epoch", None)
            if tell is not None:
                tell(epoch)
        if position.batch:
            own = loader.generator and loader.generator.clone_state()
            with torch.random.fork_rng(devices=[]):
                loading = iter(loader)
            if own is not None:
                loader.generator.set_state(own.get_state())
        else:
            loading = iter(loader)
        while True:
            try:
                batch = next(loading)
            except StopIteration:
                break
            position.step, position.batch = (position.step + 1, position.batch + 1)
            yield batch
        position.epoch, position.batch = (epoch + 1, 0)


class Restorable(Protocol):
    @property
    def world_size(self) -> int: ...

    @property
    def shared(self) -> Tree: ...

    def own(self, rank: int) -> Tree: ...


class TrainingState:
    def __init__(
        self,
        *,
        sampler: Any,
        own: Collection[str] = (),
        device: torch.device | None = None,
        group: Group = None,
        **parts: Any,
    ) -> None:
        unknown = sorted(set(own) - parts.keys())
        if unknown:
            raise ValueError(f"own names {unknown}, the parts are {sorted(parts)}")
        self.sampler, self.parts, self.device, self.group = (sampler, parts, device, group)
        generators = {name for name, part in parts.items() if isinstance(part, torch.Generator)}
        self.own = set(own) | generators

    def capture(self, position: Position) -> tuple[Tree, Tree]:
        own: Tree = {"random": random_state(self.device), "parts": {}}
        shared: Tree = {"parts": {}, "position": asdict(position)}
        for name, part in self.parts.items():
            (own if name in self.own else shared)["parts"][name] = state_of(part)
        entries = self.sampler.batch_size * position.batch
        own["sampler"] = self.sampler.sampler.state_dict(entries)
        return (shared, own)

    def restore(self, saved: Restorable) -> Position:
        rank, ranks = (0, 1)
        if dist.is_initialized():
            rank, ranks = (dist.get_rank(self.group), dist.get_world_size(self.group))
        if ranks != saved.world_size:
            raise ValueError(f"{ranks} ranks can't restore what {saved.world_size} have saved")
        shared = copy.deepcopy(saved.shared)
        own = copy.deepcopy(saved.own(rank))
        expected = [set(self.parts) - self.own, set(self.own)]
        if [set(shared["parts"]), set(own["parts"])] != expected:
            raise ValueError(f"the checkpoint has other parts than {sorted(self.parts)}")
        pairs = []
        for name, part in self.parts.items():
            state = own["parts"][name] if name in self.own else shared["parts"][name]
            if isinstance(part, nn.Module):
                check_model_state(part, state)
            pairs.append((part, state))
        position = Position(**shared["position"])
        self.sampler.sampler.load_state_dict(own["sampler"])
        for part, state in sorted(pairs, key=lambda pair: isinstance(pair[0], torch.Generator)):
            load_into(part, state)
        set_random_state(own["random"], self.device)
        return position


def state_of(part: Any) -> Any:
    if isinstance(part, nn.Module):
        return model_state(part)
    return part.get_state() if isinstance(part, torch.Generator) else part.state_dict()


def load_into(part: Any, state: Any) -> None:
    state = copy.deepcopy(state)
    if isinstance(part, torch.Generator):
        part.set_state(state.to("cpu"))
        return
    if isinstance(part, nn.Module):
        front = wrapper_prefix(part)
        state = {f"{front}{name}": value for name, value in state.items()}
    part.load_state_dict(state)


def model_state(model: nn.Module) -> dict[str, Tensor]:
    length = len(wrapper_prefix(model))
    state = model.state_dict()
    return {name[length:]: state[name] for name in state}


def check_model_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    here = {name: getattr(value, "shape", None) for name, value in model_state(model).items()}
    there = {name: getattr(value, "shape", None) for name, value in state.items()}
    if here == there:
        return
    wrong = [n for n in {**here, **there} if (n in here) != (n in there) or here[n] != there[n]]
    raise ValueError(f"the state does not fit the model: {first_few(wrong)}")


def wrapper_prefix(model: nn.Module) -> str:
    children = [(name, child) for name, child in model._modules.items() if child is not None]
    if len(children) == 1 and children[0][0] in {"module", "_orig_mod"}:
        name, child = children[0]
        if all(key.startswith(f"{name}.") for key in model.state_dict()):
            return f"{name}." + wrapper_prefix(child)
    return ""


def first_few(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
