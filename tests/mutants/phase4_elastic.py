"""Wrong implementations of exercise 4.4."""

from distlab.grading.wrong import mutants_of

EVERY, REFUSED, EPOCHS = (
    "test_every_sample_once_however_many_ranks",
    "test_positions_that_mean_something_else_are_refused",
    "test_epochs",
)
WEIGHTED, ANEW, READ = (
    "test_weighted_losses_give_the_global_gradient",
    "test_chunks_are_cut_anew",
    "test_only_what_overlaps_is_read",
)
CURVE, STREAMS = "test_loss_curve_is_the_uninterrupted_one", "test_random_streams"

DEAL = "            yield batch[self.rank :: self.world_size]\n"
CONSUMED = '"consumed": consumed}\n'
SEEDED = "generator = torch.Generator().manual_seed(self.seed + self.epoch)\n"
BEGIN = "        begin, self.skip = self.skip, 0\n"
WEIGHT = "    return num_samples * world_size / batch_size\n"
CUT = "own[: len(chunk_of(numel, world_size, rank))].clone()}\n"
OVERLAP = "            if low < high:\n"
PART = "                parts.append(chunk[low - theirs.start : high - theirs.start])\n"
WALK = "    return walk(read(rank * saved.world_size // world_size), ())\n"
NEW = "        if rank < self.saved.world_size:\n"
NUMBERS = "np.random.SeedSequence([self.seed, self.step, rank])"

mutant = mutants_of("4.4", "elastic")

MUTANTS = [
    mutant(
        "position-of-a-rank",
        "BUGS 92: the position is counted in this rank's samples, resumed by fewer it repeats some",
        CONSUMED,
        '"consumed": consumed // self.world_size}\n',
        EVERY,
        "steps",
    ),
    mutant(
        "rounded-batch",
        "BUGS 92: every rank takes B // W samples; the global batch shrinks where W does not divide B",
        DEAL,
        "            part = len(batch) // self.world_size\n"
        "            yield batch[self.rank * part : (self.rank + 1) * part]\n",
        EVERY,
        "global-batch",
    ),
    mutant(
        "local-batch-kept",
        "BUGS 92: the local batch is kept instead of the global one: fewer ranks take smaller steps",
        DEAL,
        "            part = self.batch_size // 4\n"
        "            yield batch[self.rank * part : (self.rank + 1) * part]\n",
        EVERY,
        "global-batch",
    ),
    mutant(
        "dealt-first",
        "the order is dealt out before it is cut into batches: they depend on the world size",
        "            batch = order[start : start + self.batch_size]\n" + DEAL,
        "            mine, size = order[self.rank :: self.world_size], -(-self.batch_size // self.world_size)\n"
        "            yield mine[start // self.batch_size * size :][:size]\n",
        EVERY,
        "global-batch",
    ),
    mutant(
        "blocks",
        "parts are blocks of the rounded-up size: the last ranks have nothing, the first too much",
        DEAL,
        "            part = -(-len(batch) // self.world_size)\n"
        "            yield batch[self.rank * part : (self.rank + 1) * part]\n",
        EVERY,
        "uneven",
    ),
    mutant(
        "order-of-this-world",
        "BUGS 12: the order is drawn from a seed that depends on the number of ranks",
        SEEDED,
        "generator = torch.Generator().manual_seed(self.seed + self.epoch + self.world_size)\n",
        EVERY,
        "global-batch",
    ),
    mutant(
        "begins-anew",
        "BUGS 86: the resumed position is forgotten, the epoch begins from its first sample",
        'state["seed"], state["consumed"]\n',
        'state["seed"], 0\n',
        EVERY,
        "steps",
    ),
    mutant(
        "skips-for-ever",
        "every later epoch leaves out its beginning, too",
        BEGIN,
        "        begin = self.skip\n",
        EPOCHS,
        "resumed-epoch",
    ),
    mutant(
        "another-batch-accepted",
        "a position counted in other batches is accepted, and the learning rate fits no more",
        '        for name in ("dataset_size", "batch_size"):\n',
        '        for name in ("dataset_size",):\n',
        REFUSED,
        "accepted",
    ),
    mutant(
        "unweighted",
        "ranks with few samples weigh as much as those with many",
        WEIGHT,
        "    return 1.0\n",
        WEIGHTED,
        "wrong",
    ),
    mutant(
        "weighted-by-share",
        "the share of the batch, which data parallelism divides by W once more",
        WEIGHT,
        "    return num_samples / batch_size\n",
        WEIGHTED,
        "equal-parts",
    ),
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
