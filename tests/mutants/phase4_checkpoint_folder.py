"""Wrong implementations of exercise 4.1."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="survive-live-file",
        exercise="4.1",
        mistake="one folder for the checkpoint, cleared before the new one is written to it",
        text="        number = 1 + max((int(name[:6]) for name in self.names()), default=0)\n",
        becomes="""        shutil.rmtree(self.path / '000001-step-00000001', ignore_errors=True)
        number = step = 1
""",
        caught_by="test_killed_at_every_operation",
        told_as="unloadable",
    ),
    Mutant(
        id="survive-names-not-flushed",
        exercise="4.1",
        mistake="the folder is renamed, but the new name is not forced to the disk",
        text="""        flush_folder(self.path)
        marker""",
        becomes="        marker",
        caught_by="test_power_fails_at_every_operation",
        told_as="lost",
    ),
    Mutant(
        id="survive-marker-not-flushed",
        exercise="4.1",
        mistake="the marker's name is not forced to the disk",
        text="""        os.rename(marker, folder / MARKER)
        flush_folder(folder)
""",
        becomes="        os.rename(marker, folder / MARKER)\n",
        caught_by="test_power_fails_at_every_operation",
        told_as="lost",
    ),
    Mutant(
        id="survive-torn-marker",
        exercise="4.1",
        mistake="the marker is written in its place, and may be half there",
        text="""        marker = folder / (MARKER + ASIDE)
        write_bytes(marker, hashlib.sha256(text).hexdigest().encode())
        os.rename(marker, folder / MARKER)
""",
        becomes="        write_bytes(folder / MARKER, hashlib.sha256(text).hexdigest().encode())\n",
        caught_by="test_killed_at_every_operation",
        told_as="unloadable",
    ),
    Mutant(
        id="survive-no-hashes",
        exercise="4.1",
        mistake="sizes are compared, contents are not",
        text='                if hash_of_file(self.path / name / file) != entry["sha256"]:\n',
        becomes="                if False:\n",
        caught_by="test_any_damage_is_found",
        told_as="damage-unseen",
    ),
    Mutant(
        id="survive-killed-leftovers",
        exercise="4.1",
        mistake="what killed saves have left is never cleared",
        text="""                shutil.rmtree(path)
        number""",
        becomes="""                pass
        number""",
        more=(
            (
                "        number = 1 + max((int(name[:6]) for name in self.names()), default=0)\n",
                (
                    "        number = 1 + max((int(name[:6]) for name in (p.name for p in "
                    "self.path.iterdir())), default=0)\n"
                ),
            ),
        ),
        caught_by="test_killed_at_every_operation",
        told_as="leftovers",
    ),
    Mutant(
        id="survive-newest-by-step",
        exercise="4.1",
        mistake="the highest step counts as the newest: after going back, the old branch is loaded",
        text="            return sorted(filter(NAME.fullmatch, os.listdir(self.path)))\n",
        becomes="""            names = filter(NAME.fullmatch, os.listdir(self.path))
            return sorted(names, key=lambda name: (name[-8:], name))
""",
        caught_by="test_which_are_kept",
        told_as="kept",
    ),
    Mutant(
        id="survive-best-without-score",
        exercise="4.1",
        mistake="a checkpoint without a score counts as one of the best",
        text="if self._score(name) > -math.inf]\n",
        becomes="]\n",
        caught_by="test_which_are_kept",
        told_as="kept",
    ),
    Mutant(
        id="survive-files-not-flushed",
        exercise="4.1",
        mistake="the names of the files are not forced to the disk before the marker is",
        text="        flush_folder(aside)\n",
        becomes="",
        caught_by="test_power_fails_at_every_operation",
        told_as="unloadable",
    ),
    Mutant(
        id="survive-closed-is-empty",
        exercise="4.1",
        mistake="a folder that can't be read counts as an empty one: training begins anew",
        text="""        except FileNotFoundError:
            return []
""",
        becomes="""        except OSError:
            return []
""",
        caught_by="test_a_closed_folder_is_not_an_empty_one",
        told_as="silent-restart",
    ),
    Mutant(
        id="survive-lowest-is-best",
        exercise="4.1",
        mistake="the lowest score is kept",
        text="        best = sorted(scored, key=self._score, reverse=True)[:keep_best]\n",
        becomes="        best = sorted(scored, key=self._score)[:keep_best]\n",
        caught_by="test_which_are_kept",
        told_as="kept",
    ),
    Mutant(
        id="survive-parents-not-flushed",
        exercise="4.1",
        mistake="the folders above the store are made, but the topmost new name is not flushed",
        text="""        for folder in (*reversed(self.path.parents), self.path):
            if not folder.is_dir():
                folder.mkdir()
                flush_folder(folder.parent)
""",
        becomes="""        self.path.mkdir(parents=True, exist_ok=True)
        flush_folder(self.path.parent)
""",
        caught_by="test_power_fails_at_every_operation",
        told_as="lost",
    ),
    Mutant(
        id="survive-clears-all-partial",
        exercise="4.1",
        mistake="whatever ends like a folder aside is cleared away, also what others made",
        text="if NAME.fullmatch(path.name.removesuffix(ASIDE)) and (",
        becomes="if NAME.match(path.name) and (",
        more=(("path.name.endswith(ASIDE) or not", "not NAME.fullmatch(path.name) or not"),),
        caught_by="test_from_begin_to_finish",
        told_as="foreign-touched",
    ),
    Mutant(
        id="survive-same-step-replaced",
        exercise="4.1",
        mistake="the finished checkpoint of the same step goes before the new one is there",
        text="        for path in self.path.iterdir():\n",
        becomes="""        for name in [name for name in self.names() if int(name[12:]) == step]:
            shutil.rmtree(self.path / name)
        for path in self.path.iterdir():
""",
        caught_by="test_from_begin_to_finish",
        told_as=("old-touched", "exception"),
    ),
    Mutant(
        id="survive-all-hash-all",
        exercise="4.1",
        mistake="every rank hashes its part of the list as a block, the rest is hashed by nobody",
        text="files[share::shares] if share",
        becomes="files[share : share + 1] if share",
        caught_by="test_any_damage_is_found",
        told_as="share",
    ),
    Mutant(
        id="survive-deleted-in-its-place",
        exercise="4.1",
        mistake="old checkpoints are deleted under their names: half of one still counts",
        text="""                os.rename(self.path / name, self.path / (name + ASIDE))
                shutil.rmtree(self.path / (name + ASIDE))
""",
        becomes="                shutil.rmtree(self.path / name)\n",
        caught_by="test_killed_while_old_ones_are_deleted",
        told_as="half-deleted",
    ),
    Mutant(
        id="survive-damaged-cleared",
        exercise="4.1",
        mistake="begin clears away finished checkpoints that are damaged, which the user may want to rescue",
        text="or not (path / MARKER).is_file()",
        becomes="or self.problem(path.name) is not None",
        caught_by="test_from_begin_to_finish",
        told_as="old-touched",
    ),
]
