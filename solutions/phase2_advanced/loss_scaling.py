"""Dynamic loss scaling: gradients of float16 that neither vanish nor overflow.

The smallest positive number of float16 is 2^-24. A gradient below half of it becomes 0, and no
later multiplication brings it back. So the loss is multiplied by a scale s before backward. Every
gradient is then s times as large, because the chain rule is linear. It is divided by s in float32
before the optimizer sees it:

    loss · s  ──backward──▶  s·g (16 bits)  ──sum in float32──▶  Σ s·g  ──unscale──▶  Σ g

The right s changes during training, so it is found by trial. When a gradient overflows, the step is
skipped and s is halved. After many steps without overflow s is doubled. bfloat16 has the exponents
of float32 and needs none of this.

Communication per step and rank, beside that of exercise 2.5: one all-reduce of a single number. By
it all ranks learn of an overflow on any of them. Invariant: the scale is equal on all ranks, and
either all ranks step or none does.
Source: Micikevicius et al. 2018 (arXiv 1710.03740), section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from given.agreement import Group, device_in

from .gradient_accumulation import MicroBatch, accumulate_and_reduce, clip_by_global_norm
from .mixed_precision import MixedPrecision


class LossScaler:
    """A loss scale that follows the gradients: down at an overflow, up after a quiet while.

    Per step: multiply the loss by ``scale``, backward, ``unscale`` once, step unless there was an
    overflow, ``update``. ``scale`` (a float) is the same on all ranks of the group at all times.

    After an overflow (a gradient is infinite or NaN on any rank) ``update`` multiplies the scale by
    ``backoff_factor``, but not below ``minimum``. With ``hysteresis`` h it does so only at the h-th
    overflow in a row, and at those that follow in the same row. After ``growth_interval`` steps in
    a row without overflow it multiplies the scale by ``growth_factor``, unless float32 can't hold
    the result. After an overflow, and at the end of such an interval, it counts the steps anew.
    """

    def __init__(
        self,
        *,
        scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        minimum: float = 1.0,
    ) -> None:
        """Raises ValueError for settings that could not work, NaN among them.

        Allowed are: ``growth_factor`` > 1, 0 < ``backoff_factor`` < 1, ``growth_interval`` and
        ``hysteresis`` at least 1, 0 < ``minimum`` ≤ ``scale`` < ∞.
        """
        # --- exercise 2.6: start
        # Step 1: refuse bad settings
        # Step 2: keep what changes: the scale, the quiet steps and the overflows in a row
        if not growth_factor > 1:
            raise ValueError(f"growth_factor must be above 1, got {growth_factor}")
        if not 0 < backoff_factor < 1:
            raise ValueError(f"backoff_factor must be between 0 and 1, got {backoff_factor}")
        if growth_interval < 1 or hysteresis < 1:
            raise ValueError(
                "growth_interval and hysteresis must be at least 1, "
                f"got {growth_interval} and {hysteresis}"
            )
        if not 0 < minimum <= scale < math.inf:
            raise ValueError(f"0 < minimum <= scale < inf must hold, got {minimum} and {scale}")
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.minimum, self.scale = minimum, scale
        self.quiet_steps = self.overflows = 0
        self.finite: bool | None = None  # of the step between unscale and update
        # --- exercise 2.6: end

    def unscale(self, parameters: Iterable[nn.Parameter], group: Group = None) -> bool:
        """Divide every gradient by ``scale``, in place; True if all are finite on all ranks.

        "All ranks" are those of ``group``. Ranks may hold different gradients (shards), or none; a
        rank may have no parameters. Every ``p.grad`` remains the same tensor, of its own dtype. One
        all-reduce of a single number. The host waits for a GPU once, to read that number. The
        gradient of a parameter that is listed twice is divided once. Raises ValueError, before
        anything is changed or sent, at a second call for the same step: ``update`` ends a step.
        """
        # --- exercise 2.6: start
        # Step 3: refuse to divide twice
        # Step 4: the least and the largest element (aminmax) show any that is infinite or NaN;
        #         then divide
        # Step 5: all ranks decide together what happens next, also a rank without gradients.
        #         NCCL reduces GPU tensors only, so `device_in` says where the number must be
        if self.finite is not None:
            raise ValueError("unscale was called twice for one step: update() ends a step")
        parameters = list(dict.fromkeys(parameters))
        gradients = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
        overflow = torch.zeros((), device=parameters[0].device if parameters else None)
        if gradients:
            extremes = torch.stack([value for g in gradients for value in torch.aminmax(g)])
            overflow += ~extremes.isfinite().all()
            torch._foreach_div_(gradients, self.scale)
        overflow = overflow.to(device_in(group))
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=group)
        self.finite = not overflow.item()
        return self.finite
        # --- exercise 2.6: end

    def update(self) -> None:
        """End the step: adapt the scale to the result of ``unscale``. Sends nothing.

        Raises ValueError, and changes nothing, if there was no ``unscale`` in this step.
        """
        # --- exercise 2.6: start
        # Step 6: an overflow sets the quiet steps to 0, a quiet step sets the overflows to 0
        # Step 7: when the scale grows, the quiet steps are counted anew
        if self.finite is None:
            raise ValueError("update() needs the unscale() of the same step before it")
        if self.finite:
            self.quiet_steps, self.overflows = self.quiet_steps + 1, 0
        else:
            self.quiet_steps, self.overflows = 0, self.overflows + 1
        if self.overflows >= self.hysteresis:
            self.scale = max(self.scale * self.backoff_factor, self.minimum)
        if self.quiet_steps >= self.growth_interval:
            self.quiet_steps = 0
            if self.scale * self.growth_factor <= torch.finfo(torch.float32).max:
                self.scale *= self.growth_factor
        self.finite = None
        # --- exercise 2.6: end

    def state_dict(self) -> dict[str, float | int]:
        """Plain numbers (JSON can hold them) from which another scaler goes on, between steps."""
        # --- exercise 2.6: start
        # Step 8: the scale alone does not tell at which step it grows next
        return {
            "scale": self.scale,
            "quiet_steps": self.quiet_steps,
            "overflows": self.overflows,
        }
        # --- exercise 2.6: end

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Go on from where ``state_dict`` was taken; the settings remain this scaler's own.

        If the quiet steps so far reach this scaler's interval, the scale grows at the next one.
        """
        # --- exercise 2.6: start
        # Step 9: restore all that state_dict holds
        self.scale = float(state["scale"])
        self.quiet_steps, self.overflows = int(state["quiet_steps"]), int(state["overflows"])
        # --- exercise 2.6: end


