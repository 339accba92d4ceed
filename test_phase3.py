"""Grade your work on phase 3: ``python test_phase3.py [3.2 …] [--json FILE]``."""

import sys

if __name__ == "__main__":
    try:
        from distlab.grading import main
    except ImportError as error:
        sys.exit(
            f"{sys.executable} lacks {error.name}: run `make env`, then "
            "`source .venv/bin/activate` (or .venv/bin/python test_phase3.py)"
        )
    sys.exit(main(phase=3))
