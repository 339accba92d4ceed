"""torchrun for the trainer: a run that is refused ends with one line, and is not begun again.

torchrun starts ranks again, whatever they ended with. A run that can't be (another model's
checkpoint, a model that is too large, a full disk) would be refused four times, and the reason
would stand above a report of the agent's. So a rank that refuses says why, and signals its agent
with ``GIVE_UP``; the agent ends the other ranks, closes the rendezvous and leaves with status 1.

    python -m solutions.phase4_production.agent --nproc-per-node 8 -m -- PROGRAM …

Arguments are torchrun's own. Under another agent (Kubeflow's) a refusal is a rank that failed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from types import FrameType

GIVE_UP = signal.SIGUSR2
AGENT = "TRAINER_AGENT"  # its process id, for the ranks


def give_up() -> None:
    """Called by a rank: let the agent end the run, if it is one of these."""
    agent = os.environ.get(AGENT)
    if agent == str(os.getppid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(agent), GIVE_UP)


def end(number: int, frame: FrameType | None) -> None:
    """A rank has said what is wrong: nothing else is news."""
    signal.signal(GIVE_UP, signal.SIG_IGN)
    logging.disable(logging.WARNING)
    sys.exit(1)


def main() -> None:
    """torchrun, which can be given up."""
    from torch.distributed import run

    os.environ[AGENT] = str(os.getpid())
    signal.signal(GIVE_UP, end)
    run.main()


if __name__ == "__main__":
    main()
