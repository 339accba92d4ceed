"""Wrong implementations of exercise 4.15."""

from distlab.grading.wrong import mutants_of

LOADED, FILES = "test_what_was_saved_is_loaded", "test_files_are_safe_and_written_once"
SAME = "test_all_ranks_load_the_same"
EARLY = "test_nobody_goes_on_before_rank_0_has_finished"
DAMAGED = "test_damaged_checkpoints_are_passed_over"
NOTHING = "test_nothing_and_nothing_intact_are_different"
FULL = "test_full_disk"

BEGIN = "        name = self._agree(lambda: self.files.begin(step) if rank == 0 else None)[0]\n"
TREES = (
    "            trees = {own_file(rank): own or {}} | ({SHARED: shared} if rank == 0 else {})\n"
)
WRITE = "            return write_trees(aside, trees)\n"
WRITTEN = "            written = self._agree(write)\n"
FINISH = (
    "            self._agree(lambda: self.files.finish(name, manifest) if rank == 0 else None)\n"
)
PRUNE = "        self._agree(lambda: self.files.prune(*kept) if rank == 0 else None)\n"
GONE = "                shutil.rmtree(aside, ignore_errors=True)\n"
NAMES = "        names = self._agree(lambda: self.files.names() if self.rank == 0 else None)[0]\n"
CAUGHT = """        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
"""

mutant = mutants_of("4.15", "agree")

MUTANTS = [
    mutant(
        "old-deleted-first",
        "BUGS 83: room is made before the new checkpoint is finished",
        WRITTEN,
        """            if rank == 0 and self.files.names():
                old = self.folder / self.files.names()[-1]
                old.rename(f"{old}{ASIDE}")
                shutil.rmtree(f"{old}{ASIDE}")
"""
        + WRITTEN,
        FULL,
        "previous-lost",
    ),
    mutant(
        "every-rank-writes",
        "BUGS 87: every rank writes the shared state to the same path",
        TREES,
        "            trees = {own_file(rank): own or {}, SHARED: shared}\n",
        FILES,
        "exception",
    ),
    mutant(
        "every-rank-begins",
        "BUGS 87: every rank makes the folder",
        BEGIN,
        "        name = self.files.begin(step)\n",
        LOADED,
        "exception",
    ),
    mutant(
        "rank-0s-state",
        "BUGS 88: rank 0 writes its own state for everybody",
        WRITE,
        """            trees |= {own_file(r): own or {} for r in range(dist.get_world_size(self.group))}
            return write_trees(aside, trees) if rank == 0 else {}
""",
        LOADED,
        "own-state",
    ),
    mutant(
        "device-of-old",
        "BUGS 89: map_location is ignored",
        "        self._agree(lambda: trees.append(read_tree(folder / SHARED, device)))\n",
        "        self._agree(lambda: trees.append(read_tree(folder / SHARED)))\n",
        LOADED,
        "device",
    ),
    mutant(
        "no-barrier",
        "BUGS 90: the others go on before rank 0 has finished",
        FINISH,
        "            if rank == 0:\n                self.files.finish(name, manifest)\n",
        EARLY,
        "too-early",
        (PRUNE, "        if rank == 0:\n            self.files.prune(*kept)\n"),
    ),
    mutant(
        "own-verdict",
        "each rank judges by what it has hashed itself",
        "            problems = [problem for problem in verdicts if problem]\n",
        "            problems = [problem for problem in verdicts[share[0] : share[0] + 1] if problem]\n",
        DAMAGED,
        "mismatch",
    ),
    mutant(
        "own-choice",
        "each rank looks for the newest checkpoint by itself",
        NAMES,
        "        names = self.files.names()\n",
        SAME,
        "disagree",
        (
            "            verdicts = self._agree(lambda name=name: self.files.problem(name, *share))\n",
            "            verdicts = [self.files.problem(name)]\n",
        ),
        (
            "        self._agree(lambda: trees.append(read_tree(folder / SHARED, device)))\n",
            "        trees.append(read_tree(folder / SHARED, device))\n",
        ),
    ),
    mutant(
        "silent",
        "what was passed over is not named",
        "                return self._read(name, map_location, tuple(skipped))\n",
        "                return self._read(name, map_location, ())\n",
        DAMAGED,
        "skipped-silently",
    ),
    mutant(
        "silent-restart",
        "all checkpoints are damaged: as if there had never been any",
        "        if any(UNFINISHED not in text for text in skipped):\n",
        "        if False:\n",
        NOTHING,
        "silent-restart",
    ),
    mutant(
        "rank-alone",
        "a rank whose disk is full leaves the others waiting",
        CAUGHT,
        "        except ZeroDivisionError:\n            pass\n",
        FULL,
        "mismatch",
    ),
    mutant(
        "error-of-one",
        "only the rank whose disk is full hears of it",
        "        if failed:\n            raise CheckpointError(",
        "        if problem:\n            raise CheckpointError(",
        FULL,
        "mismatch",
    ),
    mutant(
        "leftovers",
        "what a failed save has written stays, and fills the disk",
        GONE,
        "                pass\n",
        FULL,
        "leftovers",
    ),
    mutant(
        "every-rank-prunes",
        "BUGS 87: every rank deletes the old ones",
        PRUNE,
        "        self._agree(lambda: self.files.prune(*kept))\n",
        EARLY,
        "not-saved",
    ),
]
