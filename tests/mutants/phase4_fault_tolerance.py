"""Wrong implementations of exercise 4.15."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="agree-old-deleted-first",
        exercise="4.15",
        mistake="room is made before the new checkpoint is finished",
        text="            written = self._agree(write)\n",
        becomes="""            if rank == 0 and self.files.names():
                old = self.folder / self.files.names()[-1]
                old.rename(f"{old}{ASIDE}")
                shutil.rmtree(f"{old}{ASIDE}")
            written = self._agree(write)
""",
        caught_by="test_full_disk",
        told_as="previous-lost",
    ),
    Mutant(
        id="agree-every-rank-writes",
        exercise="4.15",
        mistake="every rank writes the shared state to the same path",
        text=(
            "            trees = {own_file(rank): own or {}} | ({SHARED: shared} if rank == 0 "
            "else {})\n"
        ),
        becomes="            trees = {own_file(rank): own or {}, SHARED: shared}\n",
        caught_by="test_files_are_safe_and_written_once",
        told_as="exception",
    ),
    Mutant(
        id="agree-every-rank-begins",
        exercise="4.15",
        mistake="every rank makes the folder",
        text=(
            "        name = self._agree(lambda: self.files.begin(step) if rank == 0 else \"\")[0]\n"
        ),
        becomes="        name = self.files.begin(step)\n",
        caught_by="test_what_was_saved_is_loaded",
        told_as="exception",
    ),
    Mutant(
        id="agree-rank-0s-state",
        exercise="4.15",
        mistake="rank 0 writes its own state for everybody",
        text="            return write_trees(aside, trees)\n",
        becomes=(
            "            trees |= {own_file(r): own or {} for r in "
            "range(dist.get_world_size(self.group))}\n"
            "            return write_trees(aside, trees) if rank == 0 else {}\n"
        ),
        caught_by="test_what_was_saved_is_loaded",
        told_as="own-state",
    ),
    Mutant(
        id="agree-device-of-old",
        exercise="4.15",
        mistake="map_location is ignored",
        text="        self._agree(lambda: trees.append(read_tree(folder / SHARED, device)))\n",
        becomes="        self._agree(lambda: trees.append(read_tree(folder / SHARED)))\n",
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
                "        self._agree(lambda: self.files.prune(*kept) if rank == 0 else None)\n",
                """        if rank == 0:
            self.files.prune(*kept)
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
            "        names = self._agree(lambda: self.files.names() if self.rank == 0 else "
            "[])[0]\n"
        ),
        becomes="        names = self.files.names()\n",
        more=(
            (
                "            verdicts = self._agree(partial(self.files.problem, name, *share))\n",
                "            verdicts = [self.files.problem(name)]\n",
            ),
            (
                "        self._agree(lambda: trees.append(read_tree(folder / SHARED, device)))\n",
                "        trees.append(read_tree(folder / SHARED, device))\n",
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
            problem = f"{type(error).__name__}: {error}"
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
        text="                shutil.rmtree(aside, ignore_errors=True)\n",
        becomes="                pass\n",
        caught_by="test_full_disk",
        told_as="leftovers",
    ),
    Mutant(
        id="agree-every-rank-prunes",
        exercise="4.15",
        mistake="every rank deletes the old ones",
        text="        self._agree(lambda: self.files.prune(*kept) if rank == 0 else None)\n",
        becomes="        self._agree(lambda: self.files.prune(*kept))\n",
        caught_by="test_nobody_goes_on_before_rank_0_has_finished",
        told_as="not-saved",
    ),
]
