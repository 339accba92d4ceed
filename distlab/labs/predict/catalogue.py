"""All predictions by the exercise that they are about."""

from __future__ import annotations

import difflib

from . import allreduce, model_parallel, nodes, sharding, training
from .case import Case
from .scene import Scene

SCENES: dict[str, Scene] = {
    scene.exercise: scene
    for module in (allreduce, nodes, model_parallel, sharding, training)
    for scene in module.SCENES
}


def scene_named(name: str) -> Scene:
    """The prediction for an exercise; ValueError with the nearest one that there is."""
    if name in SCENES:
        return SCENES[name]
    near = difflib.get_close_matches(name, SCENES, 1, 0.3)
    guess = f"; did you mean {near[0]}?" if near else ";"
    raise ValueError(f"nothing to predict for {name!r}{guess} `distlab predict` lists all there is")


def situation(scene: Scene, case: Case) -> str:
    """What is predicted, with its numbers."""
    sizes: dict[str, int] = dict(case.sizes)
    if "n" in sizes:
        sizes["N"] = 4 * sizes["n"]
    if "K" in sizes:
        sizes["P"] = 4 * sizes["K"] * sizes["D"] ** 2
    return scene.tells.format(**sizes)
