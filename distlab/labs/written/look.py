"""What can be told of a file of tests before it runs, and the file that learners begin with."""

from __future__ import annotations

import ast
from pathlib import Path

from ... import grading
from ...course.catalogue import Exercise, check_files, functions_of

BARRED = ("solutions", "tests", "labs", "scripts", "distlab.labs", "distlab.course")
API = "distlab.grading"  # what it names is for tests; its modules read solutions
START = '''"""My tests of exercise {id}: {title}. What they must prove: `distlab contract {id}`."""

from __future__ import annotations

import torch

from distlab.grading import exercise, expect_close, expect_equal, expect_refused, fail, refusal

# impl: the module under test ({functions}), usable in the body of ranks
# run:  run(body, 3) runs the body on 3 ranks; a list of what they returned, with .logs for each
# cases: cases(3, 1, 2, 4) are world sizes for a loop; seed: for inputs, another one in each run


@exercise("{id}", "virtual")
def test_first_promise(impl, run, cases, seed):
    """One promise of the docstring."""

    def body(ctx):
        """What a rank does: it calls impl, returns tensors or plain data, and judges nothing."""

    for w in cases(3, 1, 2, 4):
        for rank, got in enumerate(run(body, w)):
            """Compute what is expected; then expect_close(got, want, what="…", rank=rank)."""
'''


def begin(exercise: Exercise, file: Path) -> None:
    """Write a file of tests to begin with, that tests nothing yet."""
    functions = ", ".join(functions_of(exercise))
    text = START.format(id=exercise.id, title=exercise.title, functions=functions)
    file.write_text(text, encoding="utf-8")


def look(exercise: Exercise, file: Path) -> None:
    """ValueError with one line if the file tests nothing, or takes its answers from elsewhere."""
    tree = parsed(file)
    for node in ast.walk(tree):
        for name in filter(_is_barred, _imported(node)):
            raise ValueError(
                f"{file.name}:{getattr(node, 'lineno', 0)}: it imports {name}, where the answers "
                "are: test what the docstring promises"
            )
    tests = tests_in(tree)
    if not tests:
        raise ValueError(f"{file.name} tests nothing: it has no function test_…")
    if not any("impl" in {a.arg for a in t.args.args + t.args.kwonlyargs} for t in tests):
        raise ValueError(f"{file.name} tests nothing: no test takes the fixture impl")
    own = {_shape(t) for path in check_files(exercise) for t in tests_in(parsed(path))}
    for test in tests:
        if _shape(test) in own:
            raise ValueError(
                f"{file.name}:{test.lineno}: {test.name} is a check of the course: write your own"
            )


def parsed(file: Path) -> ast.Module:
    """The file's syntax tree; ValueError with one line if it has none."""
    try:
        return ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        raise ValueError(f"{file.name}:{error.lineno}: no valid Python: {error.msg}") from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{file.name} can't be read: {error}") from None


def tests_in(tree: ast.Module) -> list[ast.FunctionDef]:
    """The test functions, as pytest finds them."""
    classes = [n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name[:4] == "Test"]
    nodes = [node for body in (tree.body, *classes) for node in body]
    return [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test")]


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names if node.module]
    return []


def _is_barred(name: str) -> bool:
    package, _, last = name.rpartition(".")
    if name == API or package == API:
        return last not in (*grading.__all__, "grading")
    return any(f"{name}.".startswith(f"{each}.") for each in (*BARRED, API))


def _shape(test: ast.FunctionDef) -> str:
    """What the function does: neither its name, nor its docstring, nor its marks."""
    body = test.body[1:] if ast.get_docstring(test) is not None else test.body
    return "\n".join(map(ast.dump, body))
