"""How a grading ends: by itself, by a signal, or killed. No process or file of it stays.

- Ranks die with the grader (``processes.die_with_parent``), also if SIGKILL ends it. Daemons of the
  learner's code become the grader's children, and it ends them.
- Temporary files of checks and ranks lie in one folder. If the grader was killed, a guardian
  removes the folder and ends all processes that still use it. The guardian is a shell that waits
  for the end of a pipe that only the grader holds. It can't find a daemon that has closed all its
  files; only a living grader ends such a daemon.
- SIGTERM is a request like Ctrl-C (``processes.terminable``): one line, exit status 143.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

from ..host.processes import become_subreaper, children, end_strays, not_for_children
from ..virtual import reap_children

# $0 is the folder; it is gone already unless the grader was killed. A process that still belongs to
# the grading has a file in it open (forked processes: the folder itself), or TMPDIR set to it.
_GUARDIAN = """
trap '' HUP INT TERM
read -r line
[ -e "$0" ] || exit 0
for each in 1 2 3 4 5 6 7 8 9; do
    left=$(find /proc/[0-9]*/fd -lname "$0*" 2>/dev/null; grep -ls "TMPDIR=$0" /proc/[0-9]*/environ)
    for path in $left; do
        path=${path#/proc/}
        kill -9 "${path%%/*}" 2>/dev/null
    done
    rm -rf -- "$0"
    [ -z "$left" ] && [ ! -e "$0" ] && exit 0
    sleep 0.1
done
"""


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """All processes started inside have ended afterwards, and their temporary files are gone."""
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
    mark = os.open(folder, os.O_RDONLY)  # every process that is forked from this one has it
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
        os.close(mark)
        not_for_children.remove(writing)
        os.close(writing)
        guardian.wait()
