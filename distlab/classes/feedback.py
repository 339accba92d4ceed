"""A student's feedback: the grader's own report, as HTML and as Markdown.

Everything that comes from a student is shown as plain text. rich escapes it for HTML. In Markdown
it stands in a fence that is longer than any fence in the text itself.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence

from rich.console import Console

from ..course.catalogue import load_course
from ..grading.report import print_report
from ..grading.verdicts import Report

WIDTH = 100
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; margin: 2em auto; max-width: 62em; padding: 0 1em; }}
pre {{ overflow-x: auto; padding: 1em; border: 1px solid #ccc; white-space: pre-wrap; }}
</style>
<h1>{title}</h1>
<ul>
{facts}
</ul>
{reports}
</html>
"""


def as_markdown(title: str, facts: Sequence[str], reports: Sequence[Report]) -> str:
    """The page in Markdown."""
    parts = [f"# {_plain(title)}", "\n".join(f"- {_plain(fact)}" for fact in facts)]
    for report in reports:
        text = _printed(report).export_text()
        ticks = max(map(len, re.findall("`+", text)), default=0)
        fence = "`" * max(3, ticks + 1)
        parts.append(f"{fence}text\n{_clean(text).rstrip()}\n{fence}")
    return "\n\n".join(parts) + "\n"


def as_html(title: str, facts: Sequence[str], reports: Sequence[Report]) -> str:
    """The page in HTML: one file, with nothing from elsewhere."""
    shown = [
        _printed(report).export_html(code_format="<pre>{code}</pre>", inline_styles=True)
        for report in reports
    ]
    return PAGE.format(
        title=html.escape(_clean(title)),
        facts="\n".join(f"<li>{html.escape(_clean(fact))}</li>" for fact in facts),
        reports="\n".join(_clean(text) for text in shown),
    )


def _printed(report: Report) -> Console:
    """A console that has recorded the grader's output."""
    out = Console(record=True, file=io.StringIO(), width=WIDTH, color_system="truecolor")
    print_report(report, load_course().phase(report.phase), out)
    return out


def _clean(text: str) -> str:
    """The text without characters that steer a terminal, or that UTF-8 can't hold."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _plain(text: str) -> str:
    """A line that Markdown reads as text and as nothing else."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&!])", r"\\\1", " ".join(_clean(text).split()))
