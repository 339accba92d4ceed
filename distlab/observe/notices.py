"""Acts of a rank whose effect shows elsewhere, or nowhere: noticed inside, told to the parent at
once.

``"dtype"`` and ``"device"``: torch's default was changed (``defaults``). ``"shortcut"``: the answer
was taken from elsewhere (``grading.shortcuts``).
"""

from __future__ import annotations

from collections.abc import Callable

Notice = tuple[str, str, str]  # the value before, the value now, the learner's line
Tell = Callable[[str, Notice], None]
_listeners: list[Tell] = []


def listen(tell: Tell) -> None:
    """From now on ``tell(what, notice)`` is called for each notice of this process."""
    _listeners[:] = [tell]


def tell(what: str, notice: Notice) -> None:
    """Tell the parent, if this process is a rank."""
    for listener in _listeners:
        listener(what, notice)


def note(notices: dict[str, Notice], what: str, notice: Notice) -> None:
    """Keep the latest notice; none if the value is again as it was."""
    before, now, _ = notice
    if now == before:
        notices.pop(what, None)
    else:
        notices[what] = notice
