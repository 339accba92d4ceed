"""Ranks of untrusted code: the same runs, in namespaces that hold no answers."""

from .container import Container
from .limits import Limits
from .place import Sandbox
from .process import NotStarted
from .walls import obstacle

__all__ = ["Container", "Limits", "NotStarted", "Sandbox", "obstacle"]
