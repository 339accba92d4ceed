"""Wrong implementations of exercise 4.18."""

from distlab.grading.wrong import mutants_of

EVERY = "test_every_sample_once_however_many_ranks"
REFUSED = "test_positions_that_mean_something_else_are_refused"
EPOCHS = "test_epochs"
WEIGHTED = "test_weighted_losses_give_the_global_gradient"

DEAL = "            yield batch[self.rank :: self.world_size]\n"
CONSUMED = '"consumed": consumed}\n'
SEEDED = "generator = torch.Generator().manual_seed(self.seed + self.epoch)\n"
BEGIN = "        begin, self.skip = self.skip, 0\n"
WEIGHT = "    return num_samples * world_size / batch_size\n"

mutant = mutants_of("4.18", "elastic")

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
]
