# for: 2.19
"""Written from the docstrings alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import Group

States = list[Tensor]
REPLICATED, SHARDED, CALLER = ("replicated", "sharded", "caller")


class RandomStreams:
    def __init__(
        self, seed: int, *, device: torch.device | str = "cpu", group: Group = None
    ) -> None:
        if seed < 0:
            raise ValueError("negative seed")
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not in the group")
        where = torch.device(device)
        self.generators = {"cpu": torch.default_generator}
        if where.type == "cuda":
            torch.cuda.init()
            at = where.index if where.index is not None else torch.cuda.current_device()
            self.generators["cuda"] = torch.cuda.default_generators[at]

        def fresh(number: int) -> States:
            mixed = np.random.SeedSequence(entropy=seed, spawn_key=(number,))
            states = []
            for child, generator in zip(mixed.spawn(2), self.generators.values(), strict=False):
                made = torch.Generator(device=generator.device)
                made.manual_seed(int(child.generate_state(1, np.uint64)[0] & np.uint64(2**63 - 1)))
                states.append(made.get_state())
            return states

        self.kept: dict[str, States | None] = {
            REPLICATED: fresh(0),
            SHARDED: fresh(rank + 1),
            CALLER: None,
        }
        self.used = [CALLER]

    def replicated(self) -> AbstractContextManager[None]:
        return self._drawing_from(REPLICATED)

    def sharded(self) -> AbstractContextManager[None]:
        return self._drawing_from(SHARDED)

    def _save(self) -> dict[str, States]:
        states = dict(self.kept)
        states[self.used[-1]] = [g.get_state() for g in self.generators.values()]
        return states

    def _switch(self, name: str) -> None:
        for g, state in zip(self.generators.values(), self.kept[name], strict=True):
            g.set_state(state)

    @contextmanager
    def _drawing_from(self, name: str) -> Iterator[None]:
        self.kept = self._save()
        self.used.append(name)
        self._switch(name)
        try:
            yield
        finally:
            self.kept = self._save()
            self.used.pop()
            self._switch(self.used[-1])

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return (nullcontext(), _Rewound(self))

    def state_dict(self) -> dict[str, States]:
        now = self._save()
        return {
            "replicated": [torch.clone(s) for s in now[REPLICATED]],
            "sharded": [torch.clone(s) for s in now[SHARDED]],
        }

    def load_state_dict(self, states: dict[str, States]) -> None:
        if len(self.used) > 1:
            raise ValueError("load_state_dict inside of a context")
        new = {name: [s.clone() for s in states.get(name, [])] for name in (REPLICATED, SHARDED)}
        if any(len(found) != len(self.generators) for found in new.values()):
            raise ValueError(f"these are not states of {len(self.generators)} generators")
        self.kept.update(new)


class _Rewound(AbstractContextManager[None]):
    def __init__(self, streams: RandomStreams) -> None:
        self.streams = streams
        self.then = (streams._save(), list(streams.used))
        self.later: list[tuple[dict[str, States], list[str]]] = []

    def __enter__(self) -> None:
        s = self.streams
        self.later.append((s._save(), s.used))
        s.kept, s.used = (dict(self.then[0]), list(self.then[1]))
        s._switch(s.used[-1])

    def __exit__(self, *exc: object) -> None:
        s = self.streams
        s.kept, s.used = self.later.pop()
        s._switch(s.used[-1])
