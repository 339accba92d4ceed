"""``distlab class report`` and ``class similar``: the mistakes of a class,
and code that is alike."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from ..classes.config import load_class
from ..classes.repository import Commits
from ..host.terminal import say


def add_arguments(parts: Any) -> None:
    """The options of both, for the parser of ``distlab class``."""
    told = parts.add_parser("report", help="one page without names, to talk about in class")
    told.add_argument("results", type=Path, help="the folder that grading wrote")
    told.add_argument(
        "--submissions", type=Path, help="with them the page shows code, and when it was written"
    )
    alike = parts.add_parser("similar", help="a hint: which submissions have code in common")
    alike.add_argument("submissions", type=Path, help="a folder with one entry for each student")
    alike.add_argument("--out", type=Path, required=True, help="the page to write")
    alike.add_argument("--config", type=Path, help="the rules, for example class.toml")


def report(options: argparse.Namespace, out: Console) -> int:
    """Write ``report.html`` beside the results; 1 if a result could not be read."""
    # start-up time: it imports torch, and other commands need not wait for that
    from ..classes.outcomes import load_results
    from ..classes.report import write_report
    from ..grading.wrong import all_mutants

    results = load_results(options.results)
    with tempfile.TemporaryDirectory() as folder:
        folders: dict[str, Path] = {}
        histories: dict[str, Commits] = {}
        if options.submissions is not None:
            # start-up time: as above
            from ..classes.handed_in import lay_out, rules_of

            digests = {s.id: s.digest for s in results.students}
            rules = rules_of(results)
            folders, histories = lay_out(options.submissions, rules, Path(folder), digests)
            missing = len({s.id for s in results.graded} - {*folders})
            if missing:
                say(out, f"graded, but not in {options.submissions}: {missing}", "yellow")
        path = write_report(options.results, results, folders, histories, all_mutants())
    for line in results.unread:
        say(out, line, "yellow")
    say(out, str(path), label="report: ")
    return 1 if results.unread else 0


def similar(options: argparse.Namespace, out: Console) -> int:
    """Write the page with the pairs."""
    try:
        # start-up time: it imports matplotlib
        from ..classes import similarity
    except ModuleNotFoundError as error:
        raise ValueError(
            f"`distlab class similar` needs {error.name}: pip install copydetect"
        ) from None
    # start-up time: as above
    from ..classes.handed_in import lay_out
    from ..classes.results import write

    if options.out.is_dir():
        raise ValueError(f"--out {options.out} is a folder: name a file, for example similar.html")
    with tempfile.TemporaryDirectory() as folder:
        folders, _ = lay_out(options.submissions, load_class(options.config), Path(folder))
        found = similarity.likeness(folders)
    write(options.out, similarity.page(found))
    count = len(found.pairs)
    pairs = f"{count} pair{'' if count == 1 else 's'} of submissions"
    say(out, f"{pairs} to look at, of {found.students} submissions: a hint, no verdict")
    say(out, str(options.out), label="page: ")
    return 0
