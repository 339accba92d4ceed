"""Run a function on W real ranks: W results, or one clear failure."""

from .context import RankContext
from .options import Options
from .results import RankFailure, RankReport, RankResults
from .run import run_ranks
from .start import fork_problem

__all__ = [
    "Options",
    "RankContext",
    "RankFailure",
    "RankReport",
    "RankResults",
    "fork_problem",
    "run_ranks",
]
