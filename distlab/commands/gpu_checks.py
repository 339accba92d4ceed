"""``python -m distlab.commands.gpu_checks PHASE``: the checks of the cuda tier, on the solutions.

Prints one line of JSON. It is a program of its own, because torch chooses its backend for NCCL when
it is imported.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

from ..grading.run import run_session
from ..grading.session import Request
from ..grading.sources import phase_of
from ..grading.verdicts import Report

TROUBLE = ("fail", "error", "hang", "crash", "blank")


def outcome(report: Report) -> dict[str, Any]:
    """The outcome of a phase's checks of the cuda tier: status, counts, and every failure."""
    checks = [(e.id, c) for e in report.exercises for c in e.checks if c.tier == "cuda"]
    counts = Counter(check.verdict for _, check in checks)
    failures = [
        {"exercise": number, "check": c.name, "verdict": c.verdict, "message": c.message}
        for number, c in checks
        if c.verdict in TROUBLE
    ]
    absent = Counter(check.message for _, check in checks if check.verdict == "needs")
    status = "failed" if failures else "passed" if counts["pass"] else "needs"
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    if failures:
        first = failures[0]
        told += f"; {first['exercise']} {first['check']}: {first['message'].splitlines()[0]}"
    result = {"verdicts": counts, "failures": failures, "needs": absent, "seed": report.seed}
    return {"status": status, "message": told or "no check has this tier", "result": result}


def main() -> int:
    """Grade the phase's solutions on GPUs; the exit status is 0 whatever the verdicts are."""
    request = Request(impl="solutions", device="cuda", tier="cuda", trusted=True)
    print(json.dumps(outcome(run_session(phase_of(int(sys.argv[1])), request))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
