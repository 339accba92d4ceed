"""The outcome of a run: values, or the failure that explains why there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..observe.failure import CheckFailed
from ..observe.log import Log

PIPE_LOST = 97  # exit status of a rank that can't report any more


class RankResults(list[Any]):
    """The W return values; ``logs`` and ``output`` (standard output and error) per rank.

    ``on_read`` is called whenever values or logs are read: then the check judges this run.
    """

    on_read: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, values: list[Any], logs: list[Log], output: list[str]) -> None:
        super().__init__(values)
        self._logs = logs
        self.output = output

    @property
    def logs(self) -> list[Log]:
        """The communication of each rank."""
        self.on_read()
        return self._logs

    def __iter__(self) -> Iterator[Any]:
        self.on_read()
        return super().__iter__()

    def __getitem__(self, key: Any) -> Any:
        self.on_read()
        return super().__getitem__(key)


@dataclass
class RankReport:
    """Where one rank was when the run ended."""

    rank: int
    state: str
    line: str = ""
    output: str = ""
    detail: dict[str, Any] = field(default_factory=dict)


class RankFailure(CheckFailed):
    """The run failed: ``kind`` is exception, crash, hang, mismatch, blank, needs or error.

    ``reports`` tells for each rank where it was; ``cause`` equals ``kind`` unless an exception
    raised in a rank carried a cause of its own.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str,
        cause: str = "",
        rank: int | None = None,
        line: str = "",
        reports: list[RankReport] | None = None,
    ) -> None:
        super().__init__(message, cause=cause or kind, rank=rank, line=line)
        self.kind = kind
        self.reports = reports or []
        self.interleaving: int | None = None  # of virtual ranks: the seed that repeats it


def garbled(rank: int) -> RankFailure:
    """The bytes from the pipe are not those that the toolkit in the rank sends."""
    return RankFailure(
        f"rank {rank} wrote to a file descriptor that it had not opened: its report to the grader "
        "can't be read",
        kind="crash",
        rank=rank,
    )
