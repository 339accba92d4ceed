"""ZeRO-2: a rank keeps only the gradients of the elements that it steps.

A rank that has optimizer state for one W-th of the elements needs only their gradients. So the
first half of the all-reduce is enough, and the optimizer gathers *parameters* in its second half:

    reduce-scatter in backward, free the rest | step own shard | all-gather parameters

Memory per rank in fp32 with Adam, for Ψ parameters on W ranks: 4Ψ + 12Ψ/W bytes. In backward there
are three buckets more: two on their way, and one that is being joined. For P bytes of parameters a
rank sends (W-1)/W·P bytes in backward and (W-1)/W·P in ``step``, together as many as data
parallelism. Messages: one per bucket and kind, and one of a byte per parameter tensor.
Invariant: all ranks send the same vectors in the same order in every backward, whichever parameters
they have used.

Source: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), sections 5.2 and 7.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.hooks import weakly

from .zero import FlatVector, ZeroOptimizer


class Zero2Optimizer(ZeroOptimizer):
    """ZeRO-2: ZeroOptimizer, with all its promises, that keeps only its part of the gradients.

    Use no other data parallelism: ``backward()`` itself adds the mean over the ranks of ``group``
    to the owners' pieces, and every parameter's ``grad`` is None again. Parameters must come
    without a gradient. Every rank must run backward equally often, each time with a gradient of one
    parameter at least. A parameter without gradient on all ranks has none, also where backward
    leaves it undefined (a function returned None). Where only some ranks have a gradient, the
    others count as zero. Clip with ``clip_by_global_norm``.

    Backward sends (W-1)/W·P bytes per rank, a message of at most ``bucket_bytes`` for each bucket
    or parameter. At the end it sends one byte per parameter. A bucket leaves when its last gradient
    has come, and its gradients are freed then. Backward goes on while it travels. At most two
    buckets are on their way. In a backward the host waits for a GPU twice at most, at the end.

    A parameter that is given to a second Zero2Optimizer belongs to the second one alone from then
    on.

    Raises as ZeroOptimizer does; RuntimeError if a gradient is complete twice in one backward. If a
    backward raised, call ``zero_grad`` on that rank. It ends the other ranks' backward, with NaN in
    the buckets that had not left. The next step begins as usual.
    """

    running = False  # a backward is under way

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard one more group, and reduce its gradients from the next backward on."""
        before = len(self.vectors)
        super().add_param_group(param_group)
        for vector in self.vectors[before:]:
            for p in vector.parameters:
                ready = functools.partial(weakly(self._ready), vector)
                if hasattr(p, "_zero2_hook"):
                    p._zero2_hook.remove()  # another optimizer's
                p._zero2_hook = p.register_post_accumulate_grad_hook(ready)

    def _ready(self, vector: FlatVector, p: nn.Parameter) -> None:
        """``p.grad``, of ``vector``, is complete on this rank."""
        # --- exercise 3.14: start
        # Step 1: the first gradient of a backward registers ``_finish`` for the end of backward
        # Step 2: vectors leave in the same order on all ranks, each when all its gradients have
        #         come
        if not self.running:
            self.running = True
            self.arrived: set[nn.Parameter] = set()
            self.left: list[FlatVector] = []
            self.reducing: list[tuple[FlatVector, dist.Work, Tensor, Tensor]] = []
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if p.grad is None:  # undefined: torch calls this all the same
            return
        if p in self.arrived:
            raise RuntimeError(f"a gradient of shape {tuple(p.shape)} was complete twice")
        self.arrived.add(p)
        while len(self.left) < len(self.vectors):
            vector = self.vectors[len(self.left)]
            if not self.arrived.issuperset(vector.parameters):
                break
            self._leave(vector)
        # --- exercise 3.14: end

    def _leave(self, vector: FlatVector) -> None:
        """Issue the reduce-scatter of the vector's gradients, (W-1)·shard elements sent."""
        # --- exercise 3.14: start
        # Step 3: at most two are on their way: a vector that has left takes memory until it arrives
        # Step 4: join in the order of `flat`, zeros where there is no gradient; forget the
        #         originals
        if len(self.reducing) > 1:
            self._arrive()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in vector.parameters]
        numel = sum(g.numel() for g in grads)
        padding = grads[0].new_zeros(len(vector.flat) - numel)
        joined = torch.cat([*(g.flatten() for g in grads), padding])
        for p in vector.parameters:
            p.grad = None
        chunk = torch.empty_like(vector.own)
        work = dist.reduce_scatter_tensor(chunk, joined, group=self.group, async_op=True)
        self.left.append(vector)
        self.reducing.append((vector, work, chunk, joined))
        # --- exercise 3.14: end

    def _arrive(self) -> None:
        """Wait for the oldest reduce-scatter, and add the mean to the vector's ``gradient``."""
        # --- exercise 3.14: start
        # Step 5: divide the sum by the number of ranks; add it to an earlier backward's mean
        vector, work, chunk, _ = self.reducing.pop(0)
        work.wait()
        chunk.div_(dist.get_world_size(self.group))
        if vector.gradient is None:
            vector.gradient = chunk
        else:
            vector.gradient += chunk
        # --- exercise 3.14: end

    def _finish(self) -> None:
        """Backward is done: the other vectors leave, and the pieces get their gradients."""
        # --- exercise 3.14: start
        # Step 6: every rank sends every vector, whichever parameters it has used
        # Step 7: a maximum over the ranks tells which parameters any rank has used
        # Step 8: in the order of `flat`, the pieces fill the shard from its beginning
        self.running = False
        for vector in self.vectors[len(self.left) :]:
            self._leave(vector)
        parameters = [p for vector in self.vectors for p in vector.parameters]
        flags = [p in self.arrived for p in parameters]
        used = torch.tensor(flags, dtype=torch.uint8, device=parameters[0].device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self.group)
        while self.reducing:
            self._arrive()
        anyone = {p for p, flag in zip(parameters, used.tolist(), strict=True) if flag}
        for vector in self.vectors:
            assert vector.gradient is not None
            offset = 0
            for piece in vector.pieces:
                size = piece.stop - piece.start
                if piece.whole in anyone:
                    piece.part.grad = vector.gradient[offset : offset + size]
                offset += size
        # --- exercise 3.14: end

    def give_gradients(self) -> None:
        """Nothing is to do: backward has given them."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let the gradients' memory go; ``set_to_none=False`` does the same here.

        After a backward that raised it first sends the messages for which the other ranks wait,
        with NaN in every bucket that had not left.
        """
        # --- exercise 3.14: start
        # Step 9: a backward that raised is still under way: let its other vectors leave
        # Step 10: parts are views: drop both references
        if self.running:
            for vector in self.vectors[len(self.left) :]:
                for p in vector.parameters:
                    p.grad = torch.full_like(p, float("nan"))
            self._finish()
        for vector in self.vectors:
            vector.gradient = None
        for piece in self.pieces:
            piece.part.grad = None
        # --- exercise 3.14: end

    @torch.no_grad()
    def clip_by_global_norm(self, max_norm: float) -> float:
        """Scale the parts by one factor: the whole gradient's 2-norm becomes at most ``max_norm``.

        Returns the norm before, the same on every rank. Gradients within the limit are not touched,
        and a norm that is not finite changes nothing. The sum of squares is taken in float64, so
        float16 does not overflow. One all-reduce of 8 bytes. The host waits for a GPU once, to read
        the norm. Raises ValueError on every rank, before the message, if ``max_norm`` is not
        positive (NaN is not).
        """
        # --- exercise 3.14: start
        # Step 11: sum the squares of the own elements, then over the ranks, then take the root
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}")
        own = [piece.part.grad for piece in self.pieces if piece.part.grad is not None]
        squares = self.vectors[0].own.new_zeros((), dtype=torch.float64)
        for gradient in own:
            squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
        dist.all_reduce(squares, group=self.group)
        norm = float(squares.sqrt())
        if max_norm < norm < float("inf"):
            for gradient in own:
                gradient.mul_(max_norm / norm)
        return norm
        # --- exercise 3.14: end
