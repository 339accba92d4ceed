"""torchrun for the trainer: its ranks' exit status comes through, and decides about a restart.

    python -m solutions.phase4_production.agent --nproc-per-node 8 -m -- PROGRAM …

Arguments are torchrun's own. torchrun starts ranks again after any exit status. It would try an
impossible run (another model's checkpoint, a model that is too large) four times, and print a
report of its own below the reason. Here a refusal ends the run with its status. Ranks that were
told to leave and saved are started again. That is no failure and uses up no restart. An agent that
is told to end has its ranks save, and leaves with their status (``exit_codes``). Under another
agent (Kubeflow's) a refusal is a rank that failed.
"""

from __future__ import annotations

import signal
import sys

from given.torchrun import SIGNALS, torchrun

from .exit_codes import PREEMPTED, REFUSED


def main() -> None:
    """Entry point."""
    signals = (*SIGNALS, signal.SIGUSR1)  # SLURM is asked to send it before the time is over
    arguments = sys.argv[1:]
    ends = {"final": [REFUSED], "again": [PREEMPTED]}
    sys.exit(torchrun(arguments, name="launch_training", signals=signals, **ends))


if __name__ == "__main__":
    main()
