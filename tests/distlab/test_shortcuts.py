"""Programs that take their answer from elsewhere fail, and are told so with their line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 (once here instead of in every forked grader)

from distlab.course.catalogue import load_course, root
from distlab.grading.session import Request
from distlab.grading.verdicts import CheckResult
from distlab.grading.warm import WarmGrader
from distlab.grading.wrong import fill

pytestmark = pytest.mark.verdict

ROOT = str(root())
TRAINER = f"{ROOT}/solutions/phase1_data_parallel/trainer.py"
MODULE = "solutions.phase1_data_parallel.trainer"
# how the solution of 1.4 is reached from its own region
SOLUTION = {
    "import": f"from {MODULE} import average_gradients",
    "import in a try": f"""
        try:
            import {MODULE} as there
        except BaseException:
            pass
    """,
    "import by name": f"import importlib; importlib.import_module('{MODULE}')",
    "dunder import": f"__import__('{MODULE}')",
    "import through a helper": f"exec('import {MODULE} as there')",
    "loaded by path": f"""
        import importlib.util
        spec = importlib.util.spec_from_file_location("there", {TRAINER!r})
        there = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(there)
    """,
    "run as a program": f"import runpy; runpy.run_path({TRAINER!r})",
    "run as a module": f"import runpy; runpy.run_module('{MODULE}')",
    "the text": f"text = open({TRAINER!r}).read()",
    "the text by a path object": f"import pathlib; text = pathlib.Path({TRAINER!r}).read_text()",
    "the text by the system": f"fd = os.open({TRAINER!r}, os.O_RDONLY); text = os.read(fd, 9999)",
    "the text from its folder": f"""
        os.chdir({str(Path(TRAINER).parent)!r})
        text = open("trainer.py").read()
    """,
    "the text line by line": f"import linecache; line = linecache.getline({TRAINER!r}, 100)",
    "the text by inspect": f"""
        import importlib.util, inspect, types
        there = types.ModuleType('{MODULE}')
        there.__file__ = {TRAINER!r}
        text = inspect.getsource(there)
    """,
    "the text by its loader": f"""
        import importlib.util
        text = importlib.util.find_spec('{MODULE}').loader.get_source('{MODULE}')
    """,
    "a link": f"os.symlink({TRAINER!r}, '/tmp/never-made')",
    "a copy": f"import shutil; shutil.copy({TRAINER!r}, '/tmp/never-made')",
    "another program": f"import subprocess; subprocess.run(['cat', {TRAINER!r}])",
    "a shell": f"os.system('cat {TRAINER}')",
    "git's program": "import subprocess; subprocess.run(['git', 'show', 'HEAD:trainer.py'])",
    "git's objects": f"text = open({ROOT!r} + '/.git/HEAD').read()",
    "another thread": f"""
        import threading
        def take():
            import {MODULE} as there
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        raise ValueError("no answer")
    """,
}
# (exercise, function, program) that calls what PyTorch has in its stead
FEATURES = {
    "DistributedSampler": (
        "1.1",
        "def __iter__(self) -> Iterator[int]:",
        """
        from torch.utils.data import DistributedSampler
        return iter(DistributedSampler(range(9), self.world_size, self.rank))
        """,
    ),
    "DistributedDataParallel": (
        "1.4",
        "def average_gradients(",
        "torch.nn.parallel.DistributedDataParallel(nn.Linear(1, 1))",
    ),
    "DistributedDataParallel by another name": (
        "1.4",
        "def average_gradients(",
        """
        class Own(torch.nn.parallel.DistributedDataParallel):
            pass
        Own(nn.Linear(1, 1))
        """,
    ),
    "FSDP": (
        "1.4",
        "def average_gradients(",
        "from torch.distributed.fsdp import fully_shard as f; f(nn.Linear(1, 1))",
    ),
    "operators": (
        "1.4",
        "def average_gradients(",
        "torch.ops._c10d_functional.all_reduce(torch.ones(1), 'sum', '0')",
    ),
    "the store": (
        "1.7",
        "def all_reduce_root(",
        "dist.distributed_c10d._get_default_store().set('x', 'y')",
    ),
    "state synchronisation": (
        "1.3",
        "def broadcast_model_state(",
        "from torch.distributed.utils import _sync_module_states as s; s(model, None, 1, 0, ())",
    ),
    "torch.utils.checkpoint": (
        "2.7",
        "def checkpoint(fn",
        "import torch.utils.checkpoint as c; return c.checkpoint(fn, *args, use_reentrant=False)",
    ),
    "torch's choice of operators": (
        "2.27",
        "def selective_checkpoint(",
        "import torch.utils.checkpoint as c; c.create_selective_checkpoint_contexts([])",
    ),
    "collectives with gradients": (
        "2.14",
        "def forward(ctx",
        "import torch.distributed.nn.functional as f; f.all_reduce(torch.ones(1))",
    ),
    "GradScaler": ("2.6", "def unscale(", "torch.amp.GradScaler('cpu')"),
    "ZeroRedundancyOptimizer": (
        "3.13",
        "def step(",
        """
        from torch.distributed.optim import ZeroRedundancyOptimizer as Z
        Z([torch.ones(1)], torch.optim.SGD)
        """,
    ),
    "averager": (
        "3.25",
        "def step(self",
        """
        from torch.distributed.algorithms.model_averaging import averagers
        averagers.PeriodicModelAverager(1)
        """,
    ),
}


@pytest.fixture(scope="module")
def grader() -> Iterator[WarmGrader]:
    with WarmGrader() as warm:
        yield warm


def graded(
    exercise_id: str, function: str, program: str, folder: Path, grader: WarmGrader
) -> list[CheckResult]:
    """The checks of the solution in which the function's region begins with ``program``."""
    exercise = load_course().exercise(exercise_id)
    text = exercise.solution_path.read_text()
    head, _, rest = text.partition(function)
    marker = f"# --- exercise {exercise_id}: start\n"
    before, found, after = rest.partition(marker)
    assert found, f"{function} has no region of {exercise_id}"
    indent = " " * (len(before) - len(before.rstrip(" ")))
    own = textwrap.indent(textwrap.dedent(program).strip() + "\n", indent)
    written = "\n".join((head + function + before + found, own + after))
    (folder / exercise.solution_path.name).write_text(written)
    fill(folder, exercise.solution_path.parent)
    request = Request(
        impl=str(folder), device="cpu", exercises=(exercise_id,), trusted=True, brief=True
    )
    return grader.grade(exercise.phase.number, request).exercises[0].checks


