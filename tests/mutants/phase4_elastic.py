"""Wrong implementations of exercise 4.4."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="elastic-padding-saved",
        exercise="4.4",
        mistake="the padding is saved with the shard",
        text="own[: len(chunk_of(numel, world_size, rank))].clone()}\n",
        becomes="own.clone()}\n",
        caught_by="test_shards_are_cut_anew",
        told_as="exception",
    ),
    Mutant(
        id="elastic-view-saved",
        exercise="4.4",
        mistake="the shard is a view: training changes it, and all of its memory is kept",
        text="own[: len(chunk_of(numel, world_size, rank))].clone()}\n",
        becomes="own[: len(chunk_of(numel, world_size, rank))]}\n",
        caught_by="test_only_what_overlaps_is_read",
        told_as="view",
    ),
    Mutant(
        id="elastic-same-number",
        exercise="4.4",
        mistake="rank r takes the shard of the old rank r",
        text="    return walk(read(rank * saved.world_size // world_size), ())\n",
        becomes="    return read(rank % saved.world_size)\n",
        caught_by="test_shards_are_cut_anew",
        told_as="shape",
    ),
    Mutant(
        id="elastic-from-the-chunks-start",
        exercise="4.4",
        mistake="what overlaps is read from the old shard's first element on",
        text="                parts.append(shard[low - theirs.start : high - theirs.start])\n",
        becomes="                parts.append(shard[: high - low])\n",
        caught_by="test_shards_are_cut_anew",
        told_as="wrong",
    ),
    Mutant(
        id="elastic-reads-everything",
        exercise="4.4",
        mistake="every rank reads the state of all ranks: on a cluster, W times the checkpoint",
        text="            if low < high:\n",
        becomes="""            read(other)
            if low < high:
""",
        caught_by="test_only_what_overlaps_is_read",
        told_as="reads-too-much",
    ),
    Mutant(
        id="elastic-streams-repeated",
        exercise="4.4",
        mistake="a new rank takes the random streams of an old one: the same dropout twice",
        text="        if rank < self.saved.world_size:\n",
        becomes="""        if rank >= self.saved.world_size:
            mine = self.saved.own(rank % self.saved.world_size)
            streams, states = mine["random"], {n: mine["parts"][n] for n in generators}
        elif rank < self.saved.world_size:
""",
        caught_by="test_random_streams",
        told_as="same-stream",
    ),
    Mutant(
        id="elastic-streams-without-step",
        exercise="4.4",
        mistake="a rank that comes a second time draws the numbers of its first time again",
        text="np.random.SeedSequence([self.seed, self.step, rank])",
        becomes="np.random.SeedSequence([self.seed, rank])",
        caught_by="test_random_streams",
        told_as="same-stream",
    ),
    Mutant(
        id="elastic-all-streams-new",
        exercise="4.4",
        mistake="ranks that existed lose their streams, too",
        text="        if rank < self.saved.world_size:\n",
        becomes="        if rank < 0:\n",
        caught_by="test_random_streams",
        told_as="stream-lost",
    ),
    Mutant(
        id="elastic-streams-of-this-process",
        exercise="4.4",
        mistake="making a new rank's streams moves those of the process that does it",
        text="    set_random_state(before)\n",
        becomes="",
        caught_by="test_random_streams",
        told_as="moved-stream",
    ),
]
