"""Wrong implementations of exercise 4.3."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="async-no-snapshot",
        exercise="4.3",
        mistake="the writer reads the live tensors while training changes them",
        text='            copies = self.snapshot.take({"trees": list(trees)})["trees"]\n',
        becomes="            copies = list(trees)\n",
        caught_by="test_file_holds_the_moment_of_the_call",
        told_as="moment",
    ),
    Mutant(
        id="async-shallow",
        exercise="4.3",
        mistake="the dictionaries are copied, the tensors are not",
        text='            copies = self.snapshot.take({"trees": list(trees)})["trees"]\n',
        becomes="            copies = [copy.copy(tree) for tree in trees]\n",
        caught_by="test_file_holds_the_moment_of_the_call",
        told_as="moment",
    ),
    Mutant(
        id="async-late-snapshot",
        exercise="4.3",
        mistake="the snapshot is taken by the writer, when training has gone on",
        text='            copies = self.snapshot.take({"trees": list(trees)})["trees"]\n',
        becomes="            copies = list(trees)\n",
        more=(
            (
                (
                    "            self.path = self.store.save(step, shared, own, score=score, "
                    "metadata=metadata)\n"
                ),
                """            time.sleep(0.2)
            shared, own = self.snapshot.take({'trees': [shared, own]})['trees']
            self.path = self.store.save(step, shared, own, score=score, metadata=metadata)
""",
            ),
        ),
        caught_by="test_file_holds_the_moment_of_the_call",
        told_as="moment",
    ),
    Mutant(
        id="async-lists-shared",
        exercise="4.3",
        mistake="tensors are copied, the lists and dictionaries beside them are the live ones",
        text="        if type(value) in (list, tuple):\n",
        becomes="""        kinds = (Tensor, dict, list, tuple)
        if type(value) in (list, tuple) and not any(isinstance(v, kinds) for v in value):
            return value
        if type(value) in (list, tuple):
""",
        caught_by="test_snapshot_is_a_copy",
        told_as="moment",
    ),
    Mutant(
        id="async-untied",
        exercise="4.3",
        mistake="tied weights become two",
        text="        if value.numel() == 0 or memory not in copies:\n",
        becomes="        if True:\n",
        caught_by="test_snapshot_is_a_copy",
        told_as="untied",
    ),
    Mutant(
        id="async-new-memory",
        exercise="4.3",
        mistake="every snapshot takes new memory",
        text="        self.tensors = fresh\n",
        becomes="",
        caught_by="test_snapshot_memory_is_used_again",
        told_as="new-memory",
    ),
    Mutant(
        id="async-synchronous",
        exercise="4.3",
        mistake="save waits for the writer",
        text="        self.writer.start()\n",
        becomes="""        self.writer.start()
        self.writer.join()
""",
        caught_by="test_file_holds_the_moment_of_the_call",
        told_as="synchronous",
    ),
    Mutant(
        id="async-score-lost",
        exercise="4.3",
        mistake="the writer forgets the score: the best checkpoint is deleted",
        text="own, score=score, metadata=metadata)\n",
        becomes="own, metadata=metadata)\n",
        caught_by="test_a_single_process_needs_no_process_group",
        told_as="score-lost",
    ),
    Mutant(
        id="async-group-needed",
        exercise="4.3",
        mistake="a single process has to make a process group to save",
        text="        if dist.is_initialized():\n",
        becomes="        if True:\n",
        caught_by="test_a_single_process_needs_no_process_group",
        told_as="exception",
    ),
    Mutant(
        id="async-graph-kept",
        exercise="4.3",
        mistake="the copy is recorded by autograd, and keeps the parameter alive",
        text="copy_(value.detach(), non_blocking=True)\n",
        becomes="copy_(value, non_blocking=True)\n",
        caught_by="test_snapshot_is_a_copy",
        told_as="graph-kept",
    ),
    Mutant(
        id="async-two-at-a-time",
        exercise="4.3",
        mistake="the second save does not wait: it overwrites the snapshot that is being written",
        text="""        self.wait()
        trees""",
        becomes="        trees",
        caught_by="test_one_save_at_a_time",
        told_as="overtaken",
    ),
    Mutant(
        id="async-stall-of-copy",
        exercise="4.3",
        mistake="waiting for the save before does not count as a stall",
        text="""        begun = time.perf_counter()
        self.wait()
""",
        becomes="""        self.wait()
        begun = time.perf_counter()
""",
        caught_by="test_one_save_at_a_time",
        told_as="stall",
    ),
    Mutant(
        id="async-error-lost",
        exercise="4.3",
        mistake="what goes wrong in the writer is printed by the thread, at best",
        text="            self.error = error\n",
        becomes="            print(error)\n",
        caught_by="test_errors_of_the_writer_are_raised",
        told_as="error-lost",
    ),
    Mutant(
        id="async-error-for-ever",
        exercise="4.3",
        mistake="an old error is raised again by every later call",
        text="        error, self.error = self.error, None\n",
        becomes="        error = self.error\n",
        caught_by="test_errors_of_the_writer_are_raised",
        told_as="error-lost",
    ),
    Mutant(
        id="async-training-group",
        exercise="4.3",
        mistake="the writers talk in the group that training uses",
        text="            self.store.group = self.group\n",
        becomes="""            dist.destroy_process_group(self.group)
            self.group = None
""",
        caught_by="test_nothing_is_left_behind",
        told_as="shared-group",
    ),
    Mutant(
        id="async-not-waited",
        exercise="4.3",
        mistake="the with block ends while the last save is still under way",
        text="        self.close()\n",
        becomes="""        if kind is None:
            self.close()
""",
        caught_by="test_nothing_is_left_behind",
        told_as="not-waited",
    ),
    Mutant(
        id="async-copy-fails-alone",
        exercise="4.3",
        mistake="a rank that can't copy raises at once, and the others' writers wait for it",
        text="        except Exception as error:\n            copies",
        becomes="        except ArithmeticError as error:\n            copies",
        caught_by="test_errors_of_the_writer_are_raised",
        told_as=("running", "hang", "error-lost"),
    ),
    Mutant(
        id="async-store-taken",
        exercise="4.3",
        mistake="the caller's store is given the writers' group, which is gone after close",
        text="copy.copy(store), None",
        becomes="store, None",
        caught_by="test_ranks_of_a_group_save_for_themselves",
        told_as=("store-changed", "exception"),
    ),
    Mutant(
        id="async-copies-kept",
        exercise="4.3",
        mistake="memory of tensors that are gone is never given back",
        text="        self.tensors = fresh\n",
        becomes="        self.tensors |= fresh\n",
        caught_by="test_snapshot_memory_is_used_again",
        told_as="memory-kept",
    ),
    Mutant(
        id="async-any-dtype",
        exercise="4.3",
        mistake="a tensor of another dtype is copied to the memory of the last one, and takes its dtype",
        text="(old.shape, old.dtype) == (value.shape, value.dtype):",
        becomes="old.shape == value.shape:",
        caught_by="test_snapshot_memory_is_used_again",
        told_as="moment",
    ),
    Mutant(
        id="async-keys-as-text",
        exercise="4.3",
        mistake="the keys 1 and '1' share a path, so two tensors share memory from the second copy on",
        text="{path}/{k!r}",
        becomes="{path}/{k}",
        caught_by="test_snapshot_memory_is_used_again",
        told_as="moment",
    ),
]
