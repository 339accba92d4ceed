# Exercises 4.8: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase4.py 4.8
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""PowerSGD: a gradient matrix travels as two thin ones.

The mean gradient M (m × n) of a layer is close to a matrix of low rank. With rank r, M ≈ P·Qᵀ with
P (m × r) and Q (n × r). One step of power iteration finds them, and begins where the last one
ended:

    M_r ← g_r + E_r           each rank: gradient (divided by W) and residual
    P   ← Σ_r M_r·Q           all-reduce of m·r numbers
    P   ← orthonormal(P)      every rank the same
    Q   ← Σ_r M_rᵀ·P          all-reduce of n·r numbers, kept for the next step (warm start)
    M   ≈ P·Qᵀ                bucket
    E_r ← M_r - P·Qᵀ/W        error feedback: summed over the ranks, what is still owed

Both products are linear: Σ_r M_r·Q is (Σ_r M_r)·Q. So compressed messages add up in an all-reduce,
and the result is that of a single process with the mean gradient.

Bytes per rank: 2(W-1)/W·b·(Σ r(m + n) over the matrices + Σ of everything else), b per number, in
two all-reduces per bucket. Biases and other parameters of one dimension are sent as they are.
Invariants: as in ``gradient_compression``; Q is the same on all ranks.
Source: Vogels, Karimireddy & Jaggi 2019 (arXiv 1905.13727), algorithms 1 and 2, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group
from given.bucket_hooks import Bucket, Handle, Then

from .template_gradient_compression import PerParameter, State

SEED = 1905  # of the first Q, the same on all ranks
Matrix = tuple[Tensor, Tensor, Tensor]  # M (m, n), its part of the bucket (m, n), Q (n, r)
Rest = tuple[Tensor, Tensor]  # the new values (numel,), their part of the bucket (numel,)


def matrix_shape(p: Tensor) -> tuple[int, int]:
    """(m, n) of ``p`` as a matrix that lies in memory as ``p`` does: outermost dimension × rest.

    (numel, 1) for fewer than two dimensions.
    """
    if p.dim() < 2 or not p.numel():
        return p.numel(), 1
    rows = p.shape[max(range(p.dim()), key=p.stride)]
    return rows, p.numel() // rows


class PowerSGD:
    """A hook that sends matrices as products of rank ``rank``, and all else as it is.

    ``parameters``: those of the model, on the device where they will stay, as for an optimizer. A
    parameter of two or more dimensions is the matrix (m, n) of ``matrix_shape``. It is compressed
    with r = min(rank, m, n), if that is worth it: r(m + n) < m·n. M_r is a rank's gradient and
    residual. P becomes the orthonormal columns of Σ M_r·Q, then Q = Σ M_rᵀ·P, and the buffer gets
    P·Qᵀ. The residual becomes M_r - P·Qᵀ/W. The next step begins with this Q. The first step begins
    with random numbers, the same on all ranks. All else is summed exactly, and leaves no residual.

    Cost: 2(W-1)/W·itemsize·(Σ r(m + n) of the matrices + Σ of all else) bytes per bucket, in two
    messages, or in one where nothing is compressed. Memory: one copy of the gradients and the Qs. W
    counts the ranks of ``group``, and no other rank takes part. Raises ValueError if ``rank`` is
    not positive.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], rank: int = 2, group: Group = None
    ) -> None:
        if rank < 1:
            raise ValueError(f"the rank of the approximation must be positive, got {rank}")
        self.rank, self.group = rank, group
        self.residual = PerParameter(parameters)
        self.q = self._first_qs()  # (n, r) of every parameter that is compressed

    def width(self, p: Tensor) -> int:
        """r: the columns of P and Q for ``p``; 0 if it is sent as it is."""
        # Step 1: a matrix can't have more rank than rows or columns. Its two factors must be
        #         smaller than the matrix: those of a vector, (numel, 1), never are
        raise NotImplementedError("exercise 4.8")

    def __call__(self, bucket: Bucket) -> Handle | None:
        """Begin the first all-reduce; ``wait`` does the second and fills the buffer.

        All ranks get the same bits. Several buckets may be under way, and are waited for in the
        order in which they were begun. An empty bucket sends nothing. Global random numbers and
        parameters stay as they are.
        """
        # Step 2: M: add the new gradient to the residual, and split it into matrices and the rest
        # Step 3: P = M·Q of all matrices and, behind them, the rest, side by side in one buffer;
        #         begin to sum it
        # Step 4: then orthonormal columns, and Q = Mᵀ·P, summed; the next step begins with it
        # Step 5: M ≈ P·Qᵀ goes into its part of the bucket, and the rest, too. 1/W of the sent sum
        #         was this rank's share: take it from the residual. Entries that were sent as they
        #         are leave none
        raise NotImplementedError("exercise 4.8")

    def _split(self, bucket: Bucket, residual: Tensor) -> tuple[list[Matrix], list[Rest]]:
        """The compressed matrices and the rest, as views into the residual and the buffer."""
        matrices: list[Matrix] = []
        rest: list[Rest] = []
        sizes = [p.numel() for p in bucket.parameters]
        parts = zip(residual.split(sizes), bucket.buffer.split(sizes), strict=True)
        for p, (part, out) in zip(bucket.parameters, parts, strict=True):
            if self.width(p):
                shape = matrix_shape(p)
                matrices.append((part.view(shape), out.view(shape), self.q[p]))
            else:
                rest.append((part, out))
        return matrices, rest

    def _first_qs(self) -> dict[nn.Parameter, Tensor]:
        """The first step's (n, r) for each parameter that is compressed.

        They are in the order of the parameters, random, and the same on all ranks.
        """
        # Step 6: random numbers from a seed that all ranks share
        raise NotImplementedError("exercise 4.8")

    def state_dict(self) -> State:
        """A copy of the residual, which is the rank's own, and of the Qs, which all ranks share."""
        # Step 7: copies, as in `PerParameter`
        raise NotImplementedError("exercise 4.8")

    def load_state_dict(self, state: State) -> None:
        """Go on from a ``state_dict`` of this rank, to the bit; ``state`` stays as it is.

        Raises ValueError, and changes nothing, if it is of other parameters, or its Qs are of other
        shapes (another ``rank``).
        """
        # Step 8: compare everything first, then write into the existing tensors
        raise NotImplementedError("exercise 4.8")


def check_shapes(saved: Sequence[Tensor], here: Sequence[Tensor]) -> None:
    """ValueError unless the saved Qs have the shapes of the present ones."""
    shapes, wanted = ([tuple(q.shape) for q in qs] for qs in (saved, here))
    if shapes != wanted:
        raise ValueError(f"the saved Qs have shapes {shapes}, the present ones {wanted}")


def side_by_side(
    shapes: Sequence[tuple[int, ...]], sizes: Sequence[int], like: Tensor
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Matrices of these shapes, vectors of these sizes, and the flat buffer that holds them all.

    They are uninitialised, of the dtype and device of ``like``.
    """
    areas = [rows * columns for rows, columns in shapes]
    flat = like.new_empty(sum(areas) + sum(sizes))
    parts = flat.split([*areas, *sizes])
    matrices = [part.view(shape) for part, shape in zip(parts, shapes, strict=False)]
    return matrices, list(parts[len(areas) :]), flat


def orthonormal(p: Tensor) -> Tensor:
    """(m, r) with orthonormal columns whose span holds those of ``p``, of its dtype.

    That holds also if these are dependent, or zeros.
    """
    # Step 9: QR has an answer for a matrix of zeros, too; 16 bits are too few for it
    raise NotImplementedError("exercise 4.8")
