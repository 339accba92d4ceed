"""Wrong implementations of exercises 3.20 and 3.28."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="checkpoint-rank-0s-shard",
        exercise="3.20",
        mistake="rank 0's shard, repeated, is saved as the model",
        text=(
            "        shards = [torch.empty_like(own) for _ in range(world_size)] if rank == 0 "
            "else None\n"
            "        dist.gather(own, shards, group=group, group_dst=0)\n"
            "        if shards is None:\n"
            "            continue\n"
        ),
        becomes="        shards = [own] * world_size\n",
        caught_by="test_full_state_is_the_plain_modules",
        told_as="wrong",
    ),
    Mutant(
        id="checkpoint-only-rank-0",
        exercise="3.20",
        mistake="only rank 0 calls the gather",
        text="""        dist.gather(own, shards, group=group, group_dst=0)
        if shards is None:
            continue
""",
        becomes="""        if shards is None:
            continue
        dist.gather(own, shards, group=group, group_dst=0)
""",
        caught_by="test_full_state_is_the_plain_modules",
        told_as="mismatch",
    ),
    Mutant(
        id="checkpoint-on-every-rank",
        exercise="3.20",
        mistake="every rank collects the full model",
        text=(
            "        shards = [torch.empty_like(own) for _ in range(world_size)] if rank == 0 "
            "else None\n"
            "        dist.gather(own, shards, group=group, group_dst=0)\n"
            "        if shards is None:\n"
            "            continue\n"
        ),
        becomes="""        shards = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_gather(shards, own, group=group)
""",
        caught_by="test_full_state_costs_others_one_unit_at_most",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="checkpoint-collected-first",
        exercise="3.20",
        mistake="every rank's vectors are kept until all are there",
        text="""    if rank:
        return {}
""",
        becomes="""    kept = [torch.empty(f.numel, dtype=f.shard.dtype) for f in flats_of(model)]
    if rank:
        del kept
        return {}
