"""Wrong implementations of exercise 4.8."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="powersgd-no-orthogonalisation",
        exercise="4.8",
        mistake="P's columns are not made orthonormal",
        text="                p.copy_(orthonormal(p))\n",
        becomes="",
        caught_by="test_a_sum_of_low_rank_is_exact",
        told_as="not-orthonormal",
    ),
    Mutant(
        id="powersgd-columns-normalised-only",
        exercise="4.8",
        mistake="P's columns have length 1 and are not at right angles",
        text="    return torch.linalg.qr(wide).Q.to(p.dtype)\n",
        becomes="    return p / p.norm(dim=0).clamp_min(1e-30)\n",
        caught_by="test_a_sum_of_low_rank_is_exact",
        told_as="not-orthonormal",
    ),
    Mutant(
        id="powersgd-orthogonalised-before-the-sum",
        exercise="4.8",
        mistake="every rank makes its own P orthonormal, and the sum is not",
        text="        work = dist.all_reduce(flat, group=self.group, async_op=True)\n",
        becomes="""        for p in ps:
            p.copy_(orthonormal(p))
        work = dist.all_reduce(flat, group=self.group, async_op=True)
""",
        more=(
            (
                "                p.copy_(orthonormal(p))\n",
                "",
            ),
        ),
        caught_by="test_a_sum_of_low_rank_is_exact",
        told_as="wrong",
    ),
    Mutant(
        id="powersgd-q-not-summed",
        exercise="4.8",
        mistake="only P is summed: each rank multiplies with its own Q",
        text="""            if matrices:
                dist.all_reduce(flat_q, group=self.group)
""",
        becomes="",
        caught_by="test_a_sum_of_low_rank_is_exact",
        told_as="ranks-differ",
    ),
    Mutant(
        id="powersgd-unshared-q",
        exercise="4.8",
        mistake="every rank begins with a Q of its own",
        text="        generator = torch.Generator().manual_seed(SEED)\n",
        becomes=(
            "        generator = torch.Generator().manual_seed(SEED + dist.get_rank(self.group))\n"
        ),
        caught_by="test_a_sum_of_low_rank_is_exact",
        told_as="wrong",
    ),
    Mutant(
        id="powersgd-no-error-feedback",
        exercise="4.8",
        mistake="what the approximation leaves out is forgotten",
        text="        residual = self.residual.beside(bucket).add_(bucket.buffer)\n",
        becomes="        residual = self.residual.beside(bucket).copy_(bucket.buffer)\n",
        caught_by="test_what_is_left_out_comes_next",
        told_as="no-error-feedback",
    ),
    Mutant(
        id="powersgd-owes-all-that-was-sent",
        exercise="4.8",
        mistake="each rank takes the whole sum from its residual, not 1/W of it",
        text=(
            "            residual.sub_(bucket.buffer, alpha=1 / dist.get_world_size(self.group))\n"
        ),
        becomes="            residual.sub_(bucket.buffer)\n",
        caught_by="test_what_is_left_out_comes_next",
        told_as="no-error-feedback",
    ),
    Mutant(
        id="powersgd-residual-never-reduced",
        exercise="4.8",
        mistake="what was sent stays in the residual",
        text=(
            "            residual.sub_(bucket.buffer, alpha=1 / dist.get_world_size(self.group))\n"
        ),
        becomes="",
        caught_by="test_what_is_left_out_comes_next",
        told_as="no-error-feedback",
    ),
    Mutant(
        id="powersgd-no-warm-start",
        exercise="4.8",
        mistake="every step begins with a new random Q",
        text="                torch.mm(p, q.copy_(new_q).T, out=out)\n",
        becomes="""                torch.mm(p, new_q.T, out=out)
                self.draws = getattr(self, 'draws', 0) + 1
                again = torch.Generator().manual_seed(self.draws)
                q.copy_(torch.randn(q.shape, generator=again))
