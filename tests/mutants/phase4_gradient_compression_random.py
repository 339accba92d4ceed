"""Wrong implementations of exercise 4.7."""

from distlab.grading.wrong import mutants_of

SUMS, LIKELY = "test_sums_at_shared_places_and_owes_the_rest", "test_every_place_is_as_likely"
BYTES, STATE = "test_bytes_are_those_of_k_values", "test_random_state_goes_on_to_the_bit"
EDGES, GROUP = "test_random_empty_and_tiny_buckets", "test_random_works_in_a_group"
BEGINS = "test_random_hook_begins_and_does_not_wait"

ADD = "        v = self.residual.beside(bucket)\n        v.add_(bucket.buffer)\n"
ORDER = "        order = torch.randperm(v.numel(), generator=self.generator)\n"
PLACES = "        places = order[: count_for(self.ratio, v.numel())].to(v.device)\n"
CLEAR = "        v[places] = 0\n"
WORK = "        work = dist.all_reduce(values, group=self.group, async_op=True)\n"
PUT = "            bucket.buffer.zero_()\n            bucket.buffer[places] = values\n"
SAVED = (
    '        return {"residual": self.residual.state_dict(), '
    '"generator": self.generator.get_state()}\n'
)

mutant = mutants_of("4.7", "randomk")

MUTANTS = [
    mutant(
        "unshared-seed",
        "every rank draws places of its own, and sums of different places are mixed",
        ORDER,
        "        if not hasattr(self, 'own'):\n"
        "            seed = self.generator.initial_seed() + dist.get_rank(self.group)\n"
        "            self.own = torch.Generator().manual_seed(seed)\n"
        "        order = torch.randperm(v.numel(), generator=self.own)\n",
        SUMS,
        "ranks-differ",
    ),
    mutant(
        "global-generator",
        "places are drawn from the default generator, which is each rank's own",
        ORDER,
        "        torch.manual_seed(torch.initial_seed() + dist.get_rank())\n"
        "        order = torch.randperm(v.numel())\n",
        SUMS,
        "ranks-differ",
    ),
    mutant(
        "no-error-feedback",
        "what is not drawn is forgotten",
        ADD,
        "        v = bucket.buffer.clone()\n",
        SUMS,
        "no-error-feedback",
    ),
    mutant(
        "residual-not-cleared",
        "what was sent stays in the residual",
        CLEAR,
        "",
        SUMS,
        "residual-not-cleared",
    ),
    mutant(
        "scaled-up",
        "values are scaled up by n/k, as if there were no residual",
        PUT,
        "            bucket.buffer.zero_()\n"
        "            bucket.buffer[places] = values * (v.numel() / len(values))\n",
        SUMS,
        "scaled-up",
    ),
    mutant(
        "not-zero-elsewhere",
        "BUGS 47: elsewhere the buffer keeps this rank's own gradient",
        PUT,
        "            bucket.buffer[places] = values\n",
        SUMS,
        "ranks-differ",
    ),
    mutant(
        "with-repetition",
        "places may be drawn twice: fewer are sent",
        ORDER + PLACES,
        "        k = count_for(self.ratio, v.numel())\n"
        "        places = torch.randint(v.numel(), (k,), generator=self.generator)\n",
        SUMS,
        "count",
    ),
    mutant(
        "same-places",
        "the generator is seeded anew at every call: the same places every time",
        ORDER,
        "        self.generator.manual_seed(self.generator.initial_seed())\n" + ORDER,
        LIKELY,
        "not-uniform",
    ),
    mutant(
        "first-half-only",
        "places are drawn from the front part of the bucket",
        ORDER,
        ORDER.replace("v.numel()", "max(1, v.numel() // 2)"),
        LIKELY,
        "not-uniform",
    ),
    mutant(
        "seed-ignored",
        "every hook draws the same places, whatever its seed is",
        "        self.generator = torch.Generator().manual_seed(seed)\n",
        "        self.generator = torch.Generator().manual_seed(0)\n",
        LIKELY,
        "seed-ignored",
    ),
    mutant(
        "indices-sent",
        "the places are sent along, though every rank knows them",
        WORK,
        "        dist.broadcast(places, group=self.group, group_src=0)\n" + WORK,
        BYTES,
        "too-many-bytes",
    ),
    mutant(
        "dense",
        "the whole buffer is reduced, and the rest is thrown away",
        WORK,
        "        whole = bucket.buffer.zero_()\n"
        "        whole[places] = values\n"
        "        work = dist.all_reduce(whole, group=self.group, async_op=True)\n",
        BYTES,
        "too-many-bytes",
        (PUT, "            pass\n"),
    ),
    mutant(
        "residual-not-saved",
        "the residual is not saved",
        SAVED,
        '        return {"generator": self.generator.get_state()}\n',
        STATE,
        "resume-differs",
        (
            '        self.residual.load_state_dict(state["residual"])\n'
            '        self.generator.set_state(state["generator"])\n',
            '        self.generator.set_state(state["generator"])\n',
        ),
    ),
    mutant(
        "generator-not-loaded",
        "BUGS 85: the random state is not restored",
        '        self.generator.set_state(state["generator"])\n',
        "",
        STATE,
        "resume-differs",
    ),
    mutant(
        "group-ignored",
        "the default group is used",
        WORK,
        "        work = dist.all_reduce(values, async_op=True)\n",
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
]
