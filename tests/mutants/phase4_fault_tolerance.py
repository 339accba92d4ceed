"""Wrong implementations of exercise 4.15."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="agree-old-deleted-first",
        exercise="4.15",
        mistake="room is made before the new checkpoint is finished",
        text="            written = self._agree(partial(write_trees, aside, trees))\n",
        becomes="""            if rank == 0 and self.files.names():
                old = self.folder / self.files.names()[-1]
                old.rename(f"{old}{ASIDE}")
                shutil.rmtree(f"{old}{ASIDE}")
            written = self._agree(partial(write_trees, aside, trees))
""",
        caught_by="test_full_disk",
        told_as="previous-lost",
    ),
    Mutant(
        id="agree-every-rank-writes",
        exercise="4.15",
        mistake="every rank writes the shared state to the same path",
        text=(
            "        trees = {own_file(rank): own or {}} | ({SHARED: shared} if rank == 0 "
            "else {})\n"
        ),
        becomes="        trees = {own_file(rank): own or {}, SHARED: shared}\n",
        caught_by="test_files_are_safe_and_written_once",
        told_as="exception",
    ),
    Mutant(
        id="agree-every-rank-begins",
        exercise="4.15",
        mistake="every rank makes the folder",
        text=(
            '        name = self._agree(lambda: self.files.begin(step) if rank == 0 else "")[0]\n'
        ),
        becomes="        name = self.files.begin(step)\n",
        caught_by="test_what_was_saved_is_loaded",
        told_as="exception",
    ),
    Mutant(
        id="agree-rank-0s-state",
        exercise="4.15",
        mistake="rank 0 writes its own state for everybody",
        text="            written = self._agree(partial(write_trees, aside, trees))\n",
        becomes=(
            "            trees |= {own_file(r): own or {} for r in "
            "range(dist.get_world_size(self.group))}\n"
            "            written = self._agree(lambda: write_trees(aside, trees) if rank == 0 else {})\n"
        ),
        caught_by="test_what_was_saved_is_loaded",
        told_as="own-state",
    ),
    Mutant(
        id="agree-device-of-old",
        exercise="4.15",
        mistake="map_location is ignored",
        text="read_tree(folder / SHARED, device)])",
        becomes="read_tree(folder / SHARED)])",
        caught_by="test_what_was_saved_is_loaded",
        told_as="device",
    ),
    Mutant(
        id="agree-no-barrier",
        exercise="4.15",
        mistake="the others go on before rank 0 has finished",
        text=(
            "            self._agree(lambda: self.files.finish(name, manifest) if rank == 0 "
            "else None)\n"
        ),
        becomes="""            if rank == 0:
                self.files.finish(name, manifest)
""",
        more=(
            (
                "        self._agree(lambda: self.files.prune(self.keep, self.keep_best) if rank == 0 else None)\n",
                """        if rank == 0:
            self.files.prune(self.keep, self.keep_best)
""",
            ),
        ),
        caught_by="test_nobody_goes_on_before_rank_0_has_finished",
        told_as="too-early",
    ),
    Mutant(
        id="agree-own-verdict",
        exercise="4.15",
        mistake="each rank judges by what it has hashed itself",
        text="            problems = [problem for problem in verdicts if problem]\n",
        becomes=(
            "            problems = [problem for problem in verdicts[share[0] : share[0] + 1] "
            "if problem]\n"
        ),
        caught_by="test_damaged_checkpoints_are_passed_over",
        told_as="mismatch",
    ),
    Mutant(
        id="agree-own-choice",
        exercise="4.15",
        mistake="each rank looks for the newest checkpoint by itself",
        text=(
            "        names = self._agree(lambda: self.files.names() if self.rank == 0 else [])[0]\n"
        ),
        becomes="        names = self.files.names()\n",
        more=(
            (
                "            verdicts = self._agree(partial(self.files.problem, name, *share))\n",
                "            verdicts = [self.files.problem(name)]\n",
            ),
            (
                "        self._agree(read)\n",
                "        read()\n",
            ),
        ),
        caught_by="test_all_ranks_load_the_same",
        told_as="disagree",
    ),
    Mutant(
        id="agree-silent",
        exercise="4.15",
        mistake="what was passed over is not named",
        text="                return self._read(name, map_location, tuple(skipped))\n",
        becomes="                return self._read(name, map_location, ())\n",
        caught_by="test_damaged_checkpoints_are_passed_over",
        told_as="skipped-silently",
    ),
    Mutant(
        id="agree-silent-restart",
        exercise="4.15",
        mistake="all checkpoints are damaged: as if there had never been any",
        text="        if any(UNFINISHED not in text for text in skipped):\n",
        becomes="        if False:\n",
        caught_by="test_nothing_and_nothing_intact_are_different",
        told_as="silent-restart",
    ),
    Mutant(
        id="agree-rank-alone",
        exercise="4.15",
        mistake="a rank whose disk is full leaves the others waiting",
        text="""        except Exception as error:
            problem = f"{type(error).__name__}: {error}"[:1000]
