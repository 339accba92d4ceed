"""Batch norm over all ranks: mean and variance are those of the whole group's rows.

A batch norm subtracts the mean of a channel and divides by its standard deviation, over all rows of
the batch. On W ranks each layer sees its own rows only, so W ranks with b rows are not one process
with W·b rows. With the sums of all ranks they are. Per channel, over the n values of the group:

    x̂ = (x - mean) / √(var + eps)        y = weight·x̂ + bias
    dx = weight / √(var + eps) · (dy - Σ dy / n - x̂ · Σ dy·x̂ / n)

The first line needs Σ x, Σ x² and n, the second one Σ dy and Σ dy·x̂. For C channels each training
step sends, per layer:

    forward    one all-reduce of 8·(2C + 1) bytes      backward    one all-reduce of 4·2C bytes

Σ x² / n - mean² is a small difference of large numbers if the mean is far from zero. So the sums
travel in float64, and a rank computes its own part around its own mean. The mean of the ranks'
means would be wrong where ranks have different numbers of rows.

Invariant: all ranks have the same statistics, and so the same running statistics. Outputs and
gradients are those of one process that has the rows of all ranks.
Sources: Ioffe & Szegedy 2015 (arXiv 1502.03167), section 3 (algorithm 1 and the gradients). Chan,
Golub & LeVeque 1983 (The American Statistician 37:3), section 2 (the variance of joined parts).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from given.agreement import Group, rank_in


def dims_of(x: Tensor) -> list[int]:
    """The dimensions that a channel's values are in: all but 1."""
    return [d for d in range(x.dim()) if d != 1]


def along(values_C: Tensor, x: Tensor) -> Tensor:
    """A view of ``values_C`` whose channels are in dimension 1, as in ``x``."""
    return values_C.view(-1, *[1] * (x.dim() - 2))


def accurate(x: Tensor) -> torch.dtype:
    """The dtype to compute with: that of ``x``, but at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


@torch.no_grad()
def group_moments(x: Tensor, group: Group = None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (C,), biased variance (C,) and number n () of each channel's values on all ranks.

    Float64, equal on all ranks. ``x`` (rows, C, …) may have any number of rows on each rank, also
    none; if no rank has a row, all three are zero. In float32 and 16 bits the variance keeps four
    digits if the mean is 10⁴ times the standard deviation. One all-reduce of 8·(2C + 1) bytes.
    """
    # --- exercise 2.28: start
    # Step 1: this rank's sum, and the squares around a number close to its mean; without rows zeros
    # Step 2: in float64: the sum, the sum of squares around zero, the number; then add up the ranks
    # Step 3: mean and variance; where nobody has a row, divide by one
    values = x[:, 0].numel()
    total_C = x.sum(dims_of(x), dtype=torch.float64)
    near_C = (total_C / max(values, 1)).to(accurate(x))
    apart_C = (x - along(near_C, x)).square().sum(dims_of(x)).double()
    near_C = near_C.double()
    square_C = apart_C + near_C * (2 * total_C - values * near_C)
    sums = torch.cat([total_C, square_C, total_C.new_full((1,), values)])
    dist.all_reduce(sums, group=group)
    n = sums[-1]
    mean_C, square_C = (sums[:-1] / n.clamp_min(1)).chunk(2)
    return mean_C, (square_C - mean_C.square()).clamp_min(0), n
    # --- exercise 2.28: end


class Normalize(torch.autograd.Function):
    """y = weight·x̂ + bias, with a gradient that also goes through mean and variance."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_C: Tensor | None,
        bias_C: Tensor | None,
        moments: tuple[Tensor, Tensor, Tensor],
        eps: float,
        group: Group,
    ) -> Tensor:
        """The output, in the dtype and layout of ``x``. Saves ``x`` itself and C numbers each."""
        # --- exercise 2.28: start
        # Step 4: the inverse of the standard deviation; save what backward needs, and not x̂
        # Step 5: compute in float32 or wider, round once
        mean_C, var_C, n = moments
        mean_C, inverse_C = mean_C.to(accurate(x)), (var_C + eps).rsqrt().to(accurate(x))
        ctx.save_for_backward(x, weight_C, mean_C, inverse_C, n)
        ctx.group = group
        y = (x - along(mean_C, x)) * along(inverse_C, x)
        if weight_C is not None:
            y = y * along(weight_C, x)
        if bias_C is not None:
            y = y + along(bias_C, x)
        return y.to(x.dtype)
        # --- exercise 2.28: end

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of ``x``, weight and bias; a message only if ``x`` needs a gradient."""
        # --- exercise 2.28: start
        # Step 6: x̂ again, and this rank's sums: they are the gradients of bias and weight
        # Step 7: for x the sums are over the group, divided by n. Keep the rank's own ones
        x, weight_C, mean_C, inverse_C, n = ctx.saved_tensors
        normal = (x - along(mean_C, x)) * along(inverse_C, x)
        own_C = grad.sum(dims_of(x), dtype=accurate(x)), (grad * normal).sum(dims_of(x))
        grad_x = None
        if ctx.needs_input_grad[0]:
            means_2C = torch.stack(own_C) / n.to(inverse_C.dtype)
            dist.all_reduce(means_2C, group=ctx.group)
            scale_C = inverse_C if weight_C is None else inverse_C * weight_C
            straight, turned = (along(mean_C, x) for mean_C in means_2C)
            grad_x = ((grad - straight - normal * turned) * along(scale_C, x)).to(x.dtype)
        grads = own_C[1], own_C[0]
        needed = [g if ctx.needs_input_grad[k] else None for k, g in enumerate(grads, 1)]
        return grad_x, *needed, None, None, None
        # --- exercise 2.28: end


