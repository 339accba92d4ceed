"""Wrong implementations of exercise 4.16."""

from distlab.grading.wrong import mutants_of

STREAMS = "test_streams_go_on_where_they_were"
SAMPLE = "test_each_sample_has_its_own_numbers"

MIXED = "        mixed = int(np.random.SeedSequence([self.seed, self.epoch, index]).generate_state(1)[0])\n"

mutant = mutants_of("4.16", "seeds")

MUTANTS = [
    mutant(
        "torch-only",
        "BUGS 85: torch's stream is restored, random's is not",
        '    random.setstate(state["random"])\n',
        "",
        STREAMS,
        "random",
    ),
    mutant(
        "numpy-half",
        "numpy's words are restored without the place among them",
        "    np.random.set_state((name, words.cpu().numpy().astype(np.uint32), *numbers))\n",
        "    np.random.set_state((name, words.cpu().numpy().astype(np.uint32), 0))\n",
        STREAMS,
        "random",
    ),
    mutant(
        "worker-streams",
        "samples take what the worker's own streams give",
        MIXED,
        "        return self.dataset[index]\n",
        SAMPLE,
        "trace-in-streams",
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
    mutant(
        "sum-of-seeds",
        "seed + epoch + index: sample 1 of epoch 0 is sample 0 of epoch 1",
        MIXED,
        "        mixed = self.seed + self.epoch + index\n",
        SAMPLE,
        "same-numbers",
    ),
    mutant(
        "epoch-forgotten",
        "the augmentation of a sample is the same in every epoch",
        "generate_state(1)[0])\n",
        "generate_state(1)[0]) - 0 * self.epoch\n",
        SAMPLE,
        "same-numbers",
        ("SeedSequence([self.seed, self.epoch, index])", "SeedSequence([self.seed, index])"),
    ),
    mutant(
        "trace",
        "loading a sample moves the training process's own streams",
        "            set_random_state(before)\n",
        "            pass\n",
        SAMPLE,
        "trace-in-streams",
    ),
]
