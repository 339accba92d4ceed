"""``python -m distlab`` is the ``distlab`` command."""

import sys

from .cli import main

sys.exit(main())
