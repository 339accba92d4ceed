"""Wrong implementations of exercise 4.1."""

from distlab.grading.wrong import mutants_of

KILLED = "test_killed_at_every_operation"
POWER = "test_power_fails_at_every_operation"
DAMAGED = "test_any_damage_is_found"
KEPT = "test_which_are_kept"
CLOSED = "test_a_closed_folder_is_not_an_empty_one"

MARK = """        marker = folder / (MARKER + ASIDE)
        write_bytes(marker, hashlib.sha256(text).hexdigest().encode())
        os.rename(marker, folder / MARKER)
"""
NUMBER = "        number = 1 + max((int(name[:6]) for name in self.names()), default=0)\n"
HASHED = '                if hash_of_file(self.path / name / file) != entry["sha256"]:\n'

mutant = mutants_of("4.1", "survive")

MUTANTS = [
    mutant(
        "live-file",
        "BUGS 83: one place for the checkpoint, cleared before the new one is written to it",
        NUMBER,
        "        shutil.rmtree(self.path / '000001-step-00000001', ignore_errors=True)\n        number = step = 1\n",
        KILLED,
        "unloadable",
    ),
    mutant(
        "names-not-flushed",
        "the folder is renamed, but the new name is not forced to the disk",
        "        flush_folder(self.path)\n        marker",
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
        "killed-leftovers",
        "what killed saves have left is never cleared",
        "                shutil.rmtree(path)\n        number",
        "                pass\n        number",
        KILLED,
        "leftovers",
        (NUMBER, NUMBER.replace("self.names()", "(p.name for p in self.path.iterdir())")),
    ),
    mutant(
        "newest-by-step",
        "the highest step counts as the newest: after going back, the old branch is loaded",
        "            return sorted(filter(NAME.fullmatch, os.listdir(self.path)))\n",
        "            names = filter(NAME.fullmatch, os.listdir(self.path))\n"
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
        "        best = sorted(scored, key=self._score, reverse=True)[:keep_best]\n",
        "        best = sorted(scored, key=self._score)[:keep_best]\n",
        KEPT,
        "kept",
    ),
]