""",
        caught_by="test_full_state_costs_others_one_unit_at_most",
        told_as="too-much-memory",
    ),
    Mutant(
        id="checkpoint-tied-once",
        exercise="3.20",
        mistake="a tied parameter appears under one name only: strict loading fails",
        text="            state |= {name: part.view(shape).clone() for _, _, name in attributes}\n",
        becomes="            state[attributes[0][2]] = part.view(shape).clone()\n",
        caught_by="test_full_state_is_the_plain_modules",
        told_as="names",
    ),
    Mutant(
        id="checkpoint-no-buffers",
        exercise="3.20",
        mistake="buffers are not in the state",
        text=(
            '    return state | {name: value.to("cpu", copy=True) for name, value in '
            "buffers.items()}\n"
        ),
        becomes="    return state\n",
        caught_by="test_full_state_is_the_plain_modules",
        told_as="names",
    ),
    Mutant(
        id="checkpoint-flat",
        exercise="3.20",
        mistake="the parameters stay flat: no plain module can load them",
        text="            state |= {name: part.view(shape).clone() for _, _, name in attributes}\n",
        becomes="            state |= {name: part.clone() for _, _, name in attributes}\n",
        caught_by="test_full_state_is_the_plain_modules",
        told_as="shape",
    ),
    Mutant(
        id="checkpoint-load-first-part",
        exercise="3.20",
        mistake="every rank loads the first elements of each parameter",
        text=(
            "                flat.shard[where] = values[first : first + where.stop - "
            "where.start].to(flat.shard)\n"
        ),
        becomes=(
            "                flat.shard[where] = values[: where.stop - "
            "where.start].to(flat.shard)\n"
        ),
        caught_by="test_full_state_is_loaded_by_any_number_of_ranks",
        told_as="wrong",
    ),
    Mutant(
        id="checkpoint-not-strict",
        exercise="3.20",
        mistake="names that are missing or unknown are passed over",
        text="    if wrong or shapes.keys() != state.keys():\n",
        becomes="    if wrong:\n",
        caught_by="test_state_that_does_not_fit_is_refused",
        told_as="exception",
    ),
    Mutant(
        id="checkpoint-checked-too-late",
        exercise="3.20",
        mistake="the first parameters are loaded before a wrong one is found",
        text="    if wrong or shapes.keys() != state.keys():\n",
        becomes=(
            "    with torch.no_grad():\n"
            "        for flat in flats_of(model):\n"
            "            for names, _, first, where in parts_of(flat):\n"
            "                if names[0] in state and names[0] not in wrong:\n"
            "                    flat.shard[where] = state[names[0]].flatten()[first:][: "
            "where.stop - where.start]\n"
            "    if wrong or shapes.keys() != state.keys():\n"
        ),
        caught_by="test_state_that_does_not_fit_is_refused",
        told_as="half-loaded",
    ),
    Mutant(
        id="checkpoint-no-optimizer",
        exercise="3.28",
        mistake="the optimizer's state is not taken over",
        text="            if optimizer is not None and found:\n",
        becomes="            if optimizer is None and found:\n",
        caught_by="test_training_goes_on_at_another_world_size",
        told_as="wrong",
    ),
    Mutant(
        id="checkpoint-alias",
        exercise="3.28",
        mistake="the saved state changes while training goes on",
        text=(
            "            state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in "
            "state.items()}\n"
        ),
        becomes="",
        caught_by="test_training_goes_on_at_another_world_size",
        told_as="wrong",
    ),
    Mutant(
        id="checkpoint-own-number-of-ranks",
        exercise="3.28",
        mistake="rank r takes rank r's pieces, whatever the number of ranks was",
        text="""    for state in saved:
        buffers = state["buffers"]
        pieces = {""",
        becomes="""    for number, state in enumerate(saved):
        buffers = state["buffers"]
        if number != torch.distributed.get_rank(model.group):
            continue
        pieces = {""",
        caught_by="test_training_goes_on_at_another_world_size",
        told_as="exception",
    ),
    Mutant(
        id="checkpoint-piece-from-its-start",
        exercise="3.28",
        mistake="what a piece has is read from its first element on",
        text='    there = slice(low - piece["first"], high - piece["first"])\n',
        becomes="    there = slice(0, high - low)\n",
        caught_by="test_training_goes_on_at_another_world_size",
        told_as="wrong",
    ),
    Mutant(
        id="checkpoint-gaps-accepted",
        exercise="3.28",
        mistake="missing elements stay what the memory holds",
        text="    if needed:\n",
        becomes="    if needed < 0:\n",
        caught_by="test_pieces_are_the_model_without_padding",
        told_as="accepted",
    ),
    Mutant(
        id="checkpoint-merge-gaps",
        exercise="3.28",
        mistake="merging three of four states gives a model with holes",
        text="    if any(missing.values()):\n",
        becomes="    if not whole:\n",
        caught_by="test_pieces_are_the_model_without_padding",
        told_as="accepted",
    ),
    Mutant(
        id="checkpoint-whole-on-meta",
        exercise="3.20",
        mistake="every unit is made in full before any is cut",
        text="""    for unit in model.units:
        parts = [part for part, owner in home.items() if owner is unit]
""",
        becomes="""    whole = [torch.empty(f.numel, device=device) for f in flats_of(model)]
    for unit in model.units:
        parts = [part for part, owner in home.items() if owner is unit]
""",
        caught_by="test_no_rank_ever_holds_the_model",
        told_as="too-much-memory",
    ),
    Mutant(
        id="checkpoint-deferred-first-elements",
        exercise="3.20",
        mistake="each rank keeps the first elements of the unit",
        text="        flat.shard.copy_(vector[flat.start : flat.start + flat.shard.numel()])\n",
        becomes="        flat.shard.copy_(vector[: flat.shard.numel()])\n",
        caught_by="test_deferred_initialisation",
        told_as="wrong",
    ),
    Mutant(
        id="checkpoint-buffers-of-now",
        exercise="3.28",
        mistake="the saved buffers are the module's own: training goes on in them",
        text=(
            "    buffers = {name: value.clone() for name, value in "
            "model.module.state_dict().items()}\n"
        ),
        becomes="    buffers = dict(model.module.state_dict())\n",
        caught_by="test_training_goes_on_at_another_world_size",
        told_as="buffers",
    ),
    Mutant(
        id="checkpoint-computed-buffer-lost",
        exercise="3.20",
        mistake="buffers that were not on meta are made anew: what was computed in them is lost",
        text="            if buffer is not None and buffer.is_meta:\n",
        becomes="            if buffer is not None:\n",
        more=(
            (
                "torch.empty_like(buffer, device=device)",
                "torch.zeros_like(buffer, device=device)",
            ),
        ),
        caught_by="test_deferred_initialisation",
        told_as="buffers",
    ),
]
