"""Wrong implementations of exercise 4.9."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="quantised-rounded-to-nearest",
        exercise="4.9",
        mistake="rounded to the nearest step: small gradients are always 0",
        text="    q = (x / scale + uniform).floor_().clamp_(-STEPS, STEPS)",
        becomes="    q = (x / scale).round_().clamp_(-STEPS, STEPS)",
        caught_by="test_int8_rounding_is_right_in_the_mean",
        told_as="biased",
    ),
    Mutant(
        id="quantised-rounded-down",
        exercise="4.9",
        mistake="rounded down: every number loses half a step in the mean",
        text="    q = (x / scale + uniform).floor_().clamp_(-STEPS, STEPS)",
        becomes="    q = (x / scale).floor_().clamp_(-STEPS, STEPS)",
        caught_by="test_int8_rounding_is_right_in_the_mean",
        told_as="biased",
    ),
    Mutant(
        id="quantised-truncated",
        exercise="4.9",
        mistake="converted to int8 without rounding: towards zero after the noise was added",
        text=(
            "    q = (x / scale + uniform).floor_().clamp_(-STEPS, STEPS)  # 127 + u may be "
            "rounded to 128\n"
            "    return torch.cat([q.to(torch.int8), "
        ),
        becomes="""    q = (x / scale + uniform).to(torch.int8)
    return torch.cat([q, """,
        caught_by="test_int8_rounding_is_right_in_the_mean",
        told_as="biased",
    ),
    Mutant(
        id="quantised-scale-of-first-row",
        exercise="4.9",
        mistake="one scale, that of the first piece, is used for all of them",
        text=(
            "    scale = packed[:, -SCALE_BYTES:].reshape(-1).clone().view(torch.float32)  # a "
            "copy is aligned\n"
        ),
        becomes=(
            "    scale = packed[:1, -SCALE_BYTES:].reshape(-1).clone().view(torch.float32)  # "
            "a copy is aligned\n"
        ),
        caught_by="test_int8_is_the_sum_within_its_steps",
        told_as="too-far-off",
    ),
    Mutant(
        id="quantised-sum-in-int8",
        exercise="4.9",
        mistake="integers of different scales are added up, in 8 bits",
        text="            total = unpack_int8(theirs, torch.float32).sum(0, keepdim=True)\n",
        becomes=(
            "            total = theirs[:, :-SCALE_BYTES].sum(0, keepdim=True, dtype=torch.int8)\n"
            "            total = total * theirs[0, -SCALE_BYTES:].clone().view(torch.float32)\n"
        ),
        caught_by="test_int8_is_the_sum_within_its_steps",
        told_as="too-far-off",
    ),
    Mutant(
        id="quantised-gathered-without-quantising",
        exercise="4.9",
        mistake="the sums travel as they are, in 32 bits",
        text="            mine = pack_int8(total, self.generator)\n",
        becomes="""            mine = total
            packed = total.new_empty(rows.shape)
""",
        more=(
            (
                "            bucket.buffer.copy_(unpack_int8(packed, bucket.buffer.dtype).view(-1)[:n])\n",
                "            bucket.buffer.copy_(packed.view(-1)[:n])\n",
            ),
            (
                """        def add_up() -> None:
            total""",
                """        def add_up(packed=packed) -> None:
            total""",
            ),
        ),
        caught_by="test_int8_bytes",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="quantised-everything-gathered",
        exercise="4.9",
        mistake="everything goes to everybody: W/2 times the bytes",
        text=(
            "        work = dist.all_to_all_single(theirs, packed, group=self.group, "
            "async_op=True)\n"
        ),
        becomes="""        both = packed.new_empty(world_size, *packed.shape)
        work = dist.all_gather_into_tensor(
            both, packed.unsqueeze(0), self.group, async_op=True
        )
""",
        more=(
            (
                "            total = unpack_int8(theirs, torch.float32).sum(0, keepdim=True)\n",
                """            theirs.copy_(both[:, dist.get_rank(self.group)])
            total = unpack_int8(theirs, torch.float32).sum(0, keepdim=True)
""",
            ),
        ),
        caught_by="test_int8_bytes",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="quantised-float32-all-reduce",
        exercise="4.9",
        mistake="quantised and sent as float32: the loss without the gain",
        text=(
            "        work = dist.all_to_all_single(theirs, packed, group=self.group, "
            "async_op=True)\n"
        ),
        becomes="""        bucket.buffer.copy_(unpack_int8(packed, bucket.buffer.dtype).view(-1)[:n])
        return dist.all_reduce(bucket.buffer, group=self.group, async_op=True)
        work = dist.all_to_all_single(theirs, packed, group=self.group, async_op=True)
""",
        caught_by="test_int8_bytes",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="quantised-same-noise",
        exercise="4.9",
        mistake="all ranks draw the same random numbers: their errors add up",
        text="""manual_seed(
            seed * dist.get_world_size(group) + dist.get_rank(group)
        )
""",
        becomes="manual_seed(seed)\n",
        caught_by="test_int8_ranks_round_independently",
        told_as="same-noise",
    ),
    Mutant(
        id="quantised-noise-repeats",
        exercise="4.9",
        mistake="the generator is seeded anew at every call",
        text=(
            "        work = dist.all_to_all_single(theirs, packed, group=self.group, "
            "async_op=True)\n"
        ),
        becomes=(
            "        work = dist.all_to_all_single(theirs, packed, group=self.group, "
            "async_op=True)\n"
            "        self.generator.manual_seed(self.generator.initial_seed())\n"
        ),
        more=(
            (
                "            mine = pack_int8(total, self.generator)\n",
                """            mine = pack_int8(total, self.generator)
            self.generator.manual_seed(self.generator.initial_seed())
""",
            ),
        ),
        caught_by="test_int8_ranks_round_independently",
        told_as="same-noise",
    ),
    Mutant(
        id="quantised-divided-by-zero",
        exercise="4.9",
        mistake="a piece of zeros is divided by its scale 0",
        text="    scale.clamp_min_(torch.finfo(torch.float32).tiny)\n",
        becomes="",
        more=(
            (
                (
                    "    scale = packed[:, "
                    "-SCALE_BYTES:].reshape(-1).clone().view(torch.float32)  # a copy is aligned\n"
                ),
                (
                    "    scale = packed[:, "
                    "-SCALE_BYTES:].reshape(-1).clone().view(torch.float32)  # a copy is aligned\n"
                    "    scale = scale / (scale / scale)\n"
                ),
            ),
        ),
        caught_by="test_quantised_empty_and_tiny_buckets",
        told_as="nan",
    ),
    Mutant(
        id="quantised-nan-hidden",
        exercise="4.9",
        mistake="what is not finite is made 0",
        text="    scale = x.abs().amax(1, keepdim=True).float() / STEPS  # too small for 16 bits, maybe\n",
        becomes="""    x = x.nan_to_num(0.0, 0.0, 0.0)
    scale = (x.abs().amax(1, keepdim=True) / STEPS).float()
""",
        caught_by="test_int8_shows_what_is_not_finite",
        told_as="nan-hidden",
    ),
    Mutant(
        id="quantised-no-error-feedback",
        exercise="4.9",
        mistake="what signs lack is forgotten",
        text="        v = self.residual.beside(bucket).add_(bucket.buffer)\n",
        becomes="        v = self.residual.beside(bucket).copy_(bucket.buffer)\n",
        caught_by="test_one_bit_sends_signs_and_owes_the_rest",
        told_as="no-error-feedback",
    ),
    Mutant(
        id="quantised-residual-without-scale",
        exercise="4.9",
        mistake="the residual takes back signs of size 1",
        text="        v.sub_(unpack_signs(packed, n, v.dtype).mul_(scale))\n",
        becomes="        v.sub_(unpack_signs(packed, n, v.dtype))\n",
        caught_by="test_one_bit_sends_signs_and_owes_the_rest",
        told_as="residual-without-scale",
    ),
    Mutant(
        id="quantised-scale-of-rank-0",
        exercise="4.9",
        mistake="the first rank's scale is used for everybody's signs",
        text="                size = theirs[:SCALE_BYTES].clone().view(torch.float32)\n",
        becomes="                size = everyone[0, :SCALE_BYTES].clone().view(torch.float32)\n",
        caught_by="test_one_bit_sends_signs_and_owes_the_rest",
        told_as="scale-of-rank-0",
    ),
    Mutant(
        id="quantised-own-scale",
        exercise="4.9",
        mistake="each rank multiplies everybody's signs by its own scale",
        text="                size = theirs[:SCALE_BYTES].clone().view(torch.float32)\n",
        becomes="                size = scale\n",
        caught_by="test_one_bit_sends_signs_and_owes_the_rest",
        told_as="ranks-differ",
    ),
    Mutant(
        id="quantised-largest-as-scale",
        exercise="4.9",
        mistake="the scale is the largest value, not the mean size",
        text="        scale = v.abs().float().mean()\n",
        becomes="        scale = v.abs().amax().float()\n",
        caught_by="test_one_bit_sends_signs_and_owes_the_rest",
        told_as="wrong",
    ),
    Mutant(
        id="quantised-sign-of-zero",
        exercise="4.9",
        mistake="torch.sign has three values, and one bit has two",
        text="    torch.ge(v, 0, out=bits[: len(v)])\n",
        becomes="    torch.gt(v, 0, out=bits[: len(v)])\n",
        caught_by="test_one_bit_sends_signs_and_owes_the_rest",
        told_as="sign-of-zero-sent",
    ),
    Mutant(
        id="quantised-unpacked",
        exercise="4.9",
        mistake="a byte for each sign: 8 times the bytes",
        text="        packed = pack_signs(v)\n",
        becomes="        packed = torch.ge(v, 0).to(torch.uint8)\n",
        more=(
            (
                "        v.sub_(unpack_signs(packed, n, v.dtype).mul_(scale))\n",
                "        v.sub_((packed * 2.0 - 1).to(v.dtype).mul_(scale))\n",
            ),
            (
                (
                    "                signs = unpack_signs(theirs[SCALE_BYTES:], n, "
                    "bucket.buffer.dtype)\n"
                ),
                (
                    "                signs = (theirs[SCALE_BYTES:] * 2.0 - "
                    "1).to(bucket.buffer.dtype)\n"
                ),
            ),
        ),
        caught_by="test_one_bit_bytes",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="quantised-scale-apart",
        exercise="4.9",
        mistake="the scales travel in a message of their own: a second latency for 4 bytes",
        text=(
            "        work = dist.all_gather_into_tensor(everyone, message, self.group, "
            "async_op=True)\n"
        ),
        becomes="""        sizes = scale.new_empty(world_size)
        dist.all_gather_into_tensor(sizes, scale.view(1), self.group)
        work = dist.all_gather_into_tensor(everyone, message, self.group, async_op=True)
""",
        more=(
            (
                "torch.cat([scale.view(1).view(torch.uint8), packed]).view(1, -1)",
                "packed.view(1, -1)",
            ),
            (
                "            for theirs in everyone:\n",
                "            for size, theirs in zip(sizes, everyone, strict=True):\n",
            ),
            (
                "                size = theirs[:SCALE_BYTES].clone().view(torch.float32)\n",
                "",
            ),
            (
                "theirs[SCALE_BYTES:]",
                "theirs",
            ),
        ),
        caught_by="test_one_bit_bytes",
        told_as="too-many-messages",
    ),
    Mutant(
        id="quantised-bits-reversed",
        exercise="4.9",
        mistake="the first sign is the highest bit, not the lowest",
        text="    return (bits.view(-1, 8) * powers).sum(1, dtype=torch.uint8)\n",
        becomes="    return (bits.view(-1, 8) * powers.flip(0)).sum(1, dtype=torch.uint8)\n",
        caught_by="test_signs_fill_bytes",
        told_as="bits",
    ),
    Mutant(
        id="quantised-residual-not-saved",
        exercise="4.9",
        mistake="the residual is not saved",
        text='        return {"residual": self.residual.state_dict()}\n',
        becomes="        return {}\n",
        more=(
            (
                '        self.residual.load_state_dict(state["residual"])\n',
                "        pass\n",
            ),
        ),
        caught_by="test_quantised_state_goes_on_to_the_bit",
        told_as="resume-differs",
    ),
    Mutant(
        id="quantised-group-ignored",
        exercise="4.9",
        mistake="the default group is used",
        text=(
            "        work = dist.all_gather_into_tensor(everyone, message, self.group, "
            "async_op=True)\n"
        ),
        becomes="        work = dist.all_gather_into_tensor(everyone, message, async_op=True)\n",
        caught_by="test_one_bit_two_models_in_two_groups",
        told_as=("hang", "exception"),
    ),
    Mutant(
        id="quantised-waits-in-hook",
        exercise="4.9",
        mistake="the hook waits, and backward stands still meanwhile",
        text=(
            "        work = dist.all_gather_into_tensor(everyone, message, self.group, "
            "async_op=True)\n"
        ),
        becomes=(
            "        work = dist.all_gather_into_tensor(everyone, message, self.group, "
            "async_op=True)\n"
            "        work.wait()\n"
        ),
        caught_by="test_quantised_hooks_begin_and_do_not_wait",
        told_as="hook-waits",
    ),
    Mutant(
        id="int8-sums-in-16-bits",
        exercise="4.9",
        mistake="the pieces are added up in the bucket's dtype",
        text="unpack_int8(theirs, torch.float32).sum(0, keepdim=True)",
        becomes="unpack_int8(theirs, bucket.buffer.dtype).sum(0, keepdim=True)",
        caught_by="test_int8_rounding_is_right_in_the_mean",
        told_as="sum-rounded",
    ),
    Mutant(
        id="one-bit-wide-scale-owed",
        exercise="4.9",
        mistake="the residual is lessened by the mean in float64, where its float32 was sent",
        text="        v.sub_(unpack_signs(packed, n, v.dtype).mul_(scale))\n",
        becomes="        v.sub_(unpack_signs(packed, n, v.dtype).mul_(v.abs().mean()))\n",
        caught_by="test_one_bit_owes_the_last_digits",
        told_as="residual-of-another-scale",
    ),
    Mutant(
        id="int8-scale-at-least-1e-12",
        exercise="4.9",
        mistake="a row of zeros gets the scale 1e-12, and so does one of tiny numbers",
        text="scale.clamp_min_(torch.finfo(torch.float32).tiny)",
        becomes="scale.clamp_min_(1e-12)",
        caught_by="test_int8_packs_with_the_right_mean",
        told_as="small-scale",
    ),
]
