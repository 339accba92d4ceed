"""Functions on their way to another process: they keep the names of their files.

A report names the line of a rank. cloudpickle carries a function by value, and since version 3.1.3
it puts ``<dynamic-code>`` where the code had the name of its file.
"""

from __future__ import annotations

import io
import marshal
from types import CodeType
from typing import Any

import cloudpickle


class Pickler(cloudpickle.Pickler):
    """cloudpickle's, but for code. Both ends run the same Python, so ``marshal`` can carry it."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, CodeType):
            return marshal.loads, (marshal.dumps(value),)
        return super().reducer_override(value)


def carried(values: object, by: type[Pickler] = Pickler) -> bytes:
    """``values`` as another process reads them, with ``pickle``."""
    buffer = io.BytesIO()
    by(buffer).dump(values)
    return buffer.getvalue()
