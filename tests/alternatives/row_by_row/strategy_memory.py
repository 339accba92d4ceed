# for: 3.27
"""Written differently: a table of divisors, and sums of all units from one on made before."""

from __future__ import annotations

import math

from given.step_profile import Profile
from solutions.phase3_multi_node.strategy_memory import STRATEGIES as STRATEGIES
from solutions.phase3_multi_node.strategy_memory import Memory


def memory_of(
    profile: Profile,
    strategy: str,
    nodes: int,
    ranks_per_node: int,
    *,
    bucket_bytes: int = 25 * 2**20,
) -> Memory:
    world = nodes * ranks_per_node
    shared_by = {"hybrid": ranks_per_node}.get(strategy, world)
    all_t, all_g = sum(profile.parameters), sum(profile.gradients)
    all_s = profile.state * all_g
    biggest = max(profile.largest)
    divided = {"ddp": (1, 1, 1), "zero1": (1, 1, world), "zero2": (1, world, world)}.get(
        strategy, (shared_by,) * 3
    )
    keeps = [math.floor(n / d) for n, d in zip((all_t, all_g, all_s), divided, strict=True)]
    beside = profile.buffers + keeps[0] + keeps[2]
    if strategy == "offload":
        moments = sharded_moments(profile, world, strategy)
        return Memory(
            0, 0, 0, profile.buffers + max(moments), math.floor((all_t + all_g + all_s) / world)
        )
    if strategy == "zero2":
        moments = reduced_moments(profile, world, bucket_bytes)
        moments.append(math.floor(all_g / world + 2 * min(biggest, all_g / world)))
    elif strategy in ("fsdp", "hybrid"):
        moments = sharded_moments(profile, shared_by, strategy)
        moments.append(math.floor(all_g / shared_by + 2 * max(profile.parameters) / shared_by))
    else:
        moments = [all_g + p.activations for p in profile.phases]
        moments += [all_g + 2 * min(biggest, keeps[2]), 2 * all_g - keeps[2]]
    return Memory(keeps[0], keeps[1], keeps[2], beside + max(moments), 0)


def sharded_moments(profile: Profile, shards: int, strategy: str) -> list[int]:

    def t(k: int) -> int:
        return profile.parameters[k] if 0 < k < count else 0

    def g(k: int) -> int:
        return profile.gradients[k] if k < count else 0

    count = len(profile.parameters)
    root, last = profile.parameters[0], count - 1
    suffix = [sum(profile.gradients[k:]) for k in range(count + 3)]
    result = []
    for phase in profile.phases:
        k = phase.unit
        if not phase.backward:
            result.append(phase.activations + root + t(k) + t(k + 1))
            continue
        if k == 0:
            k = last + 1
        moment = phase.activations + root + t(k) + t(k - 1) + phase.of_root
        if k <= last:
            moment += g(k) - profile.largest[k]
        if strategy != "hybrid":
            moment += g(k + 1)
        waiting = g(k + 1) if strategy == "offload" else suffix[k + 1]
        result.append(moment + math.floor(waiting / shards))
    ending = 2 * profile.gradients[0]
    if strategy != "offload":
        ending += math.floor(suffix[1] / shards)
    result.append(ending)
    return result


def reduced_moments(profile: Profile, shards: int, bucket_bytes: int) -> list[int]:
    everything = sum(profile.gradients)
    three = 3 * max(max(profile.largest), min(bucket_bytes, everything))
    result = []
    for phase in profile.phases:
        if not phase.backward:
            result.append(phase.activations)
        elif phase.unit == 0:
            a = phase.of_root
            result.append(phase.activations + min(a, three) + math.floor(a / shards))
        else:
            a = phase.of_root + sum(profile.gradients[phase.unit :])
            waiting = min(a, three) - profile.largest[phase.unit]
            result.append(phase.activations + waiting + math.floor(a / shards))
    result.append(min(2 * everything, three) + math.floor(everything / shards))
    return result
