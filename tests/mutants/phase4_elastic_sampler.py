"""Wrong implementations of exercise 4.18."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="elastic-position-of-a-rank",
        exercise="4.18",
        mistake="the position is counted in this rank's samples, resumed by fewer it repeats some",
        text='"consumed": consumed}\n',
        becomes='"consumed": consumed // self.world_size}\n',
        caught_by="test_every_sample_once_however_many_ranks",
        told_as="consumed",
    ),
    Mutant(
        id="elastic-rounded-batch",
        exercise="4.18",
        mistake=(
            "every rank takes B // W samples; the global batch shrinks where W does not divide B"
        ),
        text="            yield batch[self.rank :: self.world_size]\n",
        becomes="""            part = len(batch) // self.world_size
            yield batch[self.rank * part : (self.rank + 1) * part]
""",
        caught_by="test_every_sample_once_however_many_ranks",
        told_as="global-batch",
    ),
    Mutant(
        id="elastic-local-batch-kept",
        exercise="4.18",
        mistake="the local batch is kept instead of the global one: fewer ranks take smaller steps",
        text="            yield batch[self.rank :: self.world_size]\n",
        becomes="""            part = self.batch_size // 4
            yield batch[self.rank * part : (self.rank + 1) * part]
""",
        caught_by="test_every_sample_once_however_many_ranks",
        told_as="global-batch",
    ),
    Mutant(
        id="elastic-dealt-first",
        exercise="4.18",
        mistake=(
            "the order is dealt out before it is divided into batches: they depend on the world size"
        ),
        text="""            batch = order[start : start + self.batch_size]
            yield batch[self.rank :: self.world_size]
""",
        becomes=(
            "            mine, size = order[self.rank :: self.world_size], -(-self.batch_size "
            "// self.world_size)\n"
            "            yield mine[start // self.batch_size * size :][:size]\n"
        ),
        caught_by="test_every_sample_once_however_many_ranks",
        told_as="global-batch",
    ),
    Mutant(
        id="elastic-blocks",
        exercise="4.18",
        mistake=(
            "parts are blocks of the rounded-up size: the last ranks have nothing, the first "
            "too much"
        ),
        text="            yield batch[self.rank :: self.world_size]\n",
        becomes="""            part = -(-len(batch) // self.world_size)
            yield batch[self.rank * part : (self.rank + 1) * part]
""",
        caught_by="test_every_sample_once_however_many_ranks",
        told_as="uneven",
    ),
    Mutant(
        id="elastic-order-of-this-world",
        exercise="4.18",
        mistake="the order is drawn from a seed that depends on the number of ranks",
        text="generator = torch.Generator().manual_seed(self.seed + self.epoch)\n",
        becomes=(
            "generator = torch.Generator().manual_seed(self.seed + self.epoch + self.world_size)\n"
        ),
        caught_by="test_every_sample_once_however_many_ranks",
        told_as="global-batch",
    ),
    Mutant(
        id="elastic-begins-anew",
        exercise="4.18",
        mistake="the resumed position is forgotten, the epoch begins from its first sample",
        text='state["seed"], state["consumed"]\n',
        becomes='state["seed"], 0\n',
        caught_by="test_every_sample_once_however_many_ranks",
        told_as="steps",
    ),
    Mutant(
        id="elastic-skips-for-ever",
        exercise="4.18",
        mistake="every later epoch leaves out its beginning, too",
        text="        begin, self.skip = self.skip, 0\n",
        becomes="        begin = self.skip\n",
        caught_by="test_epochs",
        told_as="resumed-epoch",
    ),
    Mutant(
        id="elastic-another-batch-accepted",
        exercise="4.18",
        mistake=(
            "a position counted in other batches is accepted, and the learning rate fits no more"
        ),
        text="""        for name in ("dataset_size", "batch_size"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"saved with a {name} of {state[name]}, resumed with {getattr(self, name)}"
                )
""",
        becomes="""        if state["dataset_size"] != self.dataset_size:
            raise ValueError(
                f"saved with {state['dataset_size']} samples, resumed with {self.dataset_size}"
            )
""",
        caught_by="test_positions_that_mean_something_else_are_refused",
        told_as="accepted",
    ),
    Mutant(
        id="elastic-unweighted",
        exercise="4.18",
        mistake="ranks with few samples weigh as much as those with many",
        text="    return num_samples * world_size / batch_size\n",
        becomes="    return 1.0\n",
        caught_by="test_weighted_losses_give_the_global_gradient",
        told_as="wrong",
    ),
    Mutant(
        id="elastic-weighted-by-share",
        exercise="4.18",
        mistake="the share of the batch, which data parallelism divides by W once more",
        text="    return num_samples * world_size / batch_size\n",
        becomes="    return num_samples / batch_size\n",
        caught_by="test_weighted_losses_give_the_global_gradient",
        told_as="equal-parts",
    ),
    Mutant(
        id="elastic-position-till-the-end",
        exercise="4.18",
        mistake="a pass that is left early leaves its beginning out of the next one, too",
        text="        begin, self.skip = self.skip, 0\n",
        becomes="        begin = self.skip\n",
        more=(
            (
                "            yield batch[self.rank :: self.world_size]\n",
                "            yield batch[self.rank :: self.world_size]\n        self.skip = 0\n",
            ),
        ),
        caught_by="test_epochs",
        told_as="resumed-epoch",
    ),
    Mutant(
        id="elastic-half-loaded",
        exercise="4.18",
        mistake="the position is taken before the sizes are compared",
        text='        for name in ("dataset_size", "batch_size"):\n',
        becomes="""        self.epoch, self.skip = state["epoch"], state["consumed"]
        for name in ("dataset_size", "batch_size"):
""",
        caught_by="test_positions_that_mean_something_else_are_refused",
        told_as="half-loaded",
    ),
    Mutant(
        id="elastic-global-stream",
        exercise="4.18",
        mistake="the order comes from the process's own stream, which is seeded anew",
        text="""            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.dataset_size, generator=generator).tolist()
""",
        becomes="""            torch.manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.dataset_size).tolist()
""",
        caught_by="test_epochs",
        told_as="moved-stream",
    ),
    Mutant(
        id="elastic-position-cut",
        exercise="4.18",
        mistake="the position is cut off at the data set's size, inside the last batch",
        text='| {"consumed": consumed}',
        becomes='| {"consumed": min(consumed, self.dataset_size)}',
        caught_by="test_every_sample_once_however_many_ranks",
        told_as="consumed",
    ),
]
