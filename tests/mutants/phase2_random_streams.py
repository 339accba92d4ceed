"""Wrong implementations of exercise 2.19."""

from distlab.grading.wrong import Mutant

EQUAL = "test_equal_where_replicated_different_where_sharded"
SEEDS, CALLER = "test_streams_of_neighbouring_seeds_differ", "test_callers_numbers_are_left_alone"
NEST, AGAIN = "test_regions_nest", "test_recomputation_drops_the_same"
STATE, REFUSED = "test_state_continues", "test_streams_refuse_bad_input"

PLACES = "        for name, number in ((REPLICATED, 0), (SHARDED, 1 + rank)):\n"
MIXED = "            mixed = int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])\n"
SAVE = "        self.states[self.current] = [g.get_state() for g in self.generators]\n"
REGION = """        before = self.current
        self._save()
        self._switch(name)
        try:
            yield
        finally:
            self._save()
            self._switch(before)
"""
REWOUND = "        return nullcontext(), _Rewound(self)\n"
BEGIN = "        streams.current, streams.states = current, dict(states)\n"
RESTORE = "        self.streams.current, self.streams.states = self.now\n"
STATES = "        states = self._save()\n"

MUTANTS = [
    Mutant(
        id="streams-shards-alike",
        exercise="2.19",
        bug="BUGS 64: the ranks drop the same elements of their shards",
        find=PLACES,
        replace="        for name, number in ((REPLICATED, 0), (SHARDED, 1)):\n",
        killed_by=EQUAL,
        cause="sharded-equal",
    ),
    Mutant(
        id="streams-replicas-differ",
        exercise="2.19",
        bug="BUGS 64: each rank drops other elements of a replicated tensor",
        find=PLACES,
        replace="        for name, number in ((REPLICATED, 100 + rank), (SHARDED, 1 + rank)):\n",
        killed_by=EQUAL,
        cause="replicated-differs",
    ),
    Mutant(
        id="streams-callers-for-replicated",
        exercise="2.19",
        bug="BUGS 64: replicated regions draw from the caller's numbers, which differ by rank",
        find="        return self._drawing_from(REPLICATED)\n",
        replace="        return nullcontext()\n",
        killed_by=EQUAL,
        cause="replicated-differs",
    ),
    Mutant(
        id="streams-one-for-both",
        exercise="2.19",
        bug="rank 0's shards draw from the replicated stream's seed",
        find=PLACES,
        replace="        for name, number in ((REPLICATED, 0), (SHARDED, rank)):\n",
        killed_by=EQUAL,
        cause="streams-equal",
    ),
    Mutant(
        id="streams-begin-again",
        exercise="2.19",
        bug="every region begins its stream again: all layers drop the same elements",
        find=REGION,
        replace="        outer = [g.get_state() for g in self.generators]\n"
        "        self._switch(name)\n"
        "        try:\n"
        "            yield\n"
        "        finally:\n"
        "            for generator, state in zip(self.generators, outer, strict=True):\n"
        "                generator.set_state(state)\n",
        killed_by=EQUAL,
        cause="stream-restarts",
    ),
    Mutant(
        id="streams-seed-plus-rank",
        exercise="2.19",
        bug="seed + rank: neighbouring seeds share streams",
        find=MIXED,
        replace="            mixed = seed + number\n",
        killed_by=SEEDS,
        cause="seeds-collide",
    ),
    Mutant(
        id="streams-seed-the-caller",
        exercise="2.19",
        bug="the default generator itself is seeded to make the streams",
        find="            fresh = [torch.Generator(g.device).manual_seed(mixed) for g in self.generators]\n",
        replace="            fresh = [g.manual_seed(mixed) for g in self.generators]\n",
        killed_by=CALLER,
        cause="caller-disturbed",
    ),
    Mutant(
        id="streams-not-put-back",
        exercise="2.19",
        bug="after a region its stream stays in the generator",
        find=REGION,
        replace="        self._save()\n        self._switch(name)\n        yield\n        self._save()\n",
        killed_by=CALLER,
        cause="caller-disturbed",
    ),
    Mutant(
        id="streams-exception-leaks",
        exercise="2.19",
        bug="an exception leaves the stream in the generator",
        find=REGION,
        replace="        before = self.current\n"
        "        self._save()\n"
        "        self._switch(name)\n"
        "        yield\n"
        "        self._save()\n"
        "        self._switch(before)\n",
        killed_by=CALLER,
        cause="caller-disturbed",
    ),
    Mutant(
        id="streams-nested-again",
        exercise="2.19",
        bug="a region inside one of its own kind repeats the numbers of the outer one",
        find=REGION,
        replace="        outer = [g.get_state() for g in self.generators]\n"
        "        self._switch(name)\n"
        "        try:\n"
        "            yield\n"
        "        finally:\n"
        "            self.states[name] = [g.get_state() for g in self.generators]\n"
        "            for generator, state in zip(self.generators, outer, strict=True):\n"
        "                generator.set_state(state)\n",
        killed_by=NEST,
        cause="nesting",
    ),
    Mutant(
        id="streams-not-rewound",
        exercise="2.19",
        bug="BUGS 64: checkpoint puts back the generator, nobody puts back the streams",
        find=REWOUND,
        replace="        return nullcontext(), nullcontext()\n",
        killed_by=AGAIN,
        cause="recomputed-differs",
    ),
    Mutant(
        id="streams-stay-rewound",
        exercise="2.19",
        bug="after the recomputation the next step draws the same numbers again",
        find=RESTORE,
        replace="        self.streams.current, _ = self.now\n",
        killed_by=AGAIN,
        cause="stream-rewound",
    ),
    Mutant(
        id="streams-rewound-once",
        exercise="2.19",
        bug="the remembered states move on with the first recomputation",
        find=BEGIN,
        replace="        streams.current, streams.states = current, states\n",
        killed_by=AGAIN,
        cause="recomputed-differs",
    ),
    Mutant(
        id="streams-state-stale",
        exercise="2.19",
        bug="the state of the stream in use is that from before its region",
        find=STATES,
        replace="        states = self.states\n",
        killed_by=STATE,
        cause="state-lost",
    ),
    Mutant(
        id="streams-state-of-one",
        exercise="2.19",
        bug="BUGS 85: only the sharded stream is restored",
        find="            self.states[name] = list(states[name])\n",
        replace="            if name == SHARDED:\n                self.states[name] = list(states[name])\n",
        killed_by=STATE,
        cause="state-lost",
    ),
    Mutant(
        id="streams-loaded-inside",
        exercise="2.19",
        bug="loaded inside of a region, which overwrites what was loaded when it ends",
        find="        if self.current != CALLER:\n",
        replace="        if self.current not in (CALLER, REPLICATED, SHARDED):\n",
        killed_by=REFUSED,
        cause="accepted",
    ),
]
