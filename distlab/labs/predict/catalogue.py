"""All predictions by the exercise that they are about, and why some exercises have none."""

from __future__ import annotations

import difflib

from . import (
    allreduce,
    attention,
    compression,
    eight_bits,
    experts,
    memory,
    meshes,
    nodes,
    norms,
    pipelines,
    profiles,
    samples,
    saved,
    schedules,
    servers,
    sharding,
    small,
    streams,
    tensors,
    training,
    v_shaped,
)
from .case import Case
from .scene import Scene

MODULES = (
    samples,
    small,
    memory,
    training,
    schedules,
    pipelines,
    v_shaped,
    tensors,
    attention,
    experts,
    norms,
    eight_bits,
    allreduce,
    nodes,
    sharding,
    meshes,
    compression,
    servers,
    streams,
    saved,
    profiles,
)
SCENES: dict[str, Scene] = {s.exercise: s for module in MODULES for s in module.SCENES}

# exercises with a cost, of which nothing can be both predicted and counted
WITHOUT = {
    "2.3": "clipping sends nothing and keeps nothing",
    "2.4": "how many trials there are depends on the search, and the guideline gives only a limit",
    "2.19": "no message, and the size of a random state is fixed by the library",
    "3.27": "it is a prediction itself: the questions M01 to M06 ask for its numbers",
    "4.2": "reading and copying send nothing; exercise 4.15 asks for the bytes of a checkpoint",
    "4.5": "beats are files of some bytes, written and read by the clock",
    "4.10": "its cost is time of the CPU, which differs from machine to machine",
    "4.12": "its cost is time of the CPU, which differs from machine to machine",
    "4.13": "how often a rank looks into the store depends on when the others come",
    "4.16": "its cost is time of the CPU, which differs from machine to machine",
}
TIMED = ("seconds", "latency or bytes")  # units of what depends on the machine


def scene_named(name: str) -> Scene:
    """The prediction for an exercise; ValueError with the reason why there is none."""
    if name in SCENES:
        return SCENES[name]
    if name in WITHOUT:
        raise ValueError(f"nothing to predict for {name}: {WITHOUT[name]}")
    near = difflib.get_close_matches(name, SCENES, 1, 0.3)
    guess = f"; did you mean {near[0]}?" if near else ";"
    raise ValueError(f"nothing to predict for {name!r}{guess} `distlab predict` lists all there is")


def situation(scene: Scene, case: Case) -> str:
    """What is predicted, with its numbers, and the machine if times are asked for."""
    sizes: dict[str, int] = dict(case.sizes)
    if "n" in sizes:
        sizes["N"] = 4 * sizes["n"]
    if "K" in sizes and "D" in sizes:
        sizes["P"] = 4 * sizes["K"] * sizes["D"] ** 2
    told = scene.tells.format(**sizes)
    if any(quantity.unit in TIMED for quantity in scene.quantities):
        told += f"\nMachine: {case.described}."
    return told
