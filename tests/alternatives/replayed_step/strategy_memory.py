# for: 3.27
"""Written differently: the step is replayed on an account of what is in memory, entry by entry."""

from __future__ import annotations

from types import SimpleNamespace


class Account:
    """Named amounts of bytes, their sum, and the most that it has been."""

    def __init__(self):
        self.entries = {}
        self.most = 0

    def hold(self, nbytes, *name):
        self.entries[name] = nbytes

    def drop(self, *name):
        return self.entries.pop(name, 0)

    def look(self, activations):
        self.most = max(self.most, activations + sum(self.entries.values()))


def replay_sharded(p, ranks, strategy):
    account, last = Account(), len(p.parameters) - 1
    account.hold(p.parameters[0], "full", 0)

    def gather(unit):
        if 0 < unit <= last:
            account.hold(p.parameters[unit], "full", unit)

    def arrived(unit):
        chunk = account.drop("chunk", unit)
        if strategy != "offload" and 0 < unit <= last:
            account.hold(chunk, "shard", unit)
        account.drop("joined", unit)

    for phase in p.phases:
        unit = phase.unit
        for other in range(1, last + 1):
            account.drop("full", other)
        if not phase.backward:
            gather(unit)
            gather(unit + 1)
        else:
            account.hold(phase.of_root, "root's gradients")
            gather(unit or last)
            if unit:
                after = unit + 1
                arrived(unit + 2)
                if account.drop("gradients", after) and strategy != "hybrid":
                    account.hold(p.gradients[after], "joined", after)
                if after <= last:
                    account.hold(p.gradients[after] // ranks, "chunk", after)
                gather(unit - 1)
                others = p.gradients[unit] - p.largest[unit]
                account.hold(others or 1e-9, "gradients", unit)
        account.look(phase.activations)
    reduced = 0 if strategy == "offload" else sum(p.gradients[1:]) // ranks
    return max(account.most, 2 * p.gradients[0] + reduced)


def replay_zero2(p, ranks, bucket_bytes):
    whole = sum(p.gradients)
    room = 3 * max(min(bucket_bytes, whole), *p.largest)
    most, come = 0, 0
    for phase in p.phases:
        beside = 0
        if phase.backward and phase.unit:
            come += p.gradients[phase.unit]
            beside = -p.largest[phase.unit]
        here = come + phase.of_root if phase.backward else 0
        most = max(most, phase.activations + beside + min(here, room) + here // ranks)
    return max(most, min(2 * whole, room) + whole // ranks)


def memory_of(profile, strategy, nodes, ranks_per_node, *, bucket_bytes=25 << 20):
    ranks, trained, full = nodes * ranks_per_node, sum(profile.gradients), sum(profile.parameters)
    state, cut = int(profile.state * trained), ranks
    if strategy == "hybrid":
        cut = ranks_per_node
    kept = {
        "ddp": (full, trained, state),
        "zero1": (full, trained, state // cut),
        "zero2": (full, trained // cut, state // cut),
    }.get(strategy, (full // cut, trained // cut, state // cut))
    host = 0
    if strategy == "offload":
        host, kept = sum(kept), (0, 0, 0)
    weights, gradients, moments = kept
    beside = weights + moments + profile.buffers
    if strategy in ("ddp", "zero1"):
        most = max(phase.activations for phase in profile.phases) + trained
        most = max(most, trained + 2 * min(max(profile.largest), moments), 2 * trained - moments)
    elif strategy == "zero2":
        most = replay_zero2(profile, cut, bucket_bytes)
        most = max(most, gradients + 2 * min(max(profile.largest), trained // cut))
    else:
        most = replay_sharded(profile, cut, strategy)
        if strategy != "offload":
            most = max(most, gradients + 2 * max(profile.parameters) // cut)
    return SimpleNamespace(
        parameters=weights,
        gradients=gradients,
        optimizer=moments,
        peak=int(beside + most),
        host=host,
    )
