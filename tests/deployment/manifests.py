"""Shared by the tests of the deployment: its files, parsed, and how the trainer reads a call."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from distlab.course.catalogue import root
from solutions.phase4_production.config_sources import make_config
from solutions.phase4_production.trainer_config import Config

DEPLOYMENT = root() / "solutions" / "phase4_production" / "deployment"
Document = dict[str, Any]


def documents(name: str) -> list[Document]:
    """The YAML documents of a file of the deployment folder."""
    return list(yaml.safe_load_all((DEPLOYMENT / name).read_text(encoding="utf-8")))


def one(found: list[Document], kind: str) -> Document:
    """The only document of a kind."""
    (document,) = [each for each in found if each["kind"] == kind]
    return document


def config_of(words: list[str]) -> Config:
    """What the trainer makes of its arguments; it refuses fields that it has not."""
    rest = list(words)
    if rest[0] == "--config":
        file, rest = rest[1], rest[2:]
    else:
        file, rest = rest[0].removeprefix("--config="), rest[1:]
    return make_config(root() / file, rest)


def after_exit(job: Document, status: int) -> str:
    """What a Job's failure policy does with a pod that ended so: FailJob, Ignore, or Count.

    The first rule that fits decides; none: the pod is replaced, and counted.
    """
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes is not None and (status in codes["values"]) == (codes["operator"] == "In"):
            return rule["action"]
    return "Count"


def is_under(path: str, folder: str) -> bool:
    """Whether ``path`` is in ``folder`` or is it."""
    return Path(path).is_relative_to(folder)


def launcher_variables() -> set[str]:
    """The environment that launch_training.sh reads."""
    text = (root() / "launch_training.sh").read_text(encoding="utf-8")
    names = r"\b(NNODES|NODE_RANK|MASTER_ADDR|MASTER_PORT|NPROC_PER_NODE|MAX_RESTARTS|RUN_ID)\b"
    return set(re.findall(names, text))
