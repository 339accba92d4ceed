"""Try debugging labs as a learner who finds everything: ``python -m scripts.try_labs [D3.02 …]``.

A lab must show its bug in what is handed out, on the ranks that it names, and nowhere where it says
that all is well. Nothing that is handed out may tell the cause. The right answer and the solution's
text earn all points, and the file as it was handed out passes no checks.

``labs/debug/tried.toml`` keeps a digest of each lab that is in order. Without names only those are
tried whose digest has changed.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from pathlib import Path

from distlab.course.catalogue import root
from distlab.grading.warm import WarmGrader
from distlab.labs.debug.chosen import KIND, DebugLab, all_labs
from distlab.labs.debug.folder import ANSWER, write_lab
from distlab.labs.debug.graded import Grader, failures, graded
from distlab.labs.debug.observed import differing, observe
from distlab.labs.debug.sources import Sources, sources_of
from distlab.labs.frame import read_toml

SEED = 3
TRIED = root() / "labs" / KIND / "tried.toml"
TELLING = 20  # characters of a line that tells how the program is mended
HANDED_OUT = {
    *("REPORT.md", "answer.toml", "lab.json", "program.py"),
    *("player.html", "trace.json", "trace.png"),
}


def main(names: list[str]) -> int:
    """Print what is not as it should be; the exit status."""
    known = tried()
    wanted = [
        lab
        for lab in all_labs()
        if lab.id in names or (not names and known.get(lab.id) != digest(lab))
    ]
    bad = False
    with WarmGrader() as warm:
        for lab in wanted:
            found = doubts(lab, warm.grade)
            print(f"{lab.id}: {found or 'in order'}", flush=True)
            bad |= bool(found)
            _write(lab, "" if found else digest(lab))
    return 1 if bad else 0


def _write(tried_now: DebugLab, result: str) -> None:
    """Write the table anew; what belongs to no lab any more goes."""
    known = tried() | {tried_now.id: result}
    rows = [f'"{lab.id}" = "{known[lab.id]}"\n' for lab in all_labs() if known.get(lab.id)]
    head = "# Labs that were tried, and what they were made of: python -m scripts.try_labs\n"
    TRIED.write_text(head + "".join(rows), encoding="utf-8")


def tried() -> dict[str, str]:
    """The digests of the labs that were found in order, by their ids."""
    return {str(k): str(v) for k, v in read_toml(TRIED).items()} if TRIED.exists() else {}


def digest(lab: DebugLab) -> str:
    """A digest of all that the lab is made of: both texts of the file, the program, its fields."""
    sources = sources_of(lab)
    fields = (lab.world, lab.ranks, lab.fine_at, sorted(lab.run.items()), lab.causes, lab.name)
    program = lab.program_path.read_text(encoding="utf-8")
    lines = [[(spot.first, spot.last) for spot in own] for own in sources.spots]
    parts = (sources.right, sources.wrong, repr(lines), program, repr(fields))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def doubts(lab: DebugLab, grade: Grader) -> str:
    """What is not as it should be; empty if all is well."""
    sources = sources_of(lab)
    return shown(lab, sources) or solved(lab, sources, grade)


def shown(lab: DebugLab, sources: Sources) -> str:
    """What the report would not show as the lab says; empty if it shows all."""
    right, wrong = (observe(lab, text, SEED) for text in (sources.right, sources.wrong))
    if right.failure:
        return f"the program fails without the bug: {right.failure}"
    seen = differing(wrong, right, lab.world)
    if not seen:
        return "nothing of it is seen"
    if seen != (lab.ranks or tuple(range(lab.world))):
        return f"it is seen on ranks {seen}"
    for world in lab.fine_at:
        own, other = (observe(lab, text, SEED, world) for text in (sources.wrong, sources.right))
        if any(own.result(rank) != other.result(rank) for rank in range(world)):
            return f"it is seen on {world} ranks, too"
    return ""


def solved(lab: DebugLab, sources: Sources, grade: Grader) -> str:
    """What a learner who finds everything would miss, or find told; empty if nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_lab(lab, SEED, Path(name, "lab"))
        told = told_too_much(lab, folder)
        if told:
            return told
        if not failures(lab, sources.wrong, grade):
            return "the file as it was handed out passes the checks"
        (folder / ANSWER).write_text(right_answer(lab, sources), encoding="utf-8")
        (folder / lab.file).write_text(sources.right, encoding="utf-8")
        missed = [part for part in graded(folder, grade)[2] if part.points < part.most]
    return "; ".join(f"{part.name}: {part.text}" for part in missed)


def right_answer(lab: DebugLab, sources: Sources) -> str:
    """The answer that earns all points."""
    ranks = list(lab.ranks) or '"all"'
    return "\n".join(
        f'[[bug]]\nranks = {ranks}\nfile = "{lab.file}"\nline = {spots[0].first}\n'
        f'cause = "{cause}"\n'
        for spots, cause in zip(sources.spots, lab.causes, strict=True)
    )


def told_too_much(lab: DebugLab, folder: Path) -> str:
    """What in the folder tells the cause; empty if nothing does."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    others = {path.name for path in files} - HANDED_OUT - {lab.file}
    if not all(name.endswith(".png") for name in others):
        return f"the folder has other files: {sorted(others)}"
    secret = [f"{lab.about.file}.py", f"exercise {lab.exercise}"]
    for mutant in lab.wrong:
        secret += [mutant.id, mutant.mistake, mutant.caught_by]
    sources = sources_of(lab)
    right, wrong = ({*map(str.strip, t.splitlines())} for t in (sources.right, sources.wrong))
    mended = {line for line in right - wrong if len(line) >= TELLING}
    for path in files:
        text = path.read_bytes().decode(errors="replace")
        causes = [] if path.name == ANSWER else [c for c in lab.causes if "-" in c]
        lines = mended if path.name != lab.file else ()
        for word in (*secret, *causes, *lines):
            if re.search(rf"(?<![\w.]){re.escape(word)}(?!\w)", text):
                return f"{path.name} tells {word!r}"
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
