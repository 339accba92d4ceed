"""A folder that appears when it is complete: it is filled under another name and renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def make_folder(folder: str | Path, fill: Callable[[Path], None]) -> Path:
    """Make ``folder`` unless it is there; safe when several processes call it at once.

    ``fill`` writes the contents into the folder that it is given.
    """
    folder = Path(folder)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    fill(made)
    made.chmod(0o755)
    try:
        os.rename(made, folder)
    except OSError:  # another process was faster
        shutil.rmtree(made)
    return folder
