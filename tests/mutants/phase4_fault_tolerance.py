"""Wrong implementations of exercise 4.1."""

from distlab.grading.wrong import mutants_of

LOADED, FILES = "test_what_was_saved_is_loaded", "test_files_are_safe_and_written_once"
REFUSED, SAME = (
    "test_what_can_not_be_saved_is_refused_by_all",
    "test_all_ranks_load_the_same",
)
EARLY, DAMAGED = (
    "test_nobody_goes_on_before_rank_0_has_finished",
    "test_damaged_checkpoints_are_passed_over",
)
NOTHING, FULL, KEPT = (
    "test_nothing_and_nothing_intact_are_different",
    "test_full_disk",
    "test_which_are_kept",
)
CLOSED = "test_a_closed_folder_is_not_an_empty_one"
KILLED, POWER = "test_killed_at_every_operation", "test_power_fails_at_every_operation"

BEGIN = "        name = self._agree(lambda: self._begin(step) if rank == 0 else None)[0]\n"
TREES = (
    "            trees = {own_file(rank): own or {}} | ({SHARED: shared} if rank == 0 else {})\n"
)
WRITE = "            return write_trees(aside, trees)\n"
WRITTEN = "            written = self._agree(write)\n"
FINISH = "            self._agree(lambda: self._finish(aside, folder, manifest) if rank == 0 else None)\n"
PRUNE = "        self._agree(lambda: self._prune() if rank == 0 else None)\n"
GONE = "                shutil.rmtree(aside, ignore_errors=True)\n"
NAMES = "        names = self._agree(lambda: self._names() if self.rank == 0 else None)[0]\n"
MARK = """        marker = folder / (MARKER + ASIDE)
        write_bytes(marker, hashlib.sha256(text).hexdigest().encode())
        os.rename(marker, folder / MARKER)
"""
NUMBER = "        number = 1 + max((int(name[:6]) for name in self._names()), default=0)\n"
HASHED = '                if hash_of_file(self.folder / name / file) != entry["sha256"]:\n'
CAUGHT = """        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
"""

mutant = mutants_of("4.1", "survive")

MUTANTS = [
    mutant(
        "live-file",
        "BUGS 83: one place for the checkpoint, cleared before the new one is written to it",
        NUMBER,
        "        shutil.rmtree(self.folder / '000001-step-00000001', ignore_errors=True)\n        number = step = 1\n",
        KILLED,
        "unloadable",
    ),
    mutant(
        "old-deleted-first",
        "BUGS 83: room is made before the new checkpoint is finished",
        WRITTEN,
        """            if rank == 0 and self._names():
                old = self.folder / self._names()[-1]
                os.rename(old, f"{old}{ASIDE}")
                shutil.rmtree(f"{old}{ASIDE}")
"""
        + WRITTEN,
        KILLED,
        "lost",
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
        "        name = self._begin(step)\n",
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
        "            if rank == 0:\n                self._finish(aside, folder, manifest)\n",
        EARLY,
        "too-early",
        (PRUNE, "        if rank == 0:\n            self._prune()\n"),
    ),
    mutant(
        "names-not-flushed",
        "the folder is renamed, but the new name is not forced to the disk",
        "        flush_folder(self.folder)\n        marker",
        "        marker",
        POWER,
        "lost",
    ),
    mutant(
        "marker-not-flushed",
        "the marker's name is not forced to the disk",
        "        os.rename(marker, folder / MARKER)\n        flush_folder(folder)\n",
        "        os.rename(marker, folder / MARKER)\n",
        POWER,
        "lost",
    ),
    mutant(
        "torn-marker",
        "the marker is written in its place, and may be half there",
        MARK,
        "        write_bytes(folder / MARKER, hashlib.sha256(text).hexdigest().encode())\n",
        KILLED,
        "unloadable",
    ),
    mutant(
        "no-hashes",
        "sizes are compared, contents are not",
        HASHED,
        "                if False:\n",
        DAMAGED,
        "damage-unseen",
    ),
    mutant(
        "own-verdict",
        "each rank judges by what it has hashed itself",
        "            problems = [problem for problem in verdicts if problem]\n",
        "            problems = [problem for problem in verdicts[rank : rank + 1] if problem]\n",
        DAMAGED,
        "mismatch",
    ),
    mutant(
        "own-choice",
        "each rank looks for the newest checkpoint by itself",
        NAMES,
        "        names = self._names()\n",
        SAME,
        "disagree",
        (
            "            verdicts = self._agree(lambda name=name: self._problem(name, share=rank))\n",
            "            verdicts = [self._problem(name, share=None)]\n",
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
        "killed-leftovers",
        "what killed saves have left is never cleared",
        "                shutil.rmtree(path)\n        number",
        "                pass\n        number",
        KILLED,
        "leftovers",
        (NUMBER, NUMBER.replace("self._names()", "(p.name for p in self.folder.iterdir())")),
    ),
    mutant(
        "newest-by-step",
        "the highest step counts as the newest: after going back, the old branch is loaded",
        "            return sorted(filter(NAME.fullmatch, os.listdir(self.folder)))\n",
        "            names = filter(NAME.fullmatch, os.listdir(self.folder))\n"
        "            return sorted(names, key=lambda name: (name[-8:], name))\n",
        KEPT,
        "kept",
    ),
    mutant(
        "best-without-score",
        "a checkpoint without a score counts as one of the best",
        "if self._score(name) > -math.inf]\n",
        "]\n",
        KEPT,
        "kept",
    ),
    mutant(
        "every-rank-prunes",
        "BUGS 87: every rank deletes the old ones",
        PRUNE,
        "        self._agree(lambda: self._prune())\n",
        EARLY,
        "not-saved",
    ),
    mutant(
        "files-not-flushed",
        "the names of the files are not forced to the disk before the marker is",
        "        flush_folder(aside)\n",
        "",
        POWER,
        "unloadable",
    ),
    mutant(
        "closed-is-empty",
        "a folder that can't be read counts as an empty one: training begins anew",
        "        except FileNotFoundError:\n            return []\n",
        "        except OSError:\n            return []\n",
        CLOSED,
        "silent-restart",
    ),
    mutant(
        "lowest-is-best",
        "the lowest score is kept",
        "        best = sorted(scored, key=self._score, reverse=True)[: self.keep_best]\n",
        "        best = sorted(scored, key=self._score)[: self.keep_best]\n",
        KEPT,
        "kept",
    ),
]
