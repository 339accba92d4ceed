"""Wrong implementations of exercise 2.19."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="streams-shards-alike",
        exercise="2.19",
        mistake="the ranks drop the same elements of their shards",
        text="        for name, number in ((REPLICATED, 0), (SHARDED, 1 + rank)):\n",
        becomes="        for name, number in ((REPLICATED, 0), (SHARDED, 1)):\n",
        caught_by="test_equal_where_replicated_different_where_sharded",
        told_as="sharded-equal",
    ),
    Mutant(
        id="streams-replicas-differ",
        exercise="2.19",
        mistake="each rank drops other elements of a replicated tensor",
        text="        for name, number in ((REPLICATED, 0), (SHARDED, 1 + rank)):\n",
        becomes="        for name, number in ((REPLICATED, 100 + rank), (SHARDED, 1 + rank)):\n",
        caught_by="test_equal_where_replicated_different_where_sharded",
        told_as="replicated-differs",
    ),
    Mutant(
        id="streams-callers-for-replicated",
        exercise="2.19",
        mistake="replicated regions draw from the caller's numbers, which differ by rank",
        text="        return self._drawing_from(REPLICATED)\n",
        becomes="        return nullcontext()\n",
        caught_by="test_equal_where_replicated_different_where_sharded",
        told_as="replicated-differs",
    ),
    Mutant(
        id="streams-one-for-both",
        exercise="2.19",
        mistake="rank 0's shards draw from the replicated stream's seed",
        text="        for name, number in ((REPLICATED, 0), (SHARDED, 1 + rank)):\n",
        becomes="        for name, number in ((REPLICATED, 0), (SHARDED, rank)):\n",
        caught_by="test_equal_where_replicated_different_where_sharded",
        told_as="streams-equal",
    ),
    Mutant(
        id="streams-begin-again",
        exercise="2.19",
        mistake="every region begins its stream again: all layers drop the same elements",
        text="""        before = self.current
        self._save()
        self._switch(name)
        try:
            yield
        finally:
            self._save()
            self._switch(before)
""",
        becomes="""        outer = [g.get_state() for g in self.generators]
        self._switch(name)
        try:
            yield
        finally:
            for generator, state in zip(self.generators, outer, strict=True):
                generator.set_state(state)
""",
        caught_by="test_equal_where_replicated_different_where_sharded",
        told_as="stream-restarts",
    ),
    Mutant(
        id="streams-seed-plus-rank",
        exercise="2.19",
        mistake="seed + rank: neighbouring seeds share streams",
        text="            mixed = int(sequence.generate_state(1, np.uint64)[0])\n",
        becomes="            mixed = seed + number\n",
        caught_by="test_streams_of_all_seeds_are_apart",
        told_as="seeds-collide",
    ),
    Mutant(
        id="streams-words-joined",
        exercise="2.19",
        mistake="seed and number are one list of words: seed 2^32 + s meets seed s of another rank",
        text="np.random.SeedSequence(seed, spawn_key=(number,))",
        becomes="np.random.SeedSequence([seed, number])",
        caught_by="test_streams_of_all_seeds_are_apart",
        told_as="seeds-collide",
    ),
    Mutant(
        id="streams-replicated-is-the-callers-seed",
        exercise="2.19",
        mistake="the replicated stream has the seed itself: a caller with that seed draws the same",
        text="            mixed = int(sequence.generate_state(1, np.uint64)[0])\n",
        becomes=(
            "            mixed = int(sequence.generate_state(1, np.uint64)[0]) if number else seed\n"
        ),
        caught_by="test_streams_of_all_seeds_are_apart",
        told_as="seeds-collide",
    ),
    Mutant(
        id="streams-half-loaded",
        exercise="2.19",
        mistake="a state of other generators is refused after one stream was loaded",
        text="        if any(len(states[name]) != here for name in (REPLICATED, SHARDED)):\n",
        becomes="""        self.states[REPLICATED] = list(states[REPLICATED])
        if any(len(states[name]) != here for name in (REPLICATED, SHARDED)):
""",
        caught_by="test_streams_refuse_bad_input",
        told_as=("late-check", "exception"),
    ),
    Mutant(
        id="streams-seed-the-caller",
        exercise="2.19",
        mistake="the default generator itself is seeded to make the streams",
        text=(
            "            fresh = [torch.Generator(g.device).manual_seed(mixed) for g in "
            "self.generators]\n"
        ),
        becomes="            fresh = [g.manual_seed(mixed) for g in self.generators]\n",
        caught_by="test_callers_numbers_are_left_alone",
        told_as="caller-disturbed",
    ),
    Mutant(
        id="streams-not-put-back",
        exercise="2.19",
        mistake="after a region its stream stays in the generator",
        text="""        before = self.current
        self._save()
        self._switch(name)
        try:
            yield
        finally:
            self._save()
            self._switch(before)
