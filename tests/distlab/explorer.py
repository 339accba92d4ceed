"""All interleavings of a program of messages and collectives, in a model of NCCL's order of issue.

It shares no code with the toolkit. A program has a list of steps for each rank:

    ("issue", name, operations)   one entry of a queue; several operations are a batch
    ("wait", name)                until the entry is complete

An operation is ("send", peer), ("recv", peer) or ("all", members). A state is how far each rank is,
which communicators it has come to, and which operations are complete; every step that is possible
in a state leads to another state, and all of them are visited.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

Operation = tuple[str, Any]
Step = tuple[Any, ...]


@dataclass(frozen=True)
class State:
    """``at``: the next step of each rank; ``come``: (communicator, rank); ``done``: transfers."""

    at: tuple[int, ...]
    come: frozenset[Any]
    done: frozenset[Any]


class Explorer:
    """``pairs``: messages outside of batches have a communicator of two; ``made``: communicators
    that are there at the beginning."""

    def __init__(
        self, programs: list[list[Step]], pairs: bool, made: frozenset[tuple[int, ...]]
    ) -> None:
        self.programs, self.made = programs, made
        self.everyone = tuple(range(len(programs)))
        self.entries: dict[tuple[int, int], tuple[Any, list[Any]]] = {}
        self.by_name: dict[tuple[int, Any], list[Any]] = {}
        self.ends: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        self.before: dict[tuple[int, int], list[Any]] = {}
        for rank in self.everyone:
            self._read(rank, pairs)

    def _read(self, rank: int, pairs: bool) -> None:
        """Name the transfer of each operation by its place in the order of its kind."""
        counts: dict[Any, int] = defaultdict(int)
        queues: dict[Any, list[Any]] = defaultdict(list)
        for number, step in enumerate(self.programs[rank]):
            if step[0] != "issue":
                continue
            _, name, operations = step
            communicator: Any = self.everyone
            found = []
            for kind, about in operations:
                if kind == "all":
                    communicator, key = about, (about, "all")
                else:
                    ends = (rank, about) if kind == "send" else (about, rank)
                    if pairs and len(operations) == 1:
                        communicator = ("pair", *sorted(ends))
                    key = (communicator, ends)
                found.append((*key, counts[key]))
                counts[key] += 1
            place = rank, number
            self.entries[place] = communicator, found
            self.by_name[rank, name] = found
            for transfer in found:
                self.ends[transfer].append(place)
            self.before[place] = [*queues[communicator]]
            queues[communicator] += found

    def _members(self, communicator: Any) -> tuple[int, ...]:
        return tuple(communicator[1:]) if communicator[0] == "pair" else communicator

    def _needed(self, transfer: Any) -> int:
        return len(transfer[0]) if transfer[1] == "all" else 2

    def after(self, state: State) -> list[State]:
        """Every state that one step leads to."""
        found = []
        for rank, at in enumerate(state.at):
            if at < len(self.programs[rank]):
                found += self._step(state, rank, at)
        for transfer, places in self.ends.items():
            if transfer in state.done or len(places) < self._needed(transfer):
                continue
            issued = all(state.at[rank] > number for rank, number in places)
            if issued and all(set(self.before[place]) <= state.done for place in places):
                found.append(State(state.at, state.come, state.done | {transfer}))
        return found

    def _step(self, state: State, rank: int, at: int) -> list[State]:
        step = self.programs[rank][at]
        on = State((*state.at[:rank], at + 1, *state.at[rank + 1 :]), state.come, state.done)
        if step[0] == "wait":
            return [on] if set(self.by_name[rank, step[1]]) <= state.done else []
        communicator = self.entries[rank, at][0]
        if communicator in self.made:
            return [on]
        if (communicator, rank) not in state.come:
            come = state.come | {(communicator, rank)}
            return [State(state.at, come, state.done)]
        there = all((communicator, other) in state.come for other in self._members(communicator))
        return [on] if there else []

    def ends_of(self, most: int) -> set[bool]:
        """Whether the program ends, for each way in which it can: {True}, {False} or both."""
        first = State((0,) * len(self.programs), frozenset(), frozenset())
        seen, todo, found = {first}, [first], set()
        while todo:
            state = todo.pop()
            following = self.after(state)
            if not following:
                lengths = tuple(map(len, self.programs))
                found.add(state.at == lengths)
            for each in following:
                if each not in seen:
                    seen.add(each)
                    todo.append(each)
            assert len(seen) < most, "too many states"
        self.visited = len(seen)
        return found
