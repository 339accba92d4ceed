"""A learner's file, and limits that are soon reached."""

from __future__ import annotations

from distlab.sandbox import Limits

SMALL = Limits(
    seconds=60,
    memory_bytes=3 << 30,
    processes=100,
    file_bytes=2 << 20,
    tmp_bytes=8 << 20,
    answer_bytes=4 << 20,
)
LEARNER = """
import torch.distributed as dist


def send_to_nobody(x):
    dist.recv(x, 1)


def sum_all(x):
    dist.all_reduce(x)


def divide(x):
    print("dividing")
    return x / 0
"""
