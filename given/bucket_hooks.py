"""The parts of a bucket's reduction: the bucket that a hook gets, and the handle that it returns.

    hook(bucket) -> handle        begins to sum ``bucket.buffer`` over the ranks
    handle.wait()                 the sum has arrived

Exercise 3.9 writes buckets, exercises 3.12 and 4.6 to 4.9 write hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn


class Bucket(Protocol):
    """The gradients of some parameters of one dtype and device, side by side in one flat buffer.

    ``index``: its position in the order in which buckets leave. ``buffer`` (n,), n = Σ numel, of
    the parameters' dtype. ``views[k]``: the part of ``parameters[k]``, in its shape.
    """

    index: int
    parameters: list[nn.Parameter]
    buffer: Tensor
    views: list[Tensor]


class Handle(Protocol):
    """A reduction on its way: ``wait()`` returns when it has arrived. ``dist.Work`` is one."""

    def wait(self) -> object:
        """Block until it is complete (on a GPU: let the current stream wait for it)."""


Hook = Callable[[Bucket], "Handle | None"]  # None: complete already


@dataclass(frozen=True)
class Then:
    """A handle for work in two steps: once ``first`` has arrived, ``after()``."""

    first: Handle
    after: Callable[[], object]

    def wait(self) -> None:
        """Wait for the first step and take the second."""
        self.first.wait()
        self.after()
