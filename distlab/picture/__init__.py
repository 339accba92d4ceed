"""The ranks' work over time: spans, pictures of them, and traces for Perfetto."""

from .lanes import draw
from .pipeline import draw_pipeline
from .spans import Span, covered, idle_share, shares, spans_of
from .traces import chrome_trace, trace_run

__all__ = [
    "Span",
    "chrome_trace",
    "covered",
    "draw",
    "draw_pipeline",
    "idle_share",
    "shares",
    "spans_of",
    "trace_run",
]
