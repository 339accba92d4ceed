"""Wrong implementations of exercise 4.9."""

from distlab.grading.wrong import mutants_of

WITHIN, MEAN = "test_int8_is_the_sum_within_its_steps", "test_int8_rounding_is_right_in_the_mean"
NOISE, BYTES8 = "test_int8_ranks_round_independently", "test_int8_bytes"
FINITE = "test_int8_shows_what_is_not_finite"
SIGNS, BYTES1 = "test_one_bit_sends_signs_and_owes_the_rest", "test_one_bit_bytes"
FILL, STATE = "test_signs_fill_bytes", "test_quantised_state_goes_on_to_the_bit"
EDGES, GROUP = "test_quantised_empty_and_tiny_buckets", "test_quantised_works_in_a_group"
BEGINS = "test_quantised_hooks_begin_and_do_not_wait"

ROUND = "    q = (x / scale + uniform).floor_().clamp_(-STEPS, STEPS)"
SCALE = "    scale = (x.abs().amax(1, keepdim=True) / STEPS).float()\n"
TINY = "    scale.clamp_min_(torch.finfo(torch.float32).tiny)\n"
OWN_SCALE = "    scale = packed[:, -SCALE_BYTES:].reshape(-1).clone().view(torch.float32)  # a copy is aligned\n"
EXCHANGE = (
    "        work = dist.all_to_all_single(theirs, packed, group=self.group, async_op=True)\n"
)
TOTAL = "            total = unpack_int8(theirs, rows.dtype).sum(0, keepdim=True)\n"
SUMS = "            dist.all_gather_into_tensor(packed, mine, group=self.group)\n"
RESULT = "            bucket.buffer.copy_(unpack_int8(packed, rows.dtype).view(-1)[:n])\n"
SEED = "            seed * dist.get_world_size(group) + dist.get_rank(group)\n"
MEMORY = "        v = self.residual.beside(bucket).add_(bucket.buffer)\n"
SCALE1 = "        scale = v.abs().mean().float()\n"
OWED = "        v.sub_(unpack_signs(packed, n, v.dtype).mul_(scale))\n"
SIZE = "                size = theirs[:SCALE_BYTES].clone().view(torch.float32)\n"
PACKED = "        packed = pack_signs(v)\n"
BITS = "    return (bits.view(-1, 8) * powers).sum(1, dtype=torch.uint8)\n"
GATHER = (
    "        work = dist.all_gather_into_tensor(everyone, message, self.group, async_op=True)\n"
)
SAVED = '        return {"residual": self.residual.state_dict()}\n'
GENERATOR = '        self.generator.set_state(state["generator"])\n'

mutant = mutants_of("4.9", "quantised")

