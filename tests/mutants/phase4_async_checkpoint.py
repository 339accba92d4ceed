"""Wrong implementations of exercise 4.3."""

from distlab.grading.wrong import mutants_of

COPIED, REUSED = "test_snapshot_is_a_copy", "test_snapshot_memory_is_used_again"
MOMENT, ONE = "test_file_holds_the_moment_of_the_call", "test_one_save_at_a_time"
ERRORS, LEFT = "test_errors_of_the_writer_are_raised", "test_nothing_is_left_behind"

TAKE = '        copies = self.snapshot.take({"trees": list(trees)})["trees"]\n'
START = "        self.writer.start()\n"
WAIT = "        self.wait()\n        trees"
KEPT = "            self.error = error\n"
LEAVE = "        self.close()\n"

ALONE = "test_a_single_process_needs_no_process_group"

mutant = mutants_of("4.3", "async")

MUTANTS = [
    mutant(
        "no-snapshot",
        "BUGS 94: the writer reads the live tensors while training changes them",
        TAKE,
        "        copies = list(trees)\n",
        MOMENT,
        "moment",
    ),
    mutant(
        "shallow",
        "BUGS 94: the dictionaries are copied, the tensors are not",
        TAKE,
        "        copies = [copy.copy(tree) for tree in trees]\n",
        MOMENT,
        "moment",
    ),
    mutant(
        "late-snapshot",
        "BUGS 94: the snapshot is taken by the writer, when training has gone on",
        TAKE,
        "        copies = list(trees)\n",
        MOMENT,
        "moment",
        (
            "            self.path = self.store.save(step, shared, own, score=score, metadata=metadata)\n",
            "            time.sleep(0.2)\n"
            "            shared, own = self.snapshot.take({'trees': [shared, own]})['trees']\n"
            "            self.path = self.store.save(step, shared, own, score=score, metadata=metadata)\n",
        ),
    ),
    mutant(
        "lists-shared",
        "tensors are copied, the lists and dictionaries beside them are the live ones",
        "            if type(value) in (list, tuple):\n",
        "            if type(value) in (list, tuple) and not every(value):\n"
        "                return value\n"
        "            if type(value) in (list, tuple):\n",
        COPIED,
        "moment",
        (
            "        def walk(value: Any, path: str) -> Any:\n",
            "        def every(value: Any) -> bool:\n"
            "            return any(isinstance(v, (Tensor, dict, list, tuple)) for v in value)\n\n"
            "        def walk(value: Any, path: str) -> Any:\n",
        ),
    ),
    mutant(
        "untied",
        "tied weights become two",
        "            if value.numel() == 0 or memory not in copies:\n",
        "            if True:\n",
        COPIED,
        "untied",
    ),
    mutant(
        "new-memory",
        "every snapshot takes new memory",
        "        self.tensors = fresh\n",
        "",
        REUSED,
        "new-memory",
    ),
    mutant(
        "synchronous",
        "save waits for the writer",
        START,
        START + "        self.writer.join()\n",
        MOMENT,
        "synchronous",
    ),
    mutant(
        "score-lost",
        "the writer forgets the score: the best checkpoint is deleted",
        "own, score=score, metadata=metadata)\n",
        "own, metadata=metadata)\n",
        ALONE,
        "score-lost",
    ),
    mutant(
        "group-needed",
        "a single process has to make a process group to save",
        "        if dist.is_initialized():\n",
        "        if True:\n",
        ALONE,
        "exception",
    ),
    mutant(
        "graph-kept",
        "the copy is recorded by autograd, and keeps the parameter alive",
        "copy_(value.detach(), non_blocking=True)\n",
        "copy_(value, non_blocking=True)\n",
        COPIED,
        "graph-kept",
    ),
    mutant(
        "two-at-a-time",
        "the second save does not wait: it overwrites the snapshot that is being written",
        WAIT,
        "        trees",
        ONE,
        "overtaken",
    ),
    mutant(
        "stall-of-copy",
        "waiting for the save before does not count as a stall",
        "        begun = time.perf_counter()\n        self.wait()\n",
        "        self.wait()\n        begun = time.perf_counter()\n",
        ONE,
        "stall",
    ),
    mutant(
        "error-lost",
        "what goes wrong in the writer is printed by the thread, at best",
        KEPT,
        "            print(error)\n",
        ERRORS,
        "error-lost",
    ),
    mutant(
        "error-for-ever",
        "an old error is raised again by every later call",
        "        error, self.error = self.error, None\n",
        "        error = self.error\n",
        ERRORS,
        "error-lost",
    ),
    mutant(
        "training-group",
        "the writers talk in the group that training uses",
        "            self.store.group = self.group\n",
        "            dist.destroy_process_group(self.group)\n            self.group = None\n",
        LEFT,
        "shared-group",
    ),
    mutant(
        "not-waited",
        "the with block ends while the last save is still under way",
        LEAVE,
        "        if kind is None:\n            self.close()\n",
        LEFT,
        "not-waited",
    ),
]
