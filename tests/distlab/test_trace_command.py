"""``distlab trace`` says how each rank spent its time, and writes a picture and a trace."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from distlab.course.catalogue import root
from tests import forked_commands


def test_rows_of_the_table_add_up_to_100_percent(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "distlab", "trace", "1.3", "--impl", "solutions"]
    done = forked_commands.run([*command, "--out", tmp_path], cwd=root(), timeout=120)
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["rank", "computes", "only", "communicates", "only", "waits", "idle"]
    rows = [list(map(int, re.findall(r"\d+", line))) for line in lines[:4]]
    assert [rank for rank, *_ in rows] == [0, 1, 2, 3]
    assert [sum(percents) for _, *percents in rows] == [100] * 4
    assert {path.name for path in tmp_path.iterdir()} == {"trace-1.3.png", "trace-1.3.json"}