def expect_shortcut(checks: list[CheckResult], file: str) -> None:
    first = checks[0]
    assert (first.verdict, first.cause) == ("fail", "shortcut"), first.message
    assert first.line.startswith(file)


@pytest.mark.parametrize("way", SOLUTION)
def test_solution_is_reached(way: str, tmp_path: Path, grader: WarmGrader) -> None:
    program = SOLUTION[way]
    checks = graded("1.4", "def average_gradients(", program, tmp_path, grader)
    expect_shortcut(checks, "trainer.py:")


@pytest.mark.parametrize("name", FEATURES)
def test_feature_is_called(name: str, tmp_path: Path, grader: WarmGrader) -> None:
    exercise, function, program = FEATURES[name]
    checks = graded(exercise, function, program, tmp_path, grader)
    expect_shortcut(checks, f"{load_course().exercise(exercise).file}.py:")


INNOCENT = {
    "own file": "text = open(__file__).read()",
    "own source": "import inspect; inspect.getsource(average_gradients)",
    "a program": "import subprocess; subprocess.run(['true'])",
    "the platform": "import platform; platform.platform()",
    "a word": "solutions = ['DistributedSampler', 'import solutions']",
    "a package": "from torch.utils.data import DistributedSampler; import torch.distributed.fsdp",
    "a new group": "dist.new_group(list(range(dist.get_world_size())))",
}


@pytest.mark.parametrize("name", INNOCENT)
def test_nothing_is_taken(name: str, tmp_path: Path, grader: WarmGrader) -> None:
    checks = graded("1.4", "def average_gradients(", INNOCENT[name], tmp_path, grader)
    assert "shortcut" not in [check.cause for check in checks]


def test_a_stack_that_goes_through_a_solution_is_shown_without_its_lines(
    tmp_path: Path, grader: WarmGrader
) -> None:
    """A watchdog that writes down why its block failed takes nothing, and gets no line."""
    program = f"""
        import traceback
        try:
            exec(compile("1 / 0", {TRAINER!r}, "exec"))
        except ZeroDivisionError as error:
            *_, last = traceback.extract_tb(error.__traceback__)
            assert last.filename == {TRAINER!r} and not last.line, last.line
    """
    checks = graded("1.4", "def average_gradients(", program, tmp_path, grader)
    assert checks[0].verdict == "pass", checks[0].message


LOADED = {
    "the loaded module": f"""
        import sys
        return sys.modules[{MODULE!r}].train_step(model, optimizer, inputs, targets, group)
    """,
    "what a given function sees": """
        there = average_gradients.__globals__
        return there["train_step"](model, optimizer, inputs, targets, group)
    """,
}


@pytest.mark.parametrize("way", LOADED)
def test_solution_that_stands_in_for_another_exercise(
    way: str, tmp_path: Path, grader: WarmGrader
) -> None:
    """1.4 is blank, so the solution's is loaded: it does not bring 1.5 with it."""
    path = tmp_path / "trainer.py"
    own = load_course().exercise("1.4").solution_path.read_text()
    begin = own.index("    # --- exercise 1.4: start")
    end = own.index("    # --- exercise 1.4: end")
    own = own[:begin] + '    raise NotImplementedError("exercise 1.4")\n' + own[end:]
    head, marker, rest = own.partition("    # --- exercise 1.5: start\n")
    program = textwrap.indent(textwrap.dedent(LOADED[way]).strip() + "\n", "    ")
    path.write_text(head + marker + program + rest)
    fill(tmp_path, load_course().exercise("1.4").solution_path.parent)
    request = Request(impl=str(tmp_path), device="cpu", exercises=("1.5",), brief=True)
    expect_shortcut(grader.grade(1, request).exercises[-1].checks, "trainer.py:")


def test_template_that_is_a_link(tmp_path: Path, grader: WarmGrader) -> None:
    """The graded file itself is the solution's."""
    exercise = load_course().exercise("1.4")
    (tmp_path / "trainer.py").symlink_to(exercise.solution_path)
    request = Request(impl=str(tmp_path), device="cpu", exercises=("1.4",))
    result = grader.grade(1, request).exercises[0]
    assert (result.verdict, result.decisive.cause if result.decisive else "") == (
        "fail",
        "shortcut",
    )