def scaled_step(
    model: MixedPrecision,
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    window: Sequence[MicroBatch],
    *,
    max_norm: float | None = None,
    group: Group = None,
) -> tuple[float, float, bool]:
    """``mixed_step`` with a dynamic loss scale: for float16.

    As in ``mixed_step``, a frozen parameter does not move, even if it has an old gradient. The loss
    is multiplied by ``scaler.scale`` before backward. Returns (global mean loss, norm of the true
    gradient before clipping, whether the optimizer stepped), the same on every rank of ``group``:
    two floats and a bool. After an overflow on any rank of the group no rank steps: masters,
    weights and optimizer state stay as they are, and the norm is infinite or NaN.
    ``scaler.update`` ends every step, taken or not.

    Without any target on any rank nothing happens: the scale does not change either, and the result
    is (0.0, 0.0, False). Communication: that of ``mixed_step`` and that of ``unscale``. Raises
    ValueError, before anything is sent or changed, if ``max_norm`` is not positive or is NaN.
    """
    # --- exercise 2.6: start
    # Step 10: the scale must be in the loss before backward: a gradient that has become 0 in 16
    #          bits can't be scaled up afterwards
    # Step 11: reduce, unscale, clip, then step on all ranks or on none; update in both cases
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")
    loss, total = accumulate_and_reduce(model, window, loss_scale=scaler.scale, group=group)
    if not total:
        return 0.0, 0.0, False
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in model.parameters():
        p.grad = p.grad if p.requires_grad else None  # a frozen one's old gradient
    finite = scaler.unscale(trainable, group)
    norm = clip_by_global_norm(trainable, math.inf if max_norm is None else max_norm)
    if finite:
        optimizer.step()
        model.write_back()
    scaler.update()
    return loss, norm, finite
    # --- exercise 2.6: end
