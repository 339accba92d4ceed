# for: 3.16
"""Written differently: a table says who follows whom; reductions wait in a queue."""

from __future__ import annotations

from collections import deque

import torch

from solutions.phase3_multi_node.fsdp import FSDP


class PrefetchFSDP(FSDP):
    def __init__(self, module, units=(), **options):
        super().__init__(module, units, **options)
        root = self.units[0]
        self.root, self.previous, self.backwards = root, root, {}
        self.follower = dict(zip(self.units, [*self.units[1:], None], strict=True))
        self.guess = self.units[-1]  # that runs last
        self.ahead, self.begun = None, set()
        self.pending = deque()

    def before_forward(self, unit):
        if unit is self.root:
            self._clear()
            self.seen, self.backwards = {}, {}
        else:
            self.seen[self.previous] = unit
            self.backwards[unit] = self.previous
        self.previous = unit
        self.seen.setdefault(unit, None)
        unit.gather()
        self._issue(unit, self.follower.get(unit))

    def after_forward(self, unit):
        stays = torch.is_grad_enabled() and unit in (self.root, self.guess)
        if not stays:
            unit.free()
        if unit is self.root:
            for other in self.units:
                kept = (self.root, self.previous) if self.previous is self.guess else (self.root,)
                if not (torch.is_grad_enabled() and other in kept):
                    other.free()
            self.ahead = None
            self.follower, self.guess = self.seen, self.previous

    def before_backward(self, unit):
        unit.gather()
        self.begun.add(unit)
        following = self.backwards.get(unit)
        if following not in self.begun:
            self._issue(unit, following)

    def _issue(self, unit, following):
        if self.ahead not in (None, unit, following, self.root):
            self.ahead.free()  # it did not come
        self.ahead = following
        if following is not None:
            following.start_gather()

    def after_backward(self, unit):
        unit.free()
        self._drain()
        unit.start_reduce()
        self.pending.append(unit)

    def end_backward(self):
        for unit in reversed(self.units):
            self.after_backward(unit)
        self._drain()

    def _drain(self):
        while self.pending:
            self.pending.popleft().finish_reduce()

    def _clear(self):
        self.pending.clear()
        self.ahead, self.begun = None, set()
        for unit in self.units:
            unit.reset()
