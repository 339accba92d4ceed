# for: 2.19
"""Written from the docstrings alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor

from given.agreement import Group, rank_in

States = list[Tensor]
REPLICATED, SHARDED, CALLER = ("replicated", "sharded", "caller")


class RandomStreams:
    def __init__(
        self, seed: int, *, device: torch.device | str = "cpu", group: Group = None
    ) -> None:
        if seed < 0:
            raise ValueError(f"a seed must not be negative, as {seed} is")
        rank = rank_in(group)
        device = torch.device(device)
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self._states: dict[str, States] = {}
        for name, number in ((REPLICATED, 0), (SHARDED, 1 + rank)):
            words = np.random.SeedSequence(seed, spawn_key=(number,)).generate_state(
                len(self._generators), np.uint64
            )
            self._states[name] = []
            for generator, word in zip(self._generators, words, strict=True):
                own = torch.Generator(generator.device)
                own.manual_seed(int(word) >> 1)
                self._states[name].append(own.get_state())
        self._current = CALLER

    def replicated(self) -> AbstractContextManager[None]:
        return self._drawing_from(REPLICATED)

    def sharded(self) -> AbstractContextManager[None]:
        return self._drawing_from(SHARDED)

    def _save(self) -> dict[str, States]:
        return {**self._states, self._current: [g.get_state() for g in self._generators]}

    def _switch(self, name: str) -> None:
        for generator, state in zip(self._generators, self._states[name], strict=True):
            generator.set_state(state)
        self._current = name

    @contextmanager
    def _drawing_from(self, name: str) -> Iterator[None]:
        before = self._current
        self._states = self._save()
        self._switch(name)
        try:
            yield
        finally:
            self._states = self._save()
            self._switch(before)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return (nullcontext(), _Rewound(self))

    def state_dict(self) -> dict[str, States]:
        states = self._save()
        return {name: [state.clone() for state in states[name]] for name in (REPLICATED, SHARDED)}

    def load_state_dict(self, states: dict[str, States]) -> None:
        if self._current != CALLER:
            raise ValueError(
                f"the {self._current} stream is in use: load states outside of the contexts"
            )
        for name in (REPLICATED, SHARDED):
            if len(states.get(name, ())) != len(self._generators):
                raise ValueError(f"no {name} states of {len(self._generators)} generators")
        for name in (REPLICATED, SHARDED):
            self._states[name] = [state.clone() for state in states[name]]


class _Rewound(AbstractContextManager[None]):
    def __init__(self, streams: RandomStreams) -> None:
        self.streams = streams
        self.states, self.current = (streams._save(), streams._current)
        self.outside: list[tuple[dict[str, States], str]] = []

    def __enter__(self) -> None:
        streams = self.streams
        self.outside.append((streams._save(), streams._current))
        streams._states = dict(self.states)
        streams._switch(self.current)

    def __exit__(self, *exc: object) -> None:
        streams = self.streams
        streams._states, current = self.outside.pop()
        streams._switch(current)
