"""torchrun whose end says how the ranks ended: one line where it is needed, and their exit status.

    python -m given.torchrun --nproc-per-node 2 PROGRAM …          arguments are torchrun's own

torchrun ends with status 1 and a report, whatever its ranks ended with. It starts all of them again
after any status, and answers a signal with a traceback. Here

- a status with which a rank ended itself is the agent's, else 128 + N if signal N ended it;
- a status in ``final`` is never tried again, and one in ``again`` does not use up a restart. The
  rank has said why, so nothing is added;
- SIGTERM, SIGINT, SIGHUP or SIGQUIT (``signals``) reaches the ranks as SIGTERM. Then the status is
  theirs if they left with one in ``final`` or ``again``, 0 if they were done, else 128 + N. If
  ranks could leave with one in ``again`` but none had begun, it is that one. A second signal ends
  all at once. A signal within ``SAME`` seconds counts as the same one: a scheduler and its script
  may both pass on one wish.

Ranks that call ``given.parent.end_with_parent`` end with this process, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from given.parent import announce

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
SAME = 1.0
NOISE = "torch.distributed.elastic.multiprocessing.api"  # its logger for ranks that end


@dataclass
class Ending:
    """The signal that the agent received, and how its ranks ended."""

    name: str  # in front of each line
    final: Collection[int]
    again: Collection[int]
    told: signal.Signals | None = None
    when: float = 0.0
    running: bool = False  # torchrun's loop, which an exception ends in order
    starting: bool = False  # ranks, of which the loop does not know yet
    ranks: dict[int, Any] = field(default_factory=dict)  # the processes, by local rank

    def note(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler; the first one ends torchrun's loop."""
        if self.told is None:
            self.told, self.when = signal.Signals(number), time.monotonic()
            logging.disable(logging.WARNING)  # torchrun tells of each signal that it passes on
            if not self.running:
                self.leave(self.status_when_told())
            if not self.starting:
                self.end_loop()
        elif time.monotonic() - self.when > SAME:
            for process in self.ranks.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            self.say(f"{signal.Signals(number).name} again: ended at once, nothing was saved")
            self.leave(128 + number)

    def end_loop(self) -> None:
        """torchrun then passes SIGTERM on to the ranks that it knows."""
        from torch.distributed.elastic.multiprocessing import SignalException

        assert self.told is not None
        raise SignalException(self.told.name, signal.SIGTERM)

    def leave(self, status: int) -> None:
        sys.stdout.flush()
        os._exit(status)

    def say(self, what: str) -> None:
        print(f"{self.name}: {what}", file=sys.stderr, flush=True)

    def status_when_told(self) -> int:
        """The status after a signal; prints a line if the ranks have not said it themselves."""
        assert self.told is not None
        codes = {process.poll() for process in self.ranks.values()}
        for known in (*self.final, *self.again):
            if known in codes:
                return known
        if codes == {0}:
            return 0
        if self.again and codes <= {0, -signal.SIGTERM}:
            self.say(f"ended by {self.told.name} before the ranks had begun")
            return next(iter(self.again))
        killed = ", and ranks that did not leave were killed" if -signal.SIGKILL in codes else ""
        self.say(f"ended by {self.told.name}{killed}")
        return 128 + self.told

    def status_of(self, codes: Sequence[int], report: str) -> int:
        """The status after ranks that failed, in the order in which they did."""
        for known in (*self.final, *self.again):
            if known in codes:
                return known
        if set(codes) != {-signal.SIGTERM}:  # that was said already
            print(report, file=sys.stderr, flush=True)
        return next((code for code in codes if code > 0), 128 - codes[0])


@contextlib.contextmanager
def held_back(ending: Ending, codes: set[int]) -> Iterator[None]:
    """Hold back torchrun's log about ranks that end, until it is known whether it is news."""
    logger, records = logging.getLogger(NOISE), []

    def hold(record: logging.LogRecord) -> bool:
        records.append(record)
        return False

    logger.addFilter(hold)
    try:
        yield
    finally:
        logger.removeFilter(hold)
        if codes == {-signal.SIGTERM}:
            ending.say("a rank was ended by SIGTERM")
        elif not ending.told and not codes & {*ending.final, *ending.again}:
            for record in records:
                logger.handle(record)


def agent_class(ending: Ending) -> type:
    """torchrun's agent, which tells ``ending`` of its ranks and knows which end needs no restart.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Agent(LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            ending.starting = True
            try:
                started = super()._start_workers(worker_group)
                handlers = self._pcontext.subprocess_handlers
                ending.ranks = {rank: handler.proc for rank, handler in handlers.items()}
            finally:
                ending.starting = False
            if ending.told:
                ending.end_loop()
            return started

        def _monitor_workers(self, worker_group: Any) -> Any:
            codes: set[int] = set()
            with held_back(ending, codes):
                result = super()._monitor_workers(worker_group)
                codes |= {failure.exitcode for failure in result.failures.values()}
            if codes & set(ending.final):
                self._remaining_restarts = 0
            elif codes & set(ending.again) and self._remaining_restarts:
                self._remaining_restarts += 1
            return result

        def _shutdown(self, *arguments: Any, **options: Any) -> None:
            if ending.told and self._pcontext:  # before torch 2.9 no setting said how long
                seconds = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
                self._pcontext.close(signal.SIGTERM, seconds)
            super()._shutdown(*arguments, **options)

    return Agent


def torchrun(
    arguments: Sequence[str],
    *,
    name: str = "torchrun",
    final: Collection[int] = (),
    again: Collection[int] = (),
    signals: Collection[signal.Signals] = SIGNALS,
) -> int:
    """Run torchrun in this process, which must be its main thread; the exit status."""
    ending = Ending(name, final, again)
    for number in signals:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
            signal.signal(number, ending.note)
    announce()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException, api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher import api as launcher

    handlers = {number: signal.getsignal(number) for number in SIGNALS}

    def pass_on(number: int, frame: FrameType | None) -> None:
        handler = handlers.get(signal.Signals(number), ending.note)
        if callable(handler):
            handler(number, frame)

    launcher.LocalElasticAgent = agent_class(ending)
    api._terminate_process_handler = pass_on  # torchrun installs it whenever it starts ranks
    ending.running = True
    try:
        run.main(list(arguments))
    except SignalException:
        return ending.status_when_told()
    except ChildFailedError as error:
        first = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        return ending.status_of([failure.exitcode for failure in first], str(error))
    except RendezvousError as error:  # the node that all meet at has gone
        ending.say(f"{type(error).__name__}: {error}")
        return 1
    finally:
        ending.running = False
    return 0


if __name__ == "__main__":
    sys.exit(torchrun(sys.argv[1:]))