MUTANTS = [
    mutant(
        "rounded-to-nearest",
        "rounded to the nearest step: small gradients are always 0",
        ROUND,
        "    q = (x / scale).round_().clamp_(-STEPS, STEPS)",
        MEAN,
        "biased",
    ),
    mutant(
        "rounded-down",
        "rounded down: every number loses half a step in the mean",
        ROUND,
        "    q = (x / scale).floor_().clamp_(-STEPS, STEPS)",
        MEAN,
        "biased",
    ),
    mutant(
        "truncated",
        "converted to int8 without rounding: towards zero after the noise was added",
        ROUND + "  # 127 + u may be rounded to 128\n    return torch.cat([q.to(torch.int8), ",
        "    q = (x / scale + uniform).to(torch.int8)\n    return torch.cat([q, ",
        MEAN,
        "biased",
    ),
    mutant(
        "scale-of-first-row",
        "one scale, that of the first piece, is used for all of them",
        OWN_SCALE,
        OWN_SCALE.replace("packed[:,", "packed[:1,"),
        WITHIN,
        "too-far-off",
    ),
    mutant(
        "sum-in-int8",
        "integers of different scales are added up, in 8 bits",
        TOTAL,
        "            total = theirs[:, :-SCALE_BYTES].sum(0, keepdim=True, dtype=torch.int8)\n"
        "            total = total * theirs[0, -SCALE_BYTES:].clone().view(torch.float32)\n",
        WITHIN,
        "too-far-off",
    ),
    mutant(
        "gathered-without-quantising",
        "the sums travel as they are, in 32 bits",
        "            mine = pack_int8(total, self.generator)\n",
        "            mine = total\n            packed = total.new_empty(rows.shape)\n",
        BYTES8,
        "too-many-bytes",
        (RESULT, "            bucket.buffer.copy_(packed.view(-1)[:n])\n"),
        (
            "        def add_up() -> None:\n            total",
            "        def add_up(packed=packed) -> None:\n            total",
        ),
    ),
    mutant(
        "everything-gathered",
        "everything goes to everybody: W/2 times the bytes",
        EXCHANGE,
        "        both = packed.new_empty(world_size, *packed.shape)\n"
        "        work = dist.all_gather_into_tensor(\n"
        "            both, packed.unsqueeze(0), self.group, async_op=True\n"
        "        )\n",
        BYTES8,
        "too-many-bytes",
        (
            TOTAL,
            "            theirs.copy_(both[:, dist.get_rank(self.group)])\n" + TOTAL,
        ),
    ),
    mutant(
        "float32-all-reduce",
        "quantised and sent as float32: the loss without the gain",
        EXCHANGE,
        "        bucket.buffer.copy_(unpack_int8(packed, rows.dtype).view(-1)[:n])\n"
        "        return dist.all_reduce(bucket.buffer, group=self.group, async_op=True)\n"
        + EXCHANGE,
        BYTES8,
        "too-many-bytes",
    ),
    mutant(
        "same-noise",
        "all ranks draw the same random numbers: their errors add up",
        SEED,
        "            seed\n",
        NOISE,
        "same-noise",
    ),
    mutant(
        "noise-repeats",
        "the generator is seeded anew at every call",
        EXCHANGE,
        EXCHANGE + "        self.generator.manual_seed(self.generator.initial_seed())\n",
        NOISE,
        "same-noise",
        (
            "            mine = pack_int8(total, self.generator)\n",
            "            mine = pack_int8(total, self.generator)\n"
            "            self.generator.manual_seed(self.generator.initial_seed())\n",
        ),
    ),
    mutant(
        "divided-by-zero",
        "a piece of zeros is divided by its scale 0",
        TINY,
        "",
        EDGES,
        "nan",
        (OWN_SCALE, OWN_SCALE + "    scale = scale / (scale / scale)\n"),
    ),
    mutant(
        "nan-hidden",
        "what is not finite is made 0",
        SCALE,
        "    x = x.nan_to_num(0.0, 0.0, 0.0)\n" + SCALE,
        FINITE,
        "nan-hidden",
    ),
    mutant(
        "no-error-feedback",
        "what signs lack is forgotten",
        MEMORY,
        "        v = self.residual.beside(bucket).copy_(bucket.buffer)\n",
        SIGNS,
        "no-error-feedback",
    ),
    mutant(
        "residual-without-scale",
        "the residual takes back signs of size 1",
        OWED,
        "        v.sub_(unpack_signs(packed, n, v.dtype))\n",
        SIGNS,
        "residual-without-scale",
    ),
    mutant(
        "scale-of-rank-0",
        "the first rank's scale is used for everybody's signs",
        SIZE,
        "                size = everyone[0, :SCALE_BYTES].clone().view(torch.float32)\n",
        SIGNS,
        "scale-of-rank-0",
    ),
    mutant(
        "own-scale",
        "each rank multiplies everybody's signs by its own scale",
        SIZE,
        "                size = scale\n",
        SIGNS,
        "ranks-differ",
    ),
    mutant(
        "largest-as-scale",
        "the scale is the largest value, not the mean size",
        SCALE1,
        "        scale = v.abs().amax().float()\n",
        SIGNS,
        "wrong",
    ),
    mutant(
        "sign-of-zero",
        "torch.sign has three values, and one bit has two",
        "    torch.ge(v, 0, out=bits[: len(v)])\n",
        "    torch.gt(v, 0, out=bits[: len(v)])\n",
        SIGNS,
        "wrong",
    ),
    mutant(
        "unpacked",
        "a byte for each sign: 8 times the bytes",
        PACKED,
        "        packed = torch.ge(v, 0).to(torch.uint8)\n",
        BYTES1,
        "too-many-bytes",
        (OWED, "        v.sub_((packed * 2.0 - 1).to(v.dtype).mul_(scale))\n"),
        (
            "                signs = unpack_signs(theirs[SCALE_BYTES:], n, bucket.buffer.dtype)\n",
            "                signs = (theirs[SCALE_BYTES:] * 2.0 - 1).to(bucket.buffer.dtype)\n",
        ),
    ),
    mutant(
        "scale-apart",
        "the scales travel in a message of their own: a second latency for 4 bytes",
        GATHER,
        "        sizes = scale.new_empty(world_size)\n"
        "        dist.all_gather_into_tensor(sizes, scale.view(1), self.group)\n" + GATHER,
        BYTES1,
        "too-many-messages",
        ("torch.cat([scale.view(1).view(torch.uint8), packed]).view(1, -1)", "packed.view(1, -1)"),
        ("            for theirs in everyone:\n", "            for size, theirs in zip(sizes, everyone, strict=True):\n"),
        (SIZE, ""),
        ("theirs[SCALE_BYTES:]", "theirs"),
    ),
    mutant(
        "bits-reversed",
        "the first sign is the highest bit, not the lowest",
        "    return (bits.view(-1, 8) * powers).sum(1, dtype=torch.uint8)\n",
        "    return (bits.view(-1, 8) * powers.flip(0)).sum(1, dtype=torch.uint8)\n",
        FILL,
        "bits",
    ),
    mutant(
        "residual-not-saved",
        "the residual is not saved",
        SAVED,
        "        return {}\n",
        STATE,
        "resume-differs",
        ('        self.residual.load_state_dict(state["residual"])\n', "        pass\n"),
    ),
    mutant(
        "group-ignored",
        "the default group is used",
        GATHER,
        GATHER.replace("self.group, ", ""),
        GROUP,
        "hang",
    ),
    mutant(
        "waits-in-hook",
        "BUGS 27: the hook waits, and backward stands still meanwhile",
        GATHER,
        GATHER + "        work.wait()\n",
        BEGINS,
        "hook-waits",
    ),
]
