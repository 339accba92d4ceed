"""Wrong implementations of exercise 4.8."""

from distlab.grading.wrong import mutants_of

EXACT, NEXT = "test_a_sum_of_low_rank_is_exact", "test_what_is_left_out_comes_next"
WARM, BYTES = (
    "test_warm_start_finds_the_best_approximation",
    "test_bytes_are_those_of_two_thin_matrices",
)
WHOLE, LAYOUTS = "test_vectors_and_small_matrices_are_exact", "test_layouts_and_zeros"
STATE, GROUP = "test_power_state_goes_on_to_the_bit", "test_power_works_in_a_group"
EDGES, BEGINS = "test_power_empty_and_tiny_buckets", "test_power_hook_begins_and_does_not_wait"
BAD = "test_power_bad_input_is_refused"

MEMORY = "        residual = self.residual.beside(bucket).add_(bucket.buffer)\n"
WORK = "        work = dist.all_reduce(flat, group=self.group, async_op=True)\n"
ORTHONORMAL = "                p.copy_(orthonormal(p))\n"
SECOND = "                dist.all_reduce(flat_q, group=self.group)\n"
OUT = "                torch.mm(p, q.copy_(new_q).T, out=out)\n"
OWED = "            residual.sub_(bucket.buffer, alpha=1 / dist.get_world_size(self.group))\n"
FORGET = "                part.zero_()\n"
WIDTH = "        return r if r * (m + n) < m * n else 0\n"
COPIES = "        qs = [q.clone() for q in self.q.values()]\n"
SAVED = '        return {"residual": self.residual.state_dict(), "q": qs}\n'
LOAD_RESIDUAL = '        self.residual.load_state_dict(state["residual"])\n'
LOAD_Q = """        for q, saved in zip(self.q.values(), state["q"], strict=True):
            q.copy_(saved)
"""
COMPARED = '        check_shapes(state["q"], [*self.q.values()])\n'
QR = "    return torch.linalg.qr(wide).Q.to(p.dtype)\n"

mutant = mutants_of("4.8", "powersgd")

