"""Wrong implementations of exercises 3.20 and 3.28."""

from distlab.grading.wrong import mutants_of

FULL, COST = (
    "test_full_state_is_the_plain_modules",
    "test_full_state_costs_others_one_unit_at_most",
)
ANY, FITS = (
    "test_full_state_is_loaded_by_any_number_of_ranks",
    "test_state_that_does_not_fit_is_refused",
)
ON, PIECES = (
    "test_training_goes_on_at_another_world_size",
    "test_pieces_are_the_model_without_padding",
)
DEFERRED, NEVER = "test_deferred_initialisation", "test_no_rank_ever_holds_the_model"

GATHER = """        chunks = [torch.empty_like(own) for _ in range(world_size)] if rank == 0 else None
        dist.gather(own, chunks, group=group, group_dst=0)
        if chunks is None:
            continue
"""
ALL_GATHER = """        chunks = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_gather(chunks, own, group=group)
"""
NAMES = "            state |= {name: part.view(shape).clone() for _, _, name in places}\n"
BUFFERS = (
    '    return state | {name: value.to("cpu", copy=True) for name, value in buffers.items()}\n'
)
REFUSE = "    if wrong or shapes.keys() != state.keys():\n"
TAKEN = "        values = state[names[0]].flatten()\n"
STATE = """            state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
"""
NEEDED = "    if needed:\n"
COUNTED = "    if any(missing.values()):\n"
LIKE = "                key: value[where] if _is_like(value, flat.shard) else value\n"
THERE = '    there = slice(low - piece["first"], high - piece["first"])\n'

mutant = mutants_of("3.20", "checkpoint")
sharded = mutants_of("3.28", "checkpoint")

MUTANTS = [
    mutant(
        "rank-0s-shard",
        "BUGS 88: rank 0's shard, repeated, is saved as the model",
        GATHER,
        "        chunks = [own] * world_size\n",
        FULL,
        "wrong",
    ),
    mutant(
        "only-rank-0",
        "BUGS 6: only rank 0 calls the gather",
        "        dist.gather(own, chunks, group=group, group_dst=0)\n        if chunks is None:\n            continue\n",
        "        if chunks is None:\n            continue\n        dist.gather(own, chunks, group=group, group_dst=0)\n",
        FULL,
        "mismatch",
    ),
    mutant(
        "on-every-rank",
        "every rank collects the full model",
        GATHER,
        ALL_GATHER,
        COST,
        "too-many-bytes",
    ),
    mutant(
        "collected-first",
        "every rank's vectors are kept until all are there",
        "    if rank:\n        return {}\n",
        "    kept = [torch.empty(f.numel, dtype=f.shard.dtype) for f in flats_of(model)]\n"
        "    if rank:\n        del kept\n        return {}\n",
        COST,
        "too-much-memory",
    ),
    mutant(
        "tied-once",
        "a tied parameter appears under one name only: strict loading fails",
        NAMES,
        "            state[places[0][2]] = part.view(shape).clone()\n",
        FULL,
        "names",
    ),
    mutant(
        "no-buffers",
        "buffers are not in the state",
        BUFFERS,
        "    return state\n",
        FULL,
        "names",
    ),
    mutant(
        "flat",
        "the parameters stay flat: no plain module can load them",
        NAMES,
        "            state |= {name: part.clone() for _, _, name in places}\n",
        FULL,
        "shape",
    ),
    mutant(
        "load-first-part",
        "every rank loads the first elements of each parameter",
        "                flat.shard[where] = values[first : first + where.stop - where.start].to(flat.shard)\n",
        "                flat.shard[where] = values[: where.stop - where.start].to(flat.shard)\n",
        ANY,
        "wrong",
    ),
    mutant(
        "not-strict",
        "names that are missing or unknown are passed over",
        REFUSE,
        "    if wrong:\n",
        FITS,
        "exception",
    ),
    mutant(
        "checked-too-late",
        "the first parameters are loaded before a wrong one is found",
        REFUSE,
        "    with torch.no_grad():\n"
        "        for flat in flats_of(model):\n"
        "            for names, _, first, where in parts_of(flat):\n"
        "                if names[0] in state and names[0] not in wrong:\n"
        "                    flat.shard[where] = state[names[0]].flatten()[first:][: where.stop - where.start]\n"
        + REFUSE,
        FITS,
        "half-loaded",
    ),
    sharded(
        "no-optimizer",
        "BUGS 85: the optimizer's state is not taken over",
        "            if optimizer is not None and found:\n",
        "            if optimizer is None and found:\n",
        ON,
        "wrong",
    ),
    sharded(
        "alias",
        "BUGS 94: the saved state changes while training goes on",
        STATE,
        "",
        ON,
        "wrong",
    ),
    sharded(
        "own-number-of-ranks",
        "BUGS 92: rank r takes rank r's pieces, whatever the number of ranks was",
        '    for state in saved:\n        buffers = state["buffers"]\n        pieces = {',
        '    for number, state in enumerate(saved):\n        buffers = state["buffers"]\n'
        "        if number != torch.distributed.get_rank(model.group):\n            continue\n        pieces = {",
        ON,
        "exception",
    ),
    sharded(
        "piece-from-its-start",
        "BUGS 92: what a piece has is read from its first element on",
        THERE,
        "    there = slice(0, high - low)\n",
        ON,
        "wrong",
    ),
    sharded(
        "gaps-accepted",
        "missing elements stay what the memory holds",
        NEEDED,
        "    if needed < 0:\n",
        PIECES,
        "accepted",
    ),
    sharded(
        "merge-gaps",
        "merging three of four states gives a model with holes",
        COUNTED,
        "    if not whole:\n",
        PIECES,
        "accepted",
    ),
    mutant(
        "whole-on-meta",
        "every unit is made in full before any is cut",
        "    for unit in model.units:\n        parts = [part for part, owner in home.items() if owner is unit]\n",
        "    whole = [torch.empty(f.numel, device=device) for f in flats_of(model)]\n"
        "    for unit in model.units:\n        parts = [part for part, owner in home.items() if owner is unit]\n",
        NEVER,
        "too-much-memory",
    ),
    mutant(
        "deferred-first-elements",
        "each rank keeps the first elements of the unit",
        "        flat.shard.copy_(vector[flat.start : flat.start + flat.shard.numel()])\n",
        "        flat.shard.copy_(vector[: flat.shard.numel()])\n",
        DEFERRED,
        "wrong",
    ),
    sharded(
        "buffers-of-now",
        "BUGS 94: the saved buffers are the module's own: training goes on in them",
        "    buffers = {name: value.clone() for name, value in model.module.state_dict().items()}\n",
        "    buffers = dict(model.module.state_dict())\n",
        ON,
        "buffers",
    ),
    mutant(
        "computed-buffer-lost",
        "buffers that were not on meta are made anew: what was computed in them is lost",
        "            if buffer is not None and buffer.is_meta:\n",
        "            if buffer is not None:\n",
        DEFERRED,
        "buffers",
        ("torch.empty_like(buffer, device=device)", "torch.zeros_like(buffer, device=device)"),
    ),
]