class SyncBatchNorm(_BatchNorm):
    """A batch norm for inputs (rows, C, …) whose statistics in training are over ``group``.

    ``options`` are those of ``nn.BatchNorm1d``, and so are the names and values of parameters and
    buffers. Raises ValueError if this process is not in ``group``. All ranks of ``group`` call it
    together. ``x`` needs a gradient on all ranks or on none.
    """

    def __init__(self, num_features: int, *, group: Group = None, **options: Any) -> None:
        rank_in(group)
        super().__init__(num_features, **options)
        self.group = group

    def _check_input_dim(self, input: Tensor) -> None:
        """Raises ValueError unless ``input`` is (rows, C, …) and has a floating-point dtype."""
        # --- exercise 2.28: start
        shape = tuple(input.shape)
        if len(shape) < 2 or shape[1] != self.num_features or not input.is_floating_point():
            raise ValueError(f"{input.dtype} {shape} is not (rows, {self.num_features}, …)")
        # --- exercise 2.28: end

    def forward(self, x: Tensor) -> Tensor:
        """The normalised ``x``, in its dtype and its layout in memory (channels-last, for example).

        In training outputs and gradients equal those of one process that has the rows of all ranks,
        and whose loss is the sum of the ranks' losses. Ranks may have different numbers of rows,
        also none. The gradients of weight and bias are this rank's part of that sum. Inputs in 16
        bits are normalised in float32, and rounded once. For backward it keeps ``x`` and a few
        numbers per channel.

        Forward sends what ``group_moments`` sends. Backward sends one all-reduce of 2·C numbers
        in float32, or in float64 for such an ``x``, and nothing if ``x`` needs no gradient. A rank
        without rows takes part in both. The host never waits for the device. A second derivative
        raises RuntimeError.

        In eval mode it sends nothing and computes what ``nn.BatchNorm1d`` computes: with running
        statistics, or with this rank's own rows if there are none. ValueError, before anything is
        sent, unless ``x`` is (rows, C, …) and has a floating-point dtype.
        """
        # --- exercise 2.28: start
        # Step 8: refuse, leave eval to the layer of one process, then moments, tracking, output
        self._check_input_dim(x)
        if not self.training:
            return super().forward(x)
        moments = group_moments(x, self.group)
        if self.track_running_stats:
            self.track(*moments)
        y: Tensor = Normalize.apply(x, self.weight, self.bias, moments, self.eps, self.group)
        return y
        # --- exercise 2.28: end

    @torch.no_grad()
    def track(self, mean_C: Tensor, var_C: Tensor, n: Tensor) -> None:
        """Move the running statistics towards a batch of ``n`` values per channel. Sends nothing.

        They move by the share ``momentum`` of the difference. With ``momentum`` None they are the
        average of all batches so far. The running variance takes the unbiased one: n / (n - 1)
        times ``var_C``. ``num_batches_tracked`` counts the batch. A batch of fewer than two values
        per channel changes none of the three.
        """
        # --- exercise 2.28: start
        # Step 9: whether the batch counts is known to the device alone: choose there. A share of
        #         zero is not enough, because zero times infinity is NaN
        counts = n > 1
        self.num_batches_tracked += counts
        share: Any = self.momentum
        if share is None:
            share = 1 / self.num_batches_tracked.double()
        unbiased_C = var_C * n / (n - 1)
        for running_C, of_batch_C in ((self.running_mean, mean_C), (self.running_var, unbiased_C)):
            moved_C = running_C + share * (of_batch_C - running_C)
            running_C.copy_(moved_C.where(counts, running_C))
        # --- exercise 2.28: end


def convert_batch_norms(module: nn.Module, group: Group = None) -> nn.Module:
    """``module`` with a ``SyncBatchNorm`` over ``group`` in the place of every batch norm.

    A batch norm is ``nn.BatchNorm1d``, 2d, 3d, ``nn.SyncBatchNorm`` or a subclass. A new layer has
    the same parameters and buffers as the old one: the tensors themselves, so an optimizer that was
    made before stays right. It has its settings and its mode, too. A layer that is in several
    places is converted to one layer. All other layers stay, also those that are a SyncBatchNorm of
    this file already. If ``module`` itself is a batch norm, the new layer comes back, else
    ``module``. Sends nothing. Raises ValueError if this process is not in ``group``.
    """
    # --- exercise 2.28: start
    # Step 10: a new layer without parameters and buffers of its own gets those of the old one
    # Step 11: go through the places, not through the layers: a layer may have several
    rank_in(group)
    made: dict[nn.Module, SyncBatchNorm] = {}

    def converted(old: Any) -> Any:
        if not isinstance(old, _BatchNorm) or isinstance(old, SyncBatchNorm):
            return old
        if old not in made:
            bare: dict[str, Any] = {"affine": False, "track_running_stats": False}
            new = SyncBatchNorm(
                old.num_features, group=group, eps=old.eps, momentum=old.momentum, **bare
            )
            new.affine, new.track_running_stats = old.affine, old.track_running_stats
            new._parameters.update(old._parameters)
            new._buffers.update(old._buffers)
            made[old] = new.train(old.training)
        return made[old]

    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            parent._modules[name] = converted(child)
    result: nn.Module = converted(module)
    return result
    # --- exercise 2.28: end
