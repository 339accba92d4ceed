"""Wrong implementations of exercises 1.1 and 1.2."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="sampler-same-shard",
        exercise="1.1",
        mistake="every rank gets the same shard",
        text="positions = self.rank + self.world_size * torch.arange(len(self))",
        becomes="positions = self.world_size * torch.arange(len(self))",
        caught_by="test_padded_shards_cover_the_data",
        told_as="same-shard",
    ),
    Mutant(
        id="sampler-all-data",
        exercise="1.1",
        mistake="every rank sees all the data",
        text="positions = self.rank + self.world_size * torch.arange(len(self))",
        becomes="positions = torch.arange(self.dataset_size)",
        caught_by="test_padded_shards_cover_the_data",
        told_as="same-shard",
    ),
    Mutant(
        id="sampler-contiguous-overlap",
        exercise="1.1",
        mistake="shards of neighbouring ranks overlap",
        text="positions = self.rank + self.world_size * torch.arange(len(self))",
        becomes="positions = self.rank * (len(self) - 3) + torch.arange(len(self))",
        caught_by="test_padded_shards_cover_the_data",
        told_as="gaps",
    ),
    Mutant(
        id="sampler-rank-seed",
        exercise="1.1",
        mistake="the shuffle's seed differs per rank",
        text="torch.Generator().manual_seed(self.seed + self.epoch)",
        becomes="torch.Generator().manual_seed(self.seed + self.epoch + 7919 * self.rank)",
        caught_by="test_epochs_differ_and_repeat",
        told_as="overlap",
    ),
    Mutant(
        id="sampler-rank-seed-coverage",
        exercise="1.1",
        mistake="the same, seen by the cover of the data",
        text="torch.Generator().manual_seed(self.seed + self.epoch)",
        becomes="torch.Generator().manual_seed(self.seed + self.epoch + 7919 * self.rank)",
        caught_by="test_padded_shards_cover_the_data",
        told_as="gaps",
    ),
    Mutant(
        id="sampler-epoch-ignored",
        exercise="1.1",
        mistake="the same order in each epoch",
        text="torch.Generator().manual_seed(self.seed + self.epoch)",
        becomes="torch.Generator().manual_seed(self.seed)",
        caught_by="test_epochs_differ_and_repeat",
        told_as="same-order-each-epoch",
    ),
    Mutant(
        id="sampler-set-epoch-empty",
        exercise="1.1",
        mistake="set_epoch does nothing",
        text="""        self.epoch = epoch
        # --- exercise 1.1: end""",
        becomes="""        pass
        # --- exercise 1.1: end""",
        caught_by="test_epochs_differ_and_repeat",
        told_as="same-order-each-epoch",
    ),
    Mutant(
        id="sampler-seed-ignored",
        exercise="1.1",
        mistake="the seed is ignored",
        text="torch.Generator().manual_seed(self.seed + self.epoch)",
        becomes="torch.Generator().manual_seed(self.epoch)",
        caught_by="test_epochs_differ_and_repeat",
        told_as="wrong-order",
    ),
    Mutant(
        id="sampler-global-generator",
        exercise="1.1",
        mistake="the order comes from the global generator",
        text="order = torch.randperm(self.dataset_size, generator=generator)",
        becomes="order = torch.randperm(self.dataset_size)",
        caught_by="test_epochs_differ_and_repeat",
        told_as="not-repeatable",
    ),
    Mutant(
        id="sampler-uneven",
        exercise="1.1",
        mistake="padding forgotten, uneven shards",
        text="            return -(-self.dataset_size // self.world_size)",
        becomes="            return self.num_real",
        caught_by="test_padded_shards_cover_the_data",
        told_as="uneven-steps",
    ),
    Mutant(
        id="sampler-drops-when-padding",
        exercise="1.1",
        mistake="samples are dropped where padding was asked for",
        text="            return -(-self.dataset_size // self.world_size)",
        becomes="            return self.dataset_size // self.world_size",
        caught_by="test_padded_shards_cover_the_data",
        told_as="gaps",
    ),
    Mutant(
        id="sampler-padding-real",
        exercise="1.1",
        mistake="padding counts as real samples",
        text="        return len(range(self.rank, self.dataset_size, self.world_size))",
        becomes="        return -(-self.dataset_size // self.world_size)",
        caught_by="test_padded_shards_cover_the_data",
        told_as="padding-counted",
    ),
    Mutant(
        id="sampler-position-forgotten-late",
        exercise="1.1",
        mistake="the position is forgotten at the end of the resumed pass: not if it is left early",
        text="""        start, self.skip = self.skip, 0
        return iter(mine[start:])
""",
        becomes="""        def entries():
            yield from mine[self.skip :]
            self.skip = 0

        return entries()
""",
        caught_by="test_resume_continues_where_training_was",
        told_as="skips-every-epoch",
    ),
    Mutant(
        id="sampler-order-while-running",
        exercise="1.1",
        mistake="the order is looked up while the pass runs: set_epoch changes it on the way",
        text="        return iter(mine[start:])\n",
        becomes="""        if not self.shuffle:
            return iter(mine[start:])

        def entry(i):
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.dataset_size, generator=generator)
            return int(order[positions[i] % self.dataset_size])

        return (entry(i) for i in range(start, len(self)))
""",
        caught_by="test_resume_continues_where_training_was",
        told_as="running",
    ),
    Mutant(
        id="sampler-own-seed-after-resume",
        exercise="1.1",
        mistake="a resumed sampler keeps its own seed",
        text='        self.seed = state["seed"]\n',
        becomes="",
        caught_by="test_resume_continues_where_training_was",
        told_as="seed-of-state",
    ),
    Mutant(
        id="sampler-seeds-globally",
        exercise="1.1",
        mistake="the global generator is seeded for the order",
        text="order = torch.randperm(self.dataset_size, generator=generator)",
        becomes=(
            "order = torch.randperm("
            "self.dataset_size, generator=torch.manual_seed(self.seed + self.epoch))"
        ),
        caught_by="test_epochs_differ_and_repeat",
        told_as="global-random-state",
    ),
    Mutant(
        id="sampler-keep-drops",
        exercise="1.1",
        mistake="the remainder is dropped where it should be kept",
        text="        return self.num_real\n",
        becomes="        return self.dataset_size // self.world_size\n",
        caught_by="test_dropped_and_kept_remainders",
        told_as="gaps",
    ),
    Mutant(
        id="sampler-resume-forgotten",
        exercise="1.1",
        mistake="the position is not restored",
        text='        self.skip = state["consumed"]',
        becomes="        self.skip = 0",
        caught_by="test_resume_continues_where_training_was",
        told_as="starts-over",
    ),
    Mutant(
        id="sampler-resume-every-epoch",
        exercise="1.1",
        mistake="every later pass skips the beginning, too",
        text="        start, self.skip = self.skip, 0",
        becomes="        start = self.skip",
        caught_by="test_resume_continues_where_training_was",
        told_as="skips-every-epoch",
    ),
    Mutant(
        id="sampler-resume-read-ahead",
        exercise="1.1",
        mistake="the position is what the loader read ahead",
        text='return {"epoch": self.epoch, "seed": self.seed, "consumed": consumed}',
        becomes='return {"epoch": self.epoch, "seed": self.seed, "consumed": consumed + 4}',
        caught_by="test_resume_continues_where_training_was",
        told_as="read-ahead-skipped",
    ),
    Mutant(
        id="loader-global-as-local",
        exercise="1.2",
        mistake="the global batch size is taken per rank",
        text="    return global_batch_size // world_size\n",
        becomes="    return global_batch_size\n",
        caught_by="test_batch_size_of_a_rank",
        told_as="global-batch-per-rank",
    ),
    Mutant(
        id="loader-rounds-batch",
        exercise="1.2",
        mistake="a batch that does not divide is silently rounded",
        text="    if min(global_batch_size, world_size) < 1 or global_batch_size % world_size:",
        becomes="    if min(global_batch_size, world_size) < 1:",
        caught_by="test_batch_size_of_a_rank",
        told_as="not-refused",
    ),
    Mutant(
        id="loader-global-batches",
        exercise="1.2",
        mistake="batches of the global size on every rank",
        text="ShardedBatchSampler(sampler, split_batch(global_batch_size, world_size))",
        becomes="ShardedBatchSampler(sampler, global_batch_size)",
        caught_by="test_steps_consume_the_global_batches",
        told_as="wrong-batches",
    ),
    Mutant(
        id="loader-uneven-steps",
        exercise="1.2",
        mistake="one rank has a batch less and the others hang",
        text='longest = -(-s.dataset_size // s.world_size) if s.remainder == "keep" else len(s)',
        becomes="longest = len(s)",
        caught_by="test_steps_consume_the_global_batches",
        told_as="uneven-steps",
    ),
    Mutant(
        id="loader-drops-last-batch",
        exercise="1.2",
        mistake="the last, partial batch is lost",
        text="        return -(-longest // self.batch_size)",
        becomes="        return longest // self.batch_size",
        caught_by="test_steps_consume_the_global_batches",
        told_as="lost-samples",
    ),
    Mutant(
        id="loader-empty-batch-shape",
        exercise="1.2",
        mistake="an empty batch has the wrong shape",
        text="        return [field[:0] for field in default_collate([self.dataset[0]])]",
        becomes="        return [torch.empty(0), torch.empty(0, dtype=torch.int64)]",
        caught_by="test_steps_consume_the_global_batches",
        told_as="empty-batch",
    ),
    Mutant(
        id="loader-resume-steps",
        exercise="1.2",
        mistake="a resumed epoch has as many batches as a whole one",
        text="        begun = self.sampler.skip // self.batch_size",
        becomes="        begun = 0",
        caught_by="test_resumed_loader_stays_in_step",
        told_as="wrong-position",
    ),
    Mutant(
        id="seed-same-on-ranks",
        exercise="1.2",
        mistake="the same random numbers on all ranks",
        text="mixed = np.random.SeedSequence(seed, spawn_key=(rank, worker)).generate_state(1)[0]",
        becomes="mixed = np.random.SeedSequence([seed, worker]).generate_state(1)[0]",
        caught_by="test_ranks_and_workers_draw_different_numbers",
        told_as="same-seed",
    ),
    Mutant(
        id="seed-plus-rank",
        exercise="1.2",
        mistake="seed + rank, so neighbouring seeds and ranks meet",
        text="mixed = np.random.SeedSequence(seed, spawn_key=(rank, worker)).generate_state(1)[0]",
        becomes="mixed = (seed + rank + 10_000 * worker) % 2**32",
        caught_by="test_ranks_and_workers_draw_different_numbers",
        told_as="same-seed",
    ),
    Mutant(
        id="seed-numpy-forgotten",
        exercise="1.2",
        mistake="numpy is not seeded",
        text="    np.random.seed(int(mixed))\n",
        becomes="",
        caught_by="test_ranks_and_workers_draw_different_numbers",
        told_as="not-repeatable",
    ),
    Mutant(
        id="seed-each-epoch-alike",
        exercise="1.2",
        mistake="workers draw the same in every epoch",
        text="        base_seed = torch.initial_seed() - worker\n",
        becomes="        base_seed = 1234\n",
        caught_by="test_ranks_and_workers_draw_different_numbers",
        told_as="same-seed-each-epoch",
    ),
    Mutant(
        id="seed-linear",
        exercise="1.2",
        mistake="a linear form of the three numbers: a thousand ranks meet the next seed",
        text="np.random.SeedSequence(seed, spawn_key=(rank, worker)).generate_state(1)[0]",
        becomes="(1000 * seed + rank + 100_000 * worker) % 2**32",
        caught_by="test_seeds_never_meet",
        told_as="same-seed",
    ),
    Mutant(
        id="loader-empty-field",
        exercise="1.2",
        mistake="the fields of an empty batch are of another dtype",
        text="        return [field[:0] for field in default_collate([self.dataset[0]])]",
        becomes="        return [f[:0].float() for f in default_collate([self.dataset[0]])]",
        caught_by="test_empty_batch_has_every_field",
        told_as="empty-batch",
    ),
    Mutant(
        id="loader-pins-always",
        exercise="1.2",
        mistake="memory is pinned wherever there is a GPU, also for a loader of the CPU",
        text='torch.device(device).type == "cuda" and torch.cuda.is_available()',
        becomes="torch.cuda.is_available()",
        caught_by="test_loader_settings_follow_workers_and_device",
        told_as="pinned",
    ),
    Mutant(
        id="seed-list",
        exercise="1.2",
        mistake="the three numbers are joined in one list: 2**32 counts as two of them",
        text="np.random.SeedSequence(seed, spawn_key=(rank, worker)).generate_state(1)[0]",
        becomes="np.random.SeedSequence([seed, rank, worker]).generate_state(1)[0]",
        caught_by="test_seeds_never_meet",
        told_as="same-seed",
    ),
    Mutant(
        id="seed-hash-of-text",
        exercise="1.2",
        mistake="Python's hash of a text, which is another one in each process",
        text="np.random.SeedSequence(seed, spawn_key=(rank, worker)).generate_state(1)[0]",
        becomes='hash(f"{seed} {rank} {worker}") % 2**32',
        caught_by="test_ranks_and_workers_draw_different_numbers",
        told_as="not-repeatable",
    ),
    Mutant(
        id="loader-eager-batches",
        exercise="1.2",
        mistake="batches are made by iter(): with workers the position is lost to one never read",
        text="""        begun = self.sampler.skip // self.batch_size
        mine = list(self.sampler)
        for start in range(0, (len(self) - begun) * self.batch_size, self.batch_size):
            yield mine[start : start + self.batch_size]
""",
        becomes="""        begun = self.sampler.skip // self.batch_size
        mine = list(self.sampler)
        starts = range(0, (len(self) - begun) * self.batch_size, self.batch_size)
        return iter([mine[start : start + self.batch_size] for start in starts])
""",
        caught_by="test_resumed_loader_stays_in_step",
        told_as="wrong-position",
    ),
    Mutant(
        id="sampler-one-pass-at-a-time",
        exercise="1.1",
        mistake="the sampler keeps its shard: a second pass changes the rest of the first",
        text="        return iter(mine[start:])\n",
        becomes="""        self.mine = mine
        for entry in range(start, len(mine)):
            yield self.mine[entry]
""",
        caught_by="test_resume_continues_where_training_was",
        told_as="running",
    ),
    Mutant(
        id="loader-workers-without-seed",
        exercise="1.2",
        mistake="the workers draw the same whatever the loader's seed is",
        text="generator=torch.Generator().manual_seed(seed),",
        becomes="generator=torch.Generator().manual_seed(0),",
        caught_by="test_ranks_and_workers_draw_different_numbers",
        told_as="seed-ignored",
    ),
    Mutant(
        id="sampler-one-state",
        exercise="1.1",
        mistake="all states are one dictionary: the next one changes those saved before",
        text='        return {"epoch": self.epoch, "seed": self.seed, "consumed": consumed}\n',
        becomes="""        self.told = getattr(self, "told", {})
        self.told.update(epoch=self.epoch, seed=self.seed, consumed=consumed)
        return self.told
""",
        caught_by="test_resume_continues_where_training_was",
        told_as="wrong-position",
    ),
]