""",
        becomes="""        except ZeroDivisionError:
            pass
""",
        caught_by="test_full_disk",
        told_as="mismatch",
    ),
    Mutant(
        id="agree-error-of-one",
        exercise="4.15",
        mistake="only the rank whose disk is full hears of it",
        text="""        if failed:
            raise CheckpointError(""",
        becomes="""        if problem:
            raise CheckpointError(""",
        caught_by="test_full_disk",
        told_as="mismatch",
    ),
    Mutant(
        id="agree-leftovers",
        exercise="4.15",
        mistake="what a failed save has written stays, and fills the disk",
        text="            self._agree(lambda: discard(aside, folder) if rank == 0 else None)\n",
        becomes="",
        caught_by="test_full_disk",
        told_as="leftovers",
    ),
    Mutant(
        id="agree-every-rank-prunes",
        exercise="4.15",
        mistake="every rank deletes the old ones",
        text="        self._agree(lambda: self.files.prune(self.keep, self.keep_best) if rank == 0 else None)\n",
        becomes="        self._agree(lambda: self.files.prune(self.keep, self.keep_best))\n",
        caught_by="test_nobody_goes_on_before_rank_0_has_finished",
        told_as="not-saved",
    ),
    Mutant(
        id="agree-world-for-group",
        exercise="4.15",
        mistake="each rank hashes its share of as many as there are ranks in the world",
        text="dist.get_world_size(self.group) if",
        becomes="dist.get_world_size() if",
        more=(
            (
                "        everyone = values_of_all([result, problem], self.group)\n",
                "        everyone = values_of_all([result, problem])\n",
            ),
        ),
        caught_by="test_groups_save_each_for_itself",
        told_as=("hang", "mismatch", "group", "exception"),
    ),
    Mutant(
        id="agree-step-zero",
        exercise="4.15",
        mistake="load(0) takes the newest: a step of 0 counts as none",
        text="        if step is not None:\n            names",
        becomes="        if step:\n            names",
        caught_by="test_refusals",
        told_as="not-this-step",
    ),
    Mutant(
        id="agree-read-alone",
        exercise="4.15",
        mistake="a rank that can't take the tensors raises alone",
        text="        self._agree(read)\n",
        becomes="        read()\n",
        caught_by="test_one_rank_can_not_read",
        told_as=("one-sided", "mismatch", "hang"),
    ),
    Mutant(
        id="agree-unfinished-is-damage",
        exercise="4.15",
        mistake="a save that was killed counts as a damaged checkpoint: training can't begin anew",
        text="        if any(UNFINISHED not in text for text in skipped):\n",
        becomes="        if skipped:\n",
        caught_by="test_nothing_and_nothing_intact_are_different",
        told_as="not-none",
    ),
    Mutant(
        id="agree-deletion-undoes",
        exercise="4.15",
        mistake="old ones that can't be deleted take the new checkpoint with them",
        text="""            self._agree(lambda: self.files.finish(name, manifest) if rank == 0 else None)
        except""",
        becomes="""            self._agree(lambda: self.files.finish(name, manifest) if rank == 0 else None)
            self._agree(lambda: self.files.prune(self.keep, self.keep_best) if rank == 0 else None)
        except""",
        more=(
            (
                """        self._agree(lambda: self.files.prune(self.keep, self.keep_best) if rank == 0 else None)
        return folder
""",
                "        return folder\n",
            ),
        ),
        caught_by="test_old_ones_can_not_be_deleted",
        told_as="lost",
    ),
    Mutant(
        id="agree-late-leftovers",
        exercise="4.15",
        mistake="the other ranks raise before rank 0 has cleared the failed save away",
        text="            self._agree(lambda: discard(aside, folder) if rank == 0 else None)\n",
        becomes="            discard(aside, folder) if rank == 0 else None\n",
        caught_by="test_what_can_not_be_saved_is_refused_by_all",
        told_as="leftovers",
    ),
    Mutant(
        id="agree-long-errors",
        exercise="4.15",
        mistake="the text of an error travels in full, however long it is",
        text='f"{type(error).__name__}: {error}"[:1000]',
        becomes='f"{type(error).__name__}: {error}"',
        caught_by="test_what_can_not_be_saved_is_refused_by_all",
        told_as="too-many-bytes",
    ),
]
