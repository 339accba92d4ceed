"""Predict how a training step scales: the program runs on virtual GPUs."""

from .plan import Plan
from .prediction import Answer, simulate

__all__ = ["Answer", "Plan", "simulate"]
