"""How a grading ends: by itself, by a signal, or killed; nothing that it has started stays.

- Ranks die with the grader (``processes.die_with_parent``), daemons of the learner's code are ended
  by it, since they become its children. Of a grader that SIGKILL ends the ranks still die at once.
- Temporary files of checks and ranks lie in one folder. A guardian removes it: a shell that waits
  for the end of a pipe which only the grader holds, so that it wakes whatever ended the grader.
- SIGTERM is a request like Ctrl-C (``processes.terminable``): one line, exit status 143.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

from ..processes import become_subreaper, children, end_strays, not_for_children
from ..virtual import reap_children

_GUARDIAN = """
trap '' HUP INT TERM
read -r line
for each in 1 2 3 4 5 6 7 8 9; do
    [ -e "$0" ] || exit 0
    rm -rf -- "$0" || sleep 0.2
done
"""


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """What is started inside has ended afterwards, and its temporary files are gone."""
    become_subreaper()
    before = children()
    try:
        with _temporary_files():
            yield
    finally:
        reap_children()
        end_strays(before)


@contextlib.contextmanager
def _temporary_files() -> Iterator[None]:
    """One folder for all temporary files of this process and those that it starts."""
    folder = tempfile.mkdtemp(prefix="distlab-")
    reading, writing = os.pipe()
    guardian = subprocess.Popen(
        ["/bin/sh", "-c", _GUARDIAN, folder],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
    os.close(reading)
    not_for_children.append(writing)
    outside = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    try:
        yield
    finally:
        tempfile.tempdir = outside[1]
        os.environ.pop("TMPDIR")
        if outside[0] is not None:
            os.environ["TMPDIR"] = outside[0]
        shutil.rmtree(folder, ignore_errors=True)
        not_for_children.remove(writing)
        os.close(writing)
        guardian.wait()