""",
        becomes="""        self._save()
        self._switch(name)
        yield
        self._save()
""",
        caught_by="test_callers_numbers_are_left_alone",
        told_as="after-exception",
    ),
    Mutant(
        id="streams-exception-leaks",
        exercise="2.19",
        mistake="an exception leaves the stream in the generator",
        text="""        before = self.current
        self._save()
        self._switch(name)
        try:
            yield
        finally:
            self._save()
            self._switch(before)
""",
        becomes="""        before = self.current
        self._save()
        self._switch(name)
        yield
        self._save()
        self._switch(before)
""",
        caught_by="test_callers_numbers_are_left_alone",
        told_as="after-exception",
    ),
    Mutant(
        id="streams-nested-again",
        exercise="2.19",
        mistake="a region inside one of its own kind repeats the numbers of the outer one",
        text="""        before = self.current
        self._save()
        self._switch(name)
        try:
            yield
        finally:
            self._save()
            self._switch(before)
""",
        becomes="""        outer = [g.get_state() for g in self.generators]
        self._switch(name)
        try:
            yield
        finally:
            self.states[name] = [g.get_state() for g in self.generators]
            for generator, state in zip(self.generators, outer, strict=True):
                generator.set_state(state)
""",
        caught_by="test_regions_nest",
        told_as="nesting",
    ),
    Mutant(
        id="streams-not-rewound",
        exercise="2.19",
        mistake="checkpoint puts back the generator, nobody puts back the streams",
        text="        return nullcontext(), _Rewound(self)\n",
        becomes="        return nullcontext(), nullcontext()\n",
        caught_by="test_recomputation_drops_the_same",
        told_as="recomputed-differs",
    ),
    Mutant(
        id="streams-stay-rewound",
        exercise="2.19",
        mistake="after the recomputation the next step draws the same numbers again",
        text="        self.streams.current, self.streams.states = self.now\n",
        becomes="        self.streams.current, _ = self.now\n",
        caught_by="test_recomputation_drops_the_same",
        told_as="stream-rewound",
    ),
    Mutant(
        id="streams-rewound-once",
        exercise="2.19",
        mistake="the remembered states move on with the first recomputation",
        text="        streams.current, streams.states = current, dict(states)\n",
        becomes="        streams.current, streams.states = current, states\n",
        caught_by="test_recomputation_drops_the_same",
        told_as="recomputed-differs",
    ),
    Mutant(
        id="streams-state-stale",
        exercise="2.19",
        mistake="the state of the stream in use is that from before its region",
        text="        states = self._save()\n",
        becomes="        states = self.states\n",
        caught_by="test_state_continues",
        told_as="state-lost",
    ),
    Mutant(
        id="streams-state-of-one",
        exercise="2.19",
        mistake="only the sharded stream is restored",
        text="        self.states |= {name: list(states[name]) for name in (REPLICATED, SHARDED)}\n",
        becomes="        self.states[SHARDED] = list(states[SHARDED])\n",
        caught_by="test_state_continues",
        told_as="state-lost",
    ),
    Mutant(
        id="streams-loaded-inside",
        exercise="2.19",
        mistake="loaded inside of a region, which overwrites what was loaded when it ends",
        text="        if self.current != CALLER:\n",
        becomes="        if self.current not in (CALLER, REPLICATED, SHARDED):\n",
        caught_by="test_streams_refuse_bad_input",
        told_as="accepted",
    ),
    Mutant(
        id="streams-by-global-rank",
        exercise="2.19",
        mistake="the sharded stream is that of the global rank",
        text="(SHARDED, 1 + rank)",
        becomes="(SHARDED, 1 + dist.get_rank())",
        caught_by="test_streams_of_a_group",
        told_as="group",
    ),
    Mutant(
        id="recomputed-in-a-region",
        exercise="2.19",
        mistake="after a recomputation the caller's numbers count as in use, also inside a region",
        text="        self.streams.current, self.streams.states = self.now\n",
        becomes="        self.streams.current, self.streams.states = CALLER, self.now[1]\n",
        caught_by="test_recomputation_drops_the_same",
        told_as="stream-rewound",
    ),
]
