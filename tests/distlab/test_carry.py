"""A learner's work is carried over to a new template: region by region, and never lost."""

from __future__ import annotations

import pytest

from distlab.course import carry, frames, templates
from distlab.course.carry import Old
from distlab.course.catalogue import load_course

BLANK = '''"""A template."""

import torch


def double(x: int) -> int:
    """Twice x."""
    # Step 1: think
    raise NotImplementedError("exercise 9.1")


class Box:
    """A box."""

    def both(self) -> int:
        """Two places."""
        # Step 1: first
        raise NotImplementedError("exercise 9.2")
        self.n += 1
        # Step 2: second
        raise NotImplementedError("exercise 9.2")
        return self.n


def last(x: int) -> int:
    """It is the last one."""
    raise NotImplementedError("exercise 9.3")
'''
RAISE = '    raise NotImplementedError("exercise 9.{}")\n'
MINE = (
    BLANK.replace(RAISE.format(1), "    answer = x + x\n    return answer\n")
    .replace("        # Step 2: second\n    " + RAISE.format(2), "        self.n *= 2  # mine\n")
    .replace("import torch\n", "import math\n\nimport torch\n")
    .replace("class Box:", "def helper() -> int:\n    return 3\n\n\nclass Box:")
)


def carried(new: str, mine: str = MINE, name: str = "t.py", **was: str) -> carry.Carried:
    return carry.carry(name, new, {"t.py": Old("t.py", BLANK, mine)}, was)


def test_an_untouched_template_becomes_the_new_one() -> None:
    new = BLANK.replace("Twice x", "Two times x").replace("# Step 1: think", "# Step 1: think well")
    found = carried(new, BLANK)
    assert (found.text, found.kept, found.conflicts) == (new, [], [])


def test_nothing_new_changes_nothing() -> None:
    found = carried(BLANK)
    assert (found.text, found.kept, found.conflicts) == (MINE, ["9.1", "9.2"], [])


def test_own_code_goes_along_when_its_surroundings_change() -> None:
    """Docstring, steps, imports and the order of functions are the course's; helpers are kept."""
    new = BLANK.replace("Twice x.", "Two times x, exactly.").replace("Step 1: think", "Step 1: add")
    new = new.replace('"""A template."""', '"""A better template."""')
    new = new.replace("class Box:", "LIMIT = 3\n\n\nclass Box:")
    found = carried(new)
    for line in ("    answer = x + x\n", "self.n *= 2  # mine\n", "def helper()", "import math\n"):
        assert line in found.text, line
    for line in ("Two times x, exactly.", "A better template.", "LIMIT = 3"):
        assert line in found.text, line
    assert found.conflicts == []
    assert len(found.notes) == 2  # steps and docstring of 9.1
    compile(found.text, "t.py", "exec")


def test_a_changed_signature_is_a_conflict_with_all_three_texts() -> None:
    new = BLANK.replace("def double(x: int)", "def double(x: int, times: int = 2)")
    found = carried(new)
    assert found.kept == ["9.2"]
    assert RAISE.format(1) in found.text
    (conflict,) = found.conflicts
    assert "exercise 9.1, double" in conflict.where
    assert "def double(x: int) -> int:" in conflict.old
    assert "answer = x + x" in conflict.own
    assert "times: int = 2" in conflict.new


def test_code_moves_with_its_exercise_to_another_file_and_another_number() -> None:
    """``was_in`` of the map says which exercise it was a part of."""
    moved = BLANK[BLANK.index("class Box") :].replace("9.2", "9.7").replace("9.3", "9.8")
    found = carried(moved, name="elsewhere.py", **{"9.7": "9.2"})
    assert "self.n *= 2  # mine" in found.text
    assert found.kept == ["9.7"]
    assert {key for _, key in found.used} >= {("Box.both", 0), ("Box.both", 1)}


def test_a_renamed_function_is_a_conflict() -> None:
    found = carried(BLANK.replace("def double", "def twice"))
    assert [(c.why, "answer = x + x" in c.own) for c in found.conflicts] == [
        ("its signature or the name of the function changed", True)
    ]


@pytest.mark.parametrize(
    ("old", "becomes"),
    [
        ("    # Step 1: think\n    answer", "    x = int(x)\n    answer"),  # steps are no frame
        ('    """Twice x."""\n', '    """Twice x."""\n    # my note\n'),
    ],
)
def test_what_a_learner_does_inside_a_region_is_hers(old: str, becomes: str) -> None:
    mine = MINE.replace(old, becomes)
    assert mine != MINE
    assert carried(BLANK, mine).text == mine


def test_a_changed_frame_of_a_function_is_a_conflict_and_the_rest_goes_along() -> None:
    mine = MINE.replace("        self.n += 1\n", "        self.n += 5\n")
    found = carried(BLANK, mine)
    assert found.kept == ["9.1"]
    assert ["self.n += 5" in c.own for c in found.conflicts] == [True]
    assert found.text == MINE.replace(
        "        self.n *= 2  # mine\n", "        # Step 2: second\n    " + RAISE.format(2)
    )


def test_both_changed_the_same_lines() -> None:
    mine = MINE.replace('"""A template."""', '"""My file."""')
    found = carried(BLANK.replace('"""A template."""', '"""Their file."""'), mine)
    assert "Their file." in found.text
    (conflict,) = found.conflicts
    assert '"""My file."""' in conflict.own
    assert "import math" in conflict.own  # beside it, so it is told along
    assert found.kept == ["9.1", "9.2"]


def test_functions_in_another_order_and_broken_files_are_carried_as_they_are() -> None:
    head, tail = MINE.split("class Box:")
    box, last = tail.split("def last")
    swapped = f"{head}def last{last}\n\nclass Box:{box.rstrip()}\n"
    assert carried(BLANK, swapped).text == swapped
    broken = MINE.replace("    answer = x + x\n", "    answer = (x +\n")
    assert carried(BLANK, broken).text == broken


def test_a_deleted_function_is_put_back_blank() -> None:
    start, end = MINE.index("def last"), len(MINE)
    found = carried(BLANK, MINE[:start].rstrip() + "\n" + MINE[end:])
    assert RAISE.format(3) in found.text
    assert "answer = x + x" in found.text


def test_regions_are_found_in_every_template() -> None:
    """Each ``raise`` of each template is a region, in the file's order, with its own name."""
    for exercise in templates.files_of(load_course()):
        text = templates.template_of(exercise)
        found = frames.gaps(text)
        raises = text.splitlines()
        wanted = [line for line in raises if frames.RAISE.match(line)]
        assert [gap.text[-1] for gap in found] == wanted, exercise.file
        assert len({gap.key for gap in found}) == len(found)
        assert frames.opened(text, text).closed == []
