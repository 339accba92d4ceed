"""``torch.cuda`` on virtual ranks with pretended GPUs (``devices.py``).

There are the functions that the course's programs and torch's optimizers call. A stream is the rank
itself, an event a moment of its clock. Any other function raises at its call, because there is no
driver.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

MEMORY = 80 << 30  # bytes that a GPU says it has
NAME, CAPABILITY = "a GPU that is none", (9, 0)


def answers(value: Any) -> Callable[..., Any]:
    """A function of its own (torch's compiler names each one) that returns ``value``."""
    return lambda *_, **__: value


class Stream:
    """The one stream of a rank."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def is_capturing(self) -> bool:
        """There are no graphs."""
        return False

    def query(self) -> bool:
        """What was issued has run."""
        return True

    def synchronize(self) -> None:
        """What was issued has run."""

    def wait_stream(self, stream: Any) -> None:
        """It is the same."""

    def wait_event(self, event: Any) -> None:
        """It has come."""

    def record_event(self, event: Any = None) -> Any:
        """An event of now."""
        event = event or torch.cuda.Event()
        event.record()
        return event


class Event:
    """A moment of the rank's clock; ``now`` and ``finish`` are set by ``install``."""

    now: ClassVar[Callable[[], float]]
    finish: ClassVar[Callable[[], None]]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        """It is now."""
        self.at = type(self).now()

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds until the other one."""
        return (other.at - self.at) * 1e3

    def query(self) -> bool:
        """It has come."""
        return True

    def synchronize(self) -> None:
        """The rank waits for all that it has issued."""
        type(self).finish()

    def wait(self, stream: Any = None) -> None:
        """It has come."""


def _properties(device: Any = None) -> SimpleNamespace:
    """Each GPU of each node has a UUID of its own."""
    number = torch.cuda._utils._get_device_index(device, optional=True)
    major, minor = CAPABILITY
    uuid = f"{os.environ.get('GROUP_RANK', 0)}-{number}"
    return SimpleNamespace(total_memory=MEMORY, name=NAME, major=major, minor=minor, uuid=uuid)


def install(count: Callable[[], int], finish: Callable[[], None], now: Callable[[], float]) -> None:
    """Replace the functions of ``torch.cuda`` and ``torch.accelerator``.

    ``count``: GPUs of the rank's node; ``finish``: the rank waits for all that it has issued;
    ``now``: its clock.
    """
    Event.now, Event.finish = staticmethod(now), staticmethod(finish)
    both: dict[str, Any] = {
        "is_available": answers(True),
        "device_count": count,
        "synchronize": lambda device=None: finish(),
        "current_stream": lambda device=None: Stream(),
        "empty_cache": answers(None),
        "memory_allocated": answers(0),
        "max_memory_allocated": answers(0),
        "reset_peak_memory_stats": answers(None),
    }
    for name, value in both.items():
        setattr(torch.cuda, name, value)
        setattr(torch.accelerator, name, functools.partial(value))
    for name, value in {
        "is_initialized": answers(True),
        "_lazy_init": answers(None),
        "init": answers(None),
        "default_stream": lambda device=None: Stream(),
        "Stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "Event": Event,
        "is_current_stream_capturing": answers(False),
        "_sleep": answers(None),
        "get_device_properties": _properties,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": answers(CAPABILITY),
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "memory_reserved": answers(0),
        "utilization": answers(0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "manual_seed": lambda seed: [torch.default_generator.manual_seed(seed)].clear(),
        "manual_seed_all": answers(None),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "default_generators": (torch.default_generator,) * 1024,
    }.items():
        setattr(torch.cuda, name, value)
    accelerator: Any = torch.accelerator
    accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    accelerator.current_device_index = lambda: torch.cuda.current_device()