MUTANTS = [
    mutant(
        "no-orthogonalisation",
        "P's columns are not made orthonormal",
        ORTHONORMAL,
        "",
        EXACT,
        "not-orthonormal",
    ),
    mutant(
        "columns-normalised-only",
        "P's columns have length 1 and are not at right angles",
        QR,
        "    return p / p.norm(dim=0).clamp_min(1e-30)\n",
        EXACT,
        "not-orthonormal",
    ),
    mutant(
        "orthogonalised-before-the-sum",
        "every rank makes its own P orthonormal, and the sum is not",
        WORK,
        "        for p in ps:\n            p.copy_(orthonormal(p))\n" + WORK,
        EXACT,
        "wrong",
        (ORTHONORMAL, ""),
    ),
    mutant(
        "q-not-summed",
        "only P is summed: each rank multiplies with its own Q",
        "            if matrices:\n" + SECOND,
        "",
        EXACT,
        "ranks-differ",
    ),
    mutant(
        "unshared-q",
        "every rank begins with a Q of its own",
        "        generator = torch.Generator().manual_seed(SEED)\n",
        "        generator = torch.Generator().manual_seed(SEED + dist.get_rank(self.group))\n",
        EXACT,
        "wrong",
    ),
    mutant(
        "no-error-feedback",
        "what the approximation leaves out is forgotten",
        MEMORY,
        "        residual = self.residual.beside(bucket).copy_(bucket.buffer)\n",
        NEXT,
        "no-error-feedback",
    ),
    mutant(
        "owes-all-that-was-sent",
        "each rank takes the whole sum from its residual, not 1/W of it",
        OWED,
        "            residual.sub_(bucket.buffer)\n",
        NEXT,
        "no-error-feedback",
    ),
    mutant(
        "residual-never-reduced",
        "what was sent stays in the residual",
        OWED,
        "",
        NEXT,
        "no-error-feedback",
    ),
    mutant(
        "no-warm-start",
        "every step begins with a new random Q",
        OUT,
        "                torch.mm(p, new_q.T, out=out)\n"
        "                self.draws = getattr(self, 'draws', 0) + 1\n"
        "                again = torch.Generator().manual_seed(self.draws)\n"
        "                q.copy_(torch.randn(q.shape, generator=again))\n",
        WARM,
        "no-warm-start",
    ),
    mutant(
        "the-same-q-again",
        "every step begins with the first step's Q",
        OUT,
        "                torch.mm(p, new_q.T, out=out)\n",
        WARM,
        "no-warm-start",
    ),
    mutant(
        "one-direction-too-few",
        "one column less than the rank asked for",
        "        r = min(self.rank, m, n)\n",
        "        r = min(max(1, self.rank - 1), m, n)\n",
        EXACT,
        "wrong",
    ),
    mutant(
        "dense",
        "nothing is compressed: everything is sent as it is",
        WIDTH,
        "        return 0\n",
        BYTES,
        "too-many-bytes",
    ),
    mutant(
        "always-compressed",
        "matrices are compressed also where the factors are larger",
        WIDTH,
        "        return r if p.dim() > 1 else 0\n",
        BYTES,
        "too-many-bytes",
    ),
    mutant(
        "matrix-by-matrix",
        "every matrix in a message of its own: many latencies",
        SECOND,
        "                for new_q in new_qs:\n"
        "                    dist.all_reduce(new_q, group=self.group)\n",
        BYTES,
        "too-many-messages",
    ),
    mutant(
        "biases-forgotten",
        "what is not compressed keeps this rank's own gradient",
        "                out.copy_(whole)\n",
        "",
        WHOLE,
        "missing-rank",
    ),
    mutant(
        "biases-owed",
        "what was sent as it is, is also kept for the next step",
        FORGET,
        "                part.copy_(whole)\n",
        WHOLE,
        "wrong",
    ),
    mutant(
        "shape-not-layout",
        "matrices are cut by shape, though memory has another order of strides",
        "    rows = p.shape[max(range(p.dim()), key=p.stride)]\n",
        "    rows = p.shape[0]\n",
        LAYOUTS,
        "wrong",
    ),
    mutant(
        "gram-schmidt-divides-by-zero",
        "columns are divided by their length, which may be 0",
        QR,
        "    wide = wide.clone()\n"
        "    for k in range(wide.shape[1]):\n"
        "        wide[:, k] -= wide[:, :k] @ (wide[:, :k].T @ wide[:, k])\n"
        "        wide[:, k] /= wide[:, k].norm()\n"
        "    return wide.to(p.dtype)\n",
        LAYOUTS,
        "nan",
    ),
    mutant(
        "residual-not-saved",
        "the residual is not saved",
        SAVED,
        '        return {"q": qs}\n',
        STATE,
        "resume-differs",
        (LOAD_RESIDUAL, ""),
    ),
    mutant(
        "q-not-saved",
        "Q is not saved: the resumed run begins with a random one",
        SAVED,
        '        return {"residual": self.residual.state_dict()}\n',
        STATE,
        "resume-differs",
        (COMPARED, ""),
        (LOAD_Q, ""),
    ),
    mutant(
        "q-is-no-copy",
        "BUGS 94: the state holds Q itself, which training goes on to change",
        COPIES,
        "        qs = [*self.q.values()]\n",
        STATE,
        "resume-differs",
    ),
    mutant(
        "group-ignored",
        "the default group is used",
        WORK,
        "        work = dist.all_reduce(flat, async_op=True)\n",
        GROUP,
        "hang",
    ),
    mutant(
        "waits-in-hook",
        "BUGS 27: the hook waits, and backward stands still meanwhile",
        WORK,
        WORK + "        work.wait()\n",
        BEGINS,
        "hook-waits",
    ),
    mutant(
        "rank-not-checked",
        "any rank is taken",
        "        if rank < 1:\n",
        "        if rank < -9:\n",
        BAD,
        "accepted",
    ),
]
