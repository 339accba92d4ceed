"""Wrong implementations of exercise 4.16."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="seeds-torch-only",
        exercise="4.16",
        mistake="torch's stream is restored, random's is not",
        text='    random.setstate(state["random"])\n',
        becomes="",
        caught_by="test_streams_go_on_where_they_were",
        told_as="random",
    ),
    Mutant(
        id="seeds-numpy-half",
        exercise="4.16",
        mistake="numpy's words are restored without the position among them",
        text="    np.random.set_state((name, words.cpu().numpy().astype(np.uint32), *numbers))\n",
        becomes="    np.random.set_state((name, words.cpu().numpy().astype(np.uint32), 0))\n",
        caught_by="test_streams_go_on_where_they_were",
        told_as="random",
    ),
    Mutant(
        id="seeds-worker-streams",
        exercise="4.16",
        mistake="samples take what the worker's own streams give",
        text=(
            "        mixed = int(np.random.SeedSequence([self.seed, self.epoch, "
            "index]).generate_state(1)[0])\n"
        ),
        becomes="        return self.dataset[index]\n",
        more=(
            (
                "        before = random_state()\n",
                "",
            ),
            (
                """        torch.default_generator.manual_seed(mixed)
        np.random.seed(mixed)
        random.seed(mixed)
        try:
            return self.dataset[index]
        finally:
            set_random_state(before)
""",
                "",
            ),
        ),
        caught_by="test_each_sample_has_its_own_numbers",
        told_as="trace-in-streams",
    ),
    Mutant(
        id="seeds-sum-of-seeds",
        exercise="4.16",
        mistake="seed + epoch + index: sample 1 of epoch 0 is sample 0 of epoch 1",
        text=(
            "        mixed = int(np.random.SeedSequence([self.seed, self.epoch, "
            "index]).generate_state(1)[0])\n"
        ),
        becomes="        mixed = self.seed + self.epoch + index\n",
        caught_by="test_each_sample_has_its_own_numbers",
        told_as="same-numbers",
    ),
    Mutant(
        id="seeds-epoch-forgotten",
        exercise="4.16",
        mistake="the augmentation of a sample is the same in every epoch",
        text="generate_state(1)[0])\n",
        becomes="generate_state(1)[0]) - 0 * self.epoch\n",
        more=(
            (
                "SeedSequence([self.seed, self.epoch, index])",
                "SeedSequence([self.seed, index])",
            ),
        ),
        caught_by="test_each_sample_has_its_own_numbers",
        told_as="same-numbers",
    ),
    Mutant(
        id="seeds-trace",
        exercise="4.16",
        mistake="loading a sample moves the training process's own streams",
        text="            set_random_state(before)\n",
        becomes="            pass\n",
        caught_by="test_each_sample_has_its_own_numbers",
        told_as="trace-in-streams",
    ),
]
