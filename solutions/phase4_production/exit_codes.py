"""The exit statuses of this phase's programs, and after which of them a run is started again.

The agent (``agent.py``) and ``launch_training.sh`` end with the status that ends the run, so that a
Job, a unit or a queue can act on it. Any other status is a crash as well: 128 + N when signal N
ended the process, 126 and 127 when a shell could not start it.

78, 75 and 70 are EX_CONFIG, EX_TEMPFAIL and EX_SOFTWARE of BSD's ``sysexits.h``. This module
imports nothing: a check of manifests can read it without torch.
"""

from __future__ import annotations

DONE = 0
CRASHED = 1  # an error that may be another one the next time: retried
HUNG = 70  # a watchdog ended the run: retried
PREEMPTED = 75  # told to leave; all ranks saved: started again, as often as it takes
REFUSED = 78  # it can't run like this, however often it is tried: never retried

MEANING = {
    DONE: "done",
    CRASHED: "crashed, to be retried",
    HUNG: "hung and ended by the watchdog, to be retried",
    PREEMPTED: "saved after a signal, to be started again",
    REFUSED: "refused, not to be retried",
}
