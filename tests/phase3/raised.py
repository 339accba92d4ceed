"""What an exception in a rank means, where the check can say more than the exception does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from distlab.ranks import RankFailure


@contextlib.contextmanager
def reworded(part: str, message: str, cause: str) -> Iterator[None]:
    """A run that fails because a rank raised an exception with ``part`` in its text says this."""
    try:
        yield
    except RankFailure as failure:
        if failure.kind == "exception" and part in failure.message:
            failure.message, failure.cause = message, cause
        raise