""",
        caught_by="test_warm_start_finds_the_best_approximation",
        told_as="no-warm-start",
    ),
    Mutant(
        id="powersgd-the-same-q-again",
        exercise="4.8",
        mistake="every step begins with the first step's Q",
        text="                torch.mm(p, q.copy_(new_q).T, out=out)\n",
        becomes="                torch.mm(p, new_q.T, out=out)\n",
        caught_by="test_warm_start_finds_the_best_approximation",
        told_as="no-warm-start",
    ),
    Mutant(
        id="powersgd-one-direction-too-few",
        exercise="4.8",
        mistake="one column less than the rank asked for",
        text="        r = min(self.rank, m, n)\n",
        becomes="        r = min(max(1, self.rank - 1), m, n)\n",
        caught_by="test_a_sum_of_low_rank_is_exact",
        told_as="wrong",
    ),
    Mutant(
        id="powersgd-dense",
        exercise="4.8",
        mistake="nothing is compressed: everything is sent as it is",
        text="        return r if r * (m + n) < m * n else 0\n",
        becomes="        return 0\n",
        caught_by="test_bytes_are_those_of_two_thin_matrices",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="powersgd-always-compressed",
        exercise="4.8",
        mistake="matrices are compressed also where the factors are larger",
        text="        return r if r * (m + n) < m * n else 0\n",
        becomes="        return r if p.dim() > 1 else 0\n",
        caught_by="test_bytes_are_those_of_two_thin_matrices",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="powersgd-matrix-by-matrix",
        exercise="4.8",
        mistake="every matrix in a message of its own: many latencies",
        text="                dist.all_reduce(flat_q, group=self.group)\n",
        becomes="""                for new_q in new_qs:
                    dist.all_reduce(new_q, group=self.group)
""",
        caught_by="test_bytes_are_those_of_two_thin_matrices",
        told_as="too-many-messages",
    ),
    Mutant(
        id="powersgd-biases-forgotten",
        exercise="4.8",
        mistake="what is not compressed keeps this rank's own gradient",
        text="                out.copy_(whole)\n",
        becomes="",
        caught_by="test_vectors_and_small_matrices_are_exact",
        told_as="missing-rank",
    ),
    Mutant(
        id="powersgd-biases-owed",
        exercise="4.8",
        mistake="what was sent as it is, is also kept for the next step",
        text="                part.zero_()\n",
        becomes="                part.copy_(whole)\n",
        caught_by="test_vectors_and_small_matrices_are_exact",
        told_as="wrong",
    ),
    Mutant(
        id="powersgd-shape-not-layout",
        exercise="4.8",
        mistake="matrices are split by shape, though memory has another order of strides",
        text="    rows = p.shape[max(range(p.dim()), key=p.stride)]\n",
        becomes="    rows = p.shape[0]\n",
        caught_by="test_layouts_and_zeros",
        told_as="wrong",
    ),
    Mutant(
        id="powersgd-gram-schmidt-divides-by-zero",
        exercise="4.8",
        mistake="columns are divided by their length, which may be 0",
        text="    return torch.linalg.qr(wide).Q.to(p.dtype)\n",
        becomes="""    wide = wide.clone()
    for k in range(wide.shape[1]):
        wide[:, k] -= wide[:, :k] @ (wide[:, :k].T @ wide[:, k])
        wide[:, k] /= wide[:, k].norm()
    return wide.to(p.dtype)
""",
        caught_by="test_layouts_and_zeros",
        told_as="nan",
    ),
    Mutant(
        id="powersgd-residual-not-saved",
        exercise="4.8",
        mistake="the residual is not saved",
        text='        return {"residual": self.residual.state_dict(), "q": qs}\n',
        becomes='        return {"q": qs}\n',
        more=(
            (
                '        self.residual.load_state_dict(state["residual"])\n',
                "",
            ),
        ),
        caught_by="test_power_state_goes_on_to_the_bit",
        told_as="resume-differs",
    ),
    Mutant(
        id="powersgd-q-not-saved",
        exercise="4.8",
        mistake="Q is not saved: the resumed run begins with a random one",
        text='        return {"residual": self.residual.state_dict(), "q": qs}\n',
        becomes='        return {"residual": self.residual.state_dict()}\n',
        more=(
            (
                '        check_shapes(state["q"], [*self.q.values()])\n',
                "",
            ),
            (
                """        for q, saved in zip(self.q.values(), state["q"], strict=True):
            q.copy_(saved)
