"""What all tests share."""

from __future__ import annotations

import os
import sys

# the trainer under test runs on the Python that runs the tests, whatever .venv has
os.environ["LAUNCH_PYTHON"] = sys.executable
