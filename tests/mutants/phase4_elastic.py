"""Wrong implementations of exercise 4.4."""

from distlab.grading.wrong import mutants_of

ANEW, READ = "test_chunks_are_cut_anew", "test_only_what_overlaps_is_read"
STREAMS = "test_random_streams"

CUT = "own[: len(chunk_of(numel, world_size, rank))].clone()}\n"
OVERLAP = "            if low < high:\n"
PART = "                parts.append(chunk[low - theirs.start : high - theirs.start])\n"
WALK = "    return walk(read(rank * saved.world_size // world_size), ())\n"
NEW = "        if rank < self.saved.world_size:\n"
NUMBERS = "np.random.SeedSequence([self.seed, self.step, rank])"

mutant = mutants_of("4.4", "elastic")

MUTANTS = [
    mutant(
        "padding-saved",
        "BUGS 74: the padding is saved with the chunk",
        CUT,
        "own.clone()}\n",
        ANEW,
        "exception",
    ),
    mutant(
        "view-saved",
        "the chunk is a view: training changes it, and all of its memory is kept",
        CUT,
        "own[: len(chunk_of(numel, world_size, rank))]}\n",
        READ,
        "view",
    ),
    mutant(
        "same-number",
        "BUGS 92: rank r takes the chunk of the old rank r",
        WALK,
        "    return read(rank % saved.world_size)\n",
        ANEW,
        "shape",
    ),
    mutant(
        "from-the-chunks-start",
        "BUGS 92: what overlaps is read from the old chunk's first element on",
        PART,
        "                parts.append(chunk[: high - low])\n",
        ANEW,
        "wrong",
    ),
    mutant(
        "reads-everything",
        "every rank reads the state of all ranks: on a cluster, W times the checkpoint",
        OVERLAP,
        "            read(other)\n" + OVERLAP,
        READ,
        "reads-too-much",
    ),
    mutant(
        "streams-repeated",
        "BUGS 16: a new rank takes the random streams of an old one: the same dropout twice",
        NEW,
        "        if rank >= self.saved.world_size:\n"
        "            mine = self.saved.own(rank % self.saved.world_size)\n"
        '            streams, states = mine["random"], {n: mine["parts"][n] for n in generators}\n'
        "        elif rank < self.saved.world_size:\n",
        STREAMS,
        "same-stream",
    ),
    mutant(
        "streams-without-step",
        "a rank that comes a second time draws the numbers of its first time again",
        NUMBERS,
        "np.random.SeedSequence([self.seed, rank])",
        STREAMS,
        "same-stream",
    ),
    mutant(
        "all-streams-new",
        "ranks that existed lose their streams, too",
        NEW,
        "        if rank < 0:\n",
        STREAMS,
        "stream-lost",
    ),
    mutant(
        "streams-of-this-process",
        "making a new rank's streams moves those of the process that does it",
        "    set_random_state(before)\n",
        "",
        STREAMS,
        "moved-stream",
    ),
]