""",
                "",
            ),
        ),
        caught_by="test_power_state_goes_on_to_the_bit",
        told_as="resume-differs",
    ),
    Mutant(
        id="powersgd-q-is-no-copy",
        exercise="4.8",
        mistake="the state holds Q itself, which training goes on to change",
        text="        qs = [q.clone() for q in self.q.values()]\n",
        becomes="        qs = [*self.q.values()]\n",
        caught_by="test_power_state_goes_on_to_the_bit",
        told_as="resume-differs",
    ),
    Mutant(
        id="powersgd-group-ignored",
        exercise="4.8",
        mistake="the default group is used",
        text="        work = dist.all_reduce(flat, group=self.group, async_op=True)\n",
        becomes="        work = dist.all_reduce(flat, async_op=True)\n",
        caught_by="test_power_two_models_in_two_groups",
        told_as="hang",
    ),
    Mutant(
        id="powersgd-waits-in-hook",
        exercise="4.8",
        mistake="the hook waits, and backward stands still meanwhile",
        text="        work = dist.all_reduce(flat, group=self.group, async_op=True)\n",
        becomes="""        work = dist.all_reduce(flat, group=self.group, async_op=True)
        work.wait()
""",
        caught_by="test_power_hook_begins_and_does_not_wait",
        told_as="hook-waits",
    ),
    Mutant(
        id="powersgd-rank-not-checked",
        exercise="4.8",
        mistake="any rank is taken",
        text="        if rank < 1:\n",
        becomes="        if rank < -9:\n",
        caught_by="test_power_bad_input_is_refused",
        told_as="accepted",
    ),
    Mutant(
        id="powersgd-residual-first",
        exercise="4.8",
        mistake="the residual is loaded before the shapes of the Qs are compared",
        text="""        check_shapes(state["q"], [*self.q.values()])
        self.residual.load_state_dict(state["residual"])
""",
        becomes="""        self.residual.load_state_dict(state["residual"])
        check_shapes(state["q"], [*self.q.values()])
""",
        caught_by="test_a_refused_power_state_changes_nothing",
        told_as="half-loaded",
    ),
    Mutant(
        id="powersgd-own-q",
        exercise="4.8",
        mistake="each rank keeps its own product for the next step, not the sum over the ranks",
        text="                torch.mm(m.T, p, out=new_q)\n            if matrices:\n",
        becomes="                torch.mm(m.T, p, out=new_q)\n"
        "            own = [new_q.clone() for new_q in new_qs]\n            if matrices:\n",
        more=(
            (
                "            for p, new_q, (_, out, q) in zip(ps, new_qs, matrices, strict=True):\n"
                "                torch.mm(p, q.copy_(new_q).T, out=out)\n",
                "            for p, new_q, mine, (_, out, q) in zip(ps, new_qs, own, matrices):\n"
                "                torch.mm(p, new_q.T, out=out)\n"
                "                q.copy_(mine)\n",
            ),
        ),
        caught_by="test_what_is_left_out_comes_next",
        told_as="own-q",
    ),
    Mutant(
        id="powersgd-no-feedback-in-16-bits",
        exercise="4.8",
        mistake="in 16 bits nothing is owed",
        text="            residual.sub_(bucket.buffer, alpha=1 / dist.get_world_size(self.group))",
        becomes="            residual.sub_(bucket.buffer, alpha=1 / dist.get_world_size(self.group))\n            if residual.dtype in (torch.bfloat16, torch.float16):\n                residual.zero_()",
        caught_by="test_what_16_bits_leave_out_comes_next",
        told_as="no-error-feedback",
    ),
]
