"""A request to an agent: the body of a check with all that it uses, pickled.

Definitions from files of checks go by value, because these files are absent inside. Only those that
the body uses go along.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from ..ranks.carried import Pickler, carried

_IMPORT = re.compile(r"^(?:import|from) ([\w.]+)", re.M)


def pickled(request: object, course: Path) -> bytes:
    """The request as the agent of a sandbox reads it, with ``pickle``."""
    _travel_with_checks(course)
    return carried(request, _Pickler)


def imported(body: Any, course: Path) -> list[str]:
    """The modules that the body's file imports, and those of its helpers. An agent imports them
    once; otherwise each rank would."""
    todo, seen, found = [getattr(body, "__module__", "")], set(), []
    while todo:
        file = getattr(sys.modules.get(todo.pop()), "__file__", None)
        if file in seen or not str(file).startswith(_tests(course)):
            continue
        seen.add(file)
        names = _IMPORT.findall(Path(str(file)).read_text(encoding="utf-8"))
        todo += names
        found += [name for name in names if name.partition(".")[0] not in ("tests", "solutions")]
    return sorted({*found})


def _tests(course: Path) -> str:
    return str(course / "tests") + os.sep


def _travel_with_checks(course: Path) -> None:
    tests = _tests(course)
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if isinstance(name, str) and name.startswith(tests):
            cloudpickle.register_pickle_by_value(module)


class _Pickler(Pickler):
    """A pickler for objects of torch that have no name by which they could be imported."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch._ops.OpOverload):
            return getattr, (value.overloadpacket, value._overloadname)
        if isinstance(value, torch._ops.OpOverloadPacket):
            return _operator, (value._qualified_op_name,)
        if value is type(dist.Store):  # pybind11's class of classes
            return type, (dist.Store,)
        if isinstance(value, type):  # some name another module as their own
            for name in (value.__name__, f"_{value.__name__}"):
                if vars(torch._C).get(name) is value:
                    return getattr, (torch._C, name)
        return super().reducer_override(value)


def _operator(name: str) -> Any:
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator)
