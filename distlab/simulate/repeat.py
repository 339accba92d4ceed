"""Equal micro-batches are run twice by a stage of a pipeline; then what they did is done again.

The first backward makes the gradients, and each later one adds to them. So the second micro-batch
of a stage does what all later ones do. Its journal (``virtual/journal.py``) has the kernels,
collectives and memory of its forward and of its backward, in their order.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from ..observe.failure import CheckFailed
from ..virtual.internals import at_end_of_backward
from ..virtual.isolation import entered
from ..virtual.journal import Journal

NOT_REPEATABLE = "not-repeatable"


class Repeated(nn.Module):
    """``stage``, whose forward and backward run for the first two inputs."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage, self.calls = stage, 0
        self.anchor = next(p for p in stage.parameters() if p.requires_grad)
        self.journals: list[Journal] = []

    def forward(self, x: Tensor) -> Any:
        """The stage's output; from the third time on a tensor of its shape."""
        self.calls += 1
        if self.calls > 2:
            return _Again.apply(self, x, self.anchor)
        return self.stage(x) if self.calls == 1 else self._recorded(x)

    def _recorded(self, x: Tensor) -> Tensor:
        mine = entered().mine
        alive: dict[int, int] = {}
        journal = Journal(alive)
        mine.model.write(journal)
        output: Tensor = self.stage(x)
        mine.model.write(None)
        journal.outlives(output)
        self.journals.append(journal)

        def begin(gradient: Tensor) -> None:
            mine.model.write(Journal(alive, gradient.untyped_storage()._cdata))
            at_end_of_backward(end)

        def end() -> None:
            journal = mine.journal
            mine.model.write(None)
            if x.grad is not None:
                journal.outlives(x.grad)
            journal.usable &= not alive
            self.journals.append(journal)

        output.register_hook(begin)
        return output

    def again(self, number: int, given: Tensor | None = None) -> Tensor | None:
        """Do the forward (0) or the backward (1) again."""
        if number >= len(self.journals) or not self.journals[number].usable:
            raise CheckFailed(
                "a stage does something that cannot be done again", cause=NOT_REPEATABLE
            )
        return self.journals[number].again(entered(), entered().mine, given)


class _Again(Function):
    @staticmethod
    def forward(ctx: Any, repeated: Repeated, x: Tensor, anchor: Tensor) -> Any:
        """``anchor``: a parameter, so that the output requires a gradient."""
        ctx.repeated = repeated
        return repeated.again(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of parameters are there."""
        return None, ctx.repeated.again(1, gradient), None


def repeat(pipeline: Any) -> None:
    """Run each stage of ``pipeline`` on this rank for two micro-batches only.

    Not where a stage's first two backwards are of other micro-batches than its first two forwards.
    """
    for stage, module in pipeline.chunks.items():
        order = [
            [s.micro_batch for s in pipeline.steps if (s.kind, s.stage) == (kind, stage)][:2]
            for kind in "FB"
        ]
        if order[0] == order[1]:
            pipeline.chunks[stage] = Repeated(module)
