"""What checks are written with: markers and expectations whose failures a learner can read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import pytest
import torch

from ..explain.diagnosis import explain
from ..observe.failure import CheckFailed
from ..ranks.results import RankResults

F = TypeVar("F", bound=Callable[..., Any])


def exercise(exercise_id: str, tiers: str = "gloo") -> pytest.MarkDecorator:
    """Mark a test as a check of ``exercise_id`` that runs on the ``tiers`` named.

    ``virtual``: virtual ranks, several interleavings, every case of ``cases``; ``gloo``: forked
    processes; ``cuda``: GPUs, where there are any. What communicates belongs on virtual first.
    """
    return pytest.mark.exercise(exercise_id, tiers=tuple(tiers.split()))


def trace(exercise_id: str, *, bubble: float | None = None) -> Callable[[F], F]:
    """Mark ``scenario(impl) -> body`` as what ``distlab trace`` runs for ``exercise_id``.

    ``bubble``: the share of idle time that theory gives; then the run is drawn as a pipeline, whose
    steps the body names with ``RankContext.span``.
    """

    def mark(scenario: F) -> F:
        scenario.bubble = bubble  # type: ignore[attr-defined]
        scenario.trace_of = {*getattr(scenario, "trace_of", ()), exercise_id}  # type: ignore
        return scenario

    return mark


def fail(
    message: str, *, cause: str = "wrong", rank: int | None = None, line: str = ""
) -> NoReturn:
    """Fail the check with a message, a stable cause, and the rank and line where it shows."""
    raise CheckFailed(message, cause=cause, rank=rank, line=line)


def _where(rank: int | None) -> str:
    return "" if rank is None else f" on rank {rank}"


def expect_equal(
    got: object, want: object, *, what: str, rank: int | None = None, cause: str = "wrong"
) -> None:
    """Fail unless the plain values are equal."""
    if got != want:
        fail(f"{what}{_where(rank)}: expected {want!r}, got {got!r}", cause=cause, rank=rank)


def refusal(call: Callable[..., object], *args: object, **kwargs: object) -> str:
    """The message of the ValueError that the call raises; if it doesn't, ``"!"`` and what it did.

    For the bodies of ranks; ``expect_refused`` judges what they return.
    """
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)
    except Exception as error:
        return f"!it raised {type(error).__name__}: {error}"
    return "!it was accepted"


def expect_refusals(
    refusals: Sequence[str],
    calls: Sequence[tuple[str, Sequence[object]]],
    *,
    cause: str = "accepted",
    rank: int | None = None,
) -> None:
    """Fail unless every one of ``calls`` was refused, with the numbers named (see ``refusal``)."""
    for (what, numbers), text in zip(calls, refusals, strict=True):
        if text.startswith("!"):
            message = f"{what}{_where(rank)}: expected a ValueError, but {text[1:]}"
            fail(message, cause=cause, rank=rank)
        missing = [str(n) for n in numbers if str(n) not in text]
        if missing:
            named = " and ".join(missing)
            message = f"{what}{_where(rank)}: the message should name {named}: {text}"
            fail(message, cause="unclear-message", rank=rank)


def expect_refused(
    results: RankResults, calls: Sequence[tuple[str, Sequence[object]]], *, cause: str = "accepted"
) -> None:
    """Fail unless every rank refused every call, naming its numbers, before anything was sent.

    ``results``: for each rank the list of its ``refusal``s; ``calls``: for each of them what it is,
    and the numbers that its message must hold.
    """
    for rank, refusals in enumerate(results):
        expect_refusals(refusals, calls, cause=cause, rank=rank)
        if results.logs[rank].events:
            event = results.logs[rank].events[0]
            fail(
                f"rank {rank} issued {event} before the arguments were checked",
                cause="late-check",
                rank=rank,
                line=event.line,
            )


def expect_close(
    got: torch.Tensor | None,
    want: torch.Tensor,
    *,
    what: str,
    rank: int | None = None,
    **explanation: Any,
) -> None:
    """Fail unless ``got`` equals ``want`` to rounding, and say which known mistake explains it.

    Further arguments go to ``diagnose.explain``: contributions, before, weights, rtol …
    """
    if not isinstance(got, torch.Tensor):
        fail(f"{what}{_where(rank)}: expected a tensor, got {got!r}", cause="missing", rank=rank)
    found = explain(got.detach().cpu(), want.detach().cpu(), rank=rank, **explanation)
    if found is None:
        return
    fail(
        f"{what}{_where(rank)}: {found.sentence}\n"
        f"  expected {_preview(want)}\n  got      {_preview(got)}",
        cause=found.cause,
        rank=rank,
    )


def _preview(tensor: torch.Tensor) -> str:
    """The first elements, on one line, with the shape and dtype."""
    values = ", ".join(f"{v:.6g}" for v in tensor.detach().cpu().flatten()[:6].tolist())
    more = ", …" if tensor.numel() > 6 else ""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"[{values}{more}]  ({dtype}, shape {tuple(tensor.shape)})"
