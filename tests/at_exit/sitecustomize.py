"""With this folder on PYTHONPATH and a folder in THREADS_AT_EXIT, every rank of a program writes
there which threads its groups have made, and which of them are left when the program has ended.

Python imports a module of this name at its start. Threads are known by their numbers, because
torch 2.8 does not name them; in /proc/self/task, because Python knows only its own.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

MAKES_GROUPS = "torch.distributed.distributed_c10d"
TASKS = Path("/proc/self/task")


def threads() -> dict[str, str]:
    """Number and name of every thread of this process."""
    found = {}
    for task in TASKS.iterdir():
        try:
            found[task.name] = (task / "comm").read_text().strip()
        except OSError:
            continue  # it has just ended
    return found


class Watch:
    """The threads that groups of this process have made."""

    def __init__(self) -> None:
        self.made: set[str] = set()

    def start(self, c10d: ModuleType) -> None:
        """From now on."""
        c10d._new_process_group_helper = self._noting(c10d._new_process_group_helper)

    def _noting(self, make_group: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make_group)
        def noting(*args: Any, **settings: Any) -> Any:
            before = threads()
            group = make_group(*args, **settings)
            self.made |= threads().keys() - before.keys()
            return group

        return noting

    def left(self) -> list[str]:
        """The names of those that are left."""
        now = threads().items()
        return sorted(name for number, name in now if number in self.made or "gloo" in name)

    def write(self, folder: str) -> None:
        """Tell how many there were, and which are left."""
        failed = hasattr(sys, "last_value")  # an exception that nobody caught
        text = json.dumps({"made": len(self.made), "left": self.left(), "failed": failed})
        Path(folder, f"rank{os.environ['RANK']}-{os.getpid()}.json").write_text(text)


class WhenImported:
    """An import hook: calls ``then`` with the module ``name`` once it is there."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec


if __name__ == "sitecustomize" and "RANK" in os.environ and "THREADS_AT_EXIT" in os.environ:
    watch = Watch()
    atexit.register(watch.write, os.environ["THREADS_AT_EXIT"])  # the first one is called last
    sys.meta_path.insert(0, WhenImported(MAKES_GROUPS, watch.start))  # type: ignore[arg-type]
