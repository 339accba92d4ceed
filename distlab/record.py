"""``python -m distlab.record``, alone or under torchrun: see ``reference/record.py``."""

import sys

from .reference.record import main

if __name__ == "__main__":
    sys.exit(main())
