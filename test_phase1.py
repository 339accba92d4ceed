"""Grade your work on phase 1: ``python test_phase1.py [1.4 …] [--json FILE]``."""

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # of what is imported nothing is garbage: looking takes a tenth of the time
    try:
        from distlab.commands.grade import main
    except ImportError as error:
        sys.exit(
            f"{sys.executable} lacks {error.name}: run `make env`, then "
            "`source .venv/bin/activate` (or .venv/bin/python test_phase1.py)"
        )
    gc.enable()
    sys.exit(main(phase=1))
