"""``python -m distlab.record``, alone or under torchrun: ``distlab record`` as a module."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main(["record", *sys.argv[1:]]))
