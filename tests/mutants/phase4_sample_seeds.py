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
        text='        key = f"{self.seed} {self.epoch} {index}".encode()\n',
        becomes="        return self.dataset[index]\n",
        more=(
            (
                "        before = random_state()\n",
                "",
            ),
            (
                """        words = np.frombuffer(hashlib.blake2b(key, digest_size=32).digest(), dtype=np.uint32)
        torch.default_generator.manual_seed(int(words[0]))  # it knows 2^32 streams
        np.random.seed(words[1:])
        random.seed(words.tobytes())
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
        text="{self.seed} {self.epoch} {index}",
        becomes="{self.seed + self.epoch + index}",
        caught_by="test_each_sample_has_its_own_numbers",
        told_as="same-numbers",
    ),
    Mutant(
        id="seeds-epoch-forgotten",
        exercise="4.16",
        mistake="the augmentation of a sample is the same in every epoch",
        text="{self.seed} {self.epoch} {index}",
        becomes="{self.seed} {index}",
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
    Mutant(
        id="seeds-digits-together",
        exercise="4.16",
        mistake="digits without a gap: epoch 1, sample 11 is epoch 11, sample 1",
        text="{self.seed} {self.epoch} {index}",
        becomes="{self.seed}{self.epoch}{index}",
        caught_by="test_each_sample_has_its_own_numbers",
        told_as="same-numbers",
    ),
    Mutant(
        id="seeds-hash-of-text",
        exercise="4.16",
        mistake="Python's hash of a text: every process has another one",
        text="        words = np.frombuffer(hashlib.blake2b(key, digest_size=32).digest(), dtype=np.uint32)\n",
        becomes="        words = np.random.SeedSequence(abs(hash(key))).generate_state(8)\n",
        caught_by="test_each_sample_has_its_own_numbers",
        told_as="not-repeatable",
    ),
    Mutant(
        id="seeds-libraries-alike",
        exercise="4.16",
        mistake="numpy and random get the same key, and draw the same numbers",
        text="        np.random.seed(words[1:])\n        random.seed(words.tobytes())\n",
        becomes="        np.random.seed([int(words[1])])\n        random.seed(int(words[1]))\n",
        caught_by="test_each_sample_has_its_own_numbers",
        told_as="same-stream",
    ),
    Mutant(
        id="seeds-few",
        exercise="4.16",
        mistake="numpy is seeded with 24 bits: of some thousand samples two have the same numbers",
        text="np.random.seed(words[1:])",
        becomes="np.random.seed(int(words[1]) >> 8)",
        caught_by="test_each_sample_has_its_own_numbers",
        told_as="few-seeds",
    ),
    Mutant(
        id="seeds-one-for-two",
        exercise="4.16",
        mistake="torch and numpy, which have the same generator, get the same seed",
        text="np.random.seed(words[1:])",
        becomes="np.random.seed(int(words[0]))",
        caught_by="test_each_sample_has_its_own_numbers",
        told_as="same-stream",
    ),
    Mutant(
        id="seeds-gpu",
        exercise="4.16",
        mistake="torch.manual_seed, which moves the streams of GPUs, too",
        text="torch.default_generator.manual_seed(int(words[0]))",
        becomes="torch.manual_seed(int(words[0]))",
        caught_by="test_each_sample_has_its_own_numbers",
        told_as="trace-in-streams",
    ),
    Mutant(
        id="seeds-interrupted",
        exercise="4.16",
        mistake="streams are put back after an Exception, not after Ctrl-C",
        text="""        finally:
            set_random_state(before)
""",
        becomes="""        except Exception:
            set_random_state(before)
            raise
        finally:
            if __import__("sys").exc_info()[0] is None:
                set_random_state(before)
""",
        caught_by="test_each_sample_has_its_own_numbers",
        told_as="trace-in-streams",
    ),
]
