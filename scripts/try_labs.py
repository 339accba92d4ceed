"""Try every debugging lab: ``python -m scripts.try_labs [D3.02 …]``.

A lab must show its bug in what is handed out, on the ranks that it names, and nowhere where it says
that all is well.
"""

from __future__ import annotations

import sys

from distlab.labs.debug.chosen import all_labs
from distlab.labs.debug.folder import doubts

SEED = 3


def main(names: list[str]) -> int:
    """Print what is not as it should be; the exit status."""
    wanted = [lab for lab in all_labs() if not names or lab.id in names]
    found = []
    for lab in wanted:
        found.append(doubts(lab, SEED))
        print(found[-1] or f"{lab.id}: shows", flush=True)
    return 1 if any(found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
