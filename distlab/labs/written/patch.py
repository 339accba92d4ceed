"""A find as a patch of the course: the test, the wrong implementation, and what to do with them."""

from __future__ import annotations

import ast
import difflib
import json
import re
from pathlib import Path

from ...course.catalogue import Exercise, root
from ...grading.wrong import Mutant
from .finds import Find
from .look import parsed, tests_in

GONE = "\0"  # a line that is left out: no line of Python is like that
IMPORT = "from distlab.grading import exercise"
LETTER = """{id}: a test that fails an implementation which all checks pass

{test} passes the solution of exercise {id} "{title}" and every right alternative. It fails this
change of the solution, which the course's own checks pass:

    {mistake}

What to do:

1. In a clone of the course, call `git apply {name}`.
2. Read the docstring of the exercise. Does it promise what the test asks for? If not, the change
   is harmless and the test asks for too much: throw this patch away.
3. Say in `mistake` of the wrong implementation what is wrong, in words.
4. Move the test into tests/phase{phase}/test_{file}.py if its helpers are there already. Name the
   promise that it asserts: `distlab contract {id}` shows what there is.
5. Call `python -m pytest tests/mutants -k {mutant}`: the new test must kill the change.
6. Call `python -m scripts.mutate {id}` and `python -m scripts.lab_tests {id}`: the tables of
   changes and of labs forget it.
7. Open a pull request. CONTRIBUTING.md says what it needs.

Nothing has been sent: this file is all there is.

"""


def patch(exercise: Exercise, file: Path, find: Find, name: str) -> str:
    """The text of the patch called ``name``, for ``git apply``."""
    number = exercise.phase.number
    letter = LETTER.format(
        id=exercise.id,
        title=exercise.title,
        test=find.test,
        mistake=find.mutant.mistake,
        name=name,
        phase=number,
        file=exercise.file,
        mutant=find.mutant.id,
    )
    words = find.test.removeprefix("test_")
    check = f"tests/phase{number}/test_{exercise.file}_{words}.py"
    if (root() / check).exists():
        raise ValueError(f"{check} is there already: give {find.test} another name")
    mutants = _mutants_of(exercise)
    before = mutants.read_text(encoding="utf-8")
    after = before.rstrip().removesuffix("]") + entry(find) + "]\n"
    path = mutants.relative_to(root()).as_posix()
    return (
        letter + _diff(check, "", one_test(exercise, file, find.test)) + _diff(path, before, after)
    )


def one_test(exercise: Exercise, file: Path, name: str) -> str:
    """The learner's file with this test alone, marked as a check of the exercise."""
    lines = file.read_text(encoding="utf-8").splitlines()
    tree = parsed(file)
    for test in tests_in(tree):
        begin = min([test.lineno, *(d.lineno for d in test.decorator_list)])
        if test.name != name:
            lines[begin - 1 : test.end_lineno] = [GONE] * ((test.end_lineno or begin) - begin + 1)
        elif not any("exercise" in ast.unparse(d) for d in test.decorator_list):
            lines[begin - 1] = f'@exercise("{exercise.id}", "virtual")\n{lines[begin - 1]}'
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    if not any(alias.name == "exercise" for n in imports for alias in n.names):
        docstring = tree.body[:1] if ast.get_docstring(tree) is not None else []
        after = [*docstring, *imports][-1:]
        lines.insert(after[0].end_lineno or 0 if after else 0, IMPORT)
    text = "\n".join(line for line in lines if line != GONE)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n"


def entry(find: Find) -> str:
    """The wrong implementation as tests/mutants writes it."""
    mutant = find.mutant
    fields = {
        "id": mutant.id,
        "exercise": mutant.exercise,
        "mistake": mutant.mistake,
        "text": mutant.text,
        "becomes": mutant.becomes,
        "caught_by": find.test,
        "told_as": find.cause,
    }
    written = (f"        {key}={_quoted(value)},\n" for key, value in fields.items())
    return f"    {Mutant.__name__}(\n{''.join(written)}    ),\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _mutants_of(exercise: Exercise) -> Path:
    """The file with most of the exercise's wrong implementations."""
    files = (root() / "tests" / "mutants").glob(f"phase{exercise.phase.number}_*.py")
    asked = f'exercise="{exercise.id}"'
    return max(sorted(files), key=lambda path: path.read_text(encoding="utf-8").count(asked))


def _diff(path: str, before: str, after: str) -> str:
    old = f"a/{path}" if before else "/dev/null"
    head = f"diff --git a/{path} b/{path}\n" + ("" if before else "new file mode 100644\n")
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), old, f"b/{path}"
    )
    return head + "".join(lines)
