"""The tools for writing checks: markers, and expectations whose failures a learner can read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import pytest
import torch

from ..explain.diagnosis import explain
from ..observe.failure import CheckFailed
from ..ranks.results import RankResults
from ..virtual.devices import COPY_THERE

F = TypeVar("F", bound=Callable[..., Any])
SHOWN = 6  # elements of a tensor in a message


def exercise(
    exercise_id: str, tiers: str = "gloo", *, asserts: str = "", nccl: bool = False
) -> pytest.MarkDecorator:
    """Mark a test as a check of ``exercise_id`` that runs on the ``tiers`` named.

    ``asserts``: the promises and axes of the exercise's contract that it asserts (``contract``).

    ``virtual``: virtual ranks, several interleavings, every case of ``cases``; ``gloo``: forked
    processes; ``cuda``: GPUs, where there are any. A check that communicates belongs on virtual
    first. A check for virtual ranks and GPUs also runs on virtual ranks by NCCL's rules, the tier
    ``nccl``. With ``nccl`` it does so in every run, else where ``--tier nccl`` asks for it.
    """
    named = tuple(tiers.split())
    return pytest.mark.exercise(exercise_id, tiers=named, asserts=asserts.split(), nccl=nccl)


def trace(
    exercise_id: str, *, bubble: float | None = None, measures: str = "time"
) -> Callable[[F], F]:
    """Mark ``scenario(impl) -> body`` as what ``distlab trace`` runs for ``exercise_id``.

    ``measures``: the number that ``distlab measure`` tells of it, from ``picture/measured.py``.
    ``bubble``: the share of idle time in theory. With it the run is drawn as a pipeline, and the
    body names its steps with ``RankContext.span``.
    """

    def mark(scenario: F) -> F:
        scenario.bubble = bubble  # type: ignore[attr-defined]
        number = measures if bubble is None else "bubble"
        scenario.trace_of = getattr(scenario, "trace_of", {}) | {exercise_id: number}  # type: ignore
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
    """The message of the ValueError that the call raises; for any other outcome ``"!"`` and that
    outcome.

    For the bodies of ranks; ``expect_refused`` judges what they return.
    """
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error).lstrip("!")
    except Exception as error:
        return f"!it raised {type(error).__name__}: {error}"
    return "!it was accepted"


def expect_refusals(
    refusals: Sequence[str],
    calls: Sequence[str],
    *,
    cause: str = "accepted",
    rank: int | None = None,
) -> None:
    """Fail unless every one of ``calls`` was refused with a ValueError, in any words."""
    for call, text in zip(calls, refusals, strict=True):
        if text.startswith("!"):
            message = f"{call}{_where(rank)}: expected a ValueError, but {text[1:]}"
            fail(message, cause=cause, rank=rank)


def expect_refused(results: RankResults, calls: Sequence[str], *, cause: str = "accepted") -> None:
    """Fail unless every rank refused every call before anything was sent.

    ``results``: for each rank the list of its ``refusal``s. ``calls``: the words for each of them.
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


def expect_few_waits(
    results: RankResults, most: int, what: str, region: str = "step", *, copies: bool = True
) -> None:
    """Fail if a rank's host waited for its GPU more than ``most`` times in ``region``.

    Only runs by NCCL's rules note such waits. ``copies``: whether copies to the GPU count, too.
    """
    for rank, reads in enumerate(getattr(results, "host_reads", ())):
        found = [read for read in reads if read.region == region]
        found = [read for read in found if copies or read.what != COPY_THERE]
        if len(found) > most:
            where = "".join(f"\n  {each.what} at {each.line}" for each in dict.fromkeys(found))
            fail(
                f"{what}: rank {rank}'s host waits for its GPU {len(found)} times, and {most} are "
                f"enough; each time the GPU runs out of work while the host waits{where}",
                cause="host",
                rank=rank,
                line=max(found, key=found.count).line,
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
    got, want = got.detach().cpu(), want.detach().cpu()
    found = explain(got, want, rank=rank, **explanation)
    if found is None:
        return
    expected, shown = _previews(want, got)
    fail(
        f"{what}{_where(rank)}: {found.sentence}\n  expected {expected}\n  got      {shown}",
        cause=found.cause,
        rank=rank,
    )


def _previews(want: torch.Tensor, got: torch.Tensor) -> tuple[str, str]:
    """A few elements of both, around the largest difference, in enough digits to see it."""
    first = 0
    if want.shape == got.shape and want.numel() > SHOWN:
        apart = (want.double() - got.double()).abs().nan_to_num(torch.inf).flatten()
        largest = int(apart.argmax())
        first = largest - 1 if largest >= SHOWN else 0
    texts = "", ""
    for digits in (6, 9, 17):
        texts = _preview(want, first, digits), _preview(got, first, digits)
        if texts[0] != texts[1]:
            break
    return texts


def _preview(tensor: torch.Tensor, first: int, digits: int) -> str:
    """Some elements from the ``first`` on, on one line, with the shape and dtype."""
    shown = tensor.flatten()[first : first + SHOWN].tolist()
    values = ", ".join(str(v) if isinstance(v, int) else f"{v:.{digits}g}" for v in shown)
    values = ("…, " if first else "") + values
    values += ", …" if tensor.numel() > first + SHOWN else ""
    dtype = str(tensor.dtype).removeprefix("torch.")
    begin = f", from element {first} on" if first else ""
    return f"[{values}]  ({dtype}, shape {tuple(tensor.shape)}{begin})"
