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
            "                flat.shard[where] = values[first : first + where.stop - where.start]\n"
        ),
        becomes=("                flat.shard[where] = values[: where.stop - where.start]\n"),
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
        told_as="accepted",
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
        text='            if found["state"]:\n',
        becomes="            if False:\n",
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
        told_as="not-a-copy",
    ),
    Mutant(
        id="checkpoint-own-number-of-ranks",
        exercise="3.28",
        mistake="rank r takes rank r's pieces, whatever the number of ranks was",
        text="""    for saved_state in saved:
        if saved_state["shapes"] != shapes:
            raise ValueError("the states are of a model with other parameters")
        buffers = saved_state["buffers"]
        pieces = {""",
        becomes="""    for number, saved_state in enumerate(saved):
        buffers = saved_state["buffers"]
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
        text="    if lacking or buffers.keys()",
        becomes="    if buffers.keys()",
        caught_by="test_what_lacks_elements_is_refused",
        told_as="accepted",
    ),
    Mutant(
        id="checkpoint-merge-gaps",
        exercise="3.28",
        mistake="merging three of four states gives a model with holes",
        text="    if wrong or not names:\n",
        becomes="    if not whole:\n",
        caught_by="test_what_lacks_elements_is_refused",
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
        caught_by="test_odd_parameters_and_state",
        told_as="wrong",
    ),
    Mutant(
        id="checkpoint-computed-buffer-lost",
        exercise="3.20",
        mistake="buffers that were not on meta are made anew: what was computed in them is lost",
        text="torch.empty_like(buffer, device=device) if buffer.is_meta else buffer",
        becomes="torch.zeros_like(buffer, device=device)",
        caught_by="test_deferred_initialisation",
        told_as="buffers",
    ),
    Mutant(
        id="checkpoint-world-root",
        exercise="3.20",
        mistake="the rank with number 0 of the world collects, in any group",
        text="    rank, world_size = dist.get_rank(group), dist.get_world_size(group)\n",
        becomes="    rank, world_size = dist.get_rank(), dist.get_world_size(group)\n",
        caught_by="test_full_state_of_odd_parameters",
        told_as=("exception", "hang", "mismatch", "on-every-rank", "names"),
    ),
    Mutant(
        id="checkpoint-new-shards",
        exercise="3.20",
        mistake="loading gives the shards new storage: who holds the old one does not see it",
        text="            for names, _, first, where in parts_of(flat):\n"
        "                values = state",
        becomes="            flat.shard.data = flat.shard.data.clone()\n"
        "            for names, _, first, where in parts_of(flat):\n"
        "                values = state",
        caught_by="test_full_state_of_odd_parameters",
        told_as="other-shards",
    ),
    Mutant(
        id="checkpoint-draws-where-it-keeps",
        exercise="3.20",
        mistake="a rank initialises only the units of which it keeps something: draws differ",
        text="    for part in parts:\n        initialise(part)\n",
        becomes="    for part in parts if any(f.shard.numel() > 40 for f in unit.flats) else ():\n"
        "        initialise(part)\n",
        caught_by="test_deferred_initialisation",
        told_as="missing",
    ),
    Mutant(
        id="checkpoint-twice-is-enough",
        exercise="3.28",
        mistake="elements are counted: a state that is there twice makes up for a missing one",
        text='    lacking = sum(int((~found["come"]).sum()) for found in fresh)\n',
        becomes='    lacking = sum(f["come"].numel() for f in fresh) - came\n',
        more=(
            ("    fresh = [_nothing", "    came = 0\n    fresh = [_nothing"),
            (
                "                if names[0] in pieces:\n",
                "                if names[0] in pieces:\n"
                "                    came += len(pieces[names[0]]['values'])\n",
            ),
        ),
        caught_by="test_what_lacks_elements_is_refused",
        told_as="accepted",
    ),
    Mutant(
        id="checkpoint-whole-parameter-lost",
        exercise="3.28",
        mistake="a parameter of which no piece is there is not missed",
        text="    wrong = (names - whole.keys()) | {",
        becomes="    wrong = {",
        caught_by="test_what_lacks_elements_is_refused",
        told_as="accepted",
    ),
    Mutant(
        id="checkpoint-old-moments",
        exercise="3.28",
        mistake="the optimizer keeps its old state beside what is loaded",
        text="""            optimizer.state.pop(flat.shard, None)
            if found["state"]:
                optimizer.state[flat.shard] = found["state"]
""",
        becomes="""            if found["state"]:
                optimizer.state[flat.shard].update(found["state"])
""",
        caught_by="test_odd_parameters_and_state",
        told_as="names",
    ),
    Mutant(
        id="checkpoint-state-in-the-shards-dtype",
        exercise="3.28",
        mistake="the optimizer's float64 state is loaded in the shard's dtype",
        text='torch.zeros_like(found["values"], dtype=value.dtype)',
        becomes='torch.zeros_like(found["values"])',
        caught_by="test_odd_parameters_and_state",
        told_as="dtype-or-shape",
    ),
    Mutant(
        id="checkpoint-what-travels",
        exercise="3.20",
        mistake="the full state is made of what forward gathers: in compute_dtype, rounded",
        text="        own = F.pad(flat.shard.detach(), (0, flat.chunk - flat.shard.numel()))\n",
        becomes="        own = flat.gather_input()\n",
        caught_by="test_full_state_of_odd_parameters",
        told_as="dtype-or-shape",
    ),
    Mutant(
        id="checkpoint-drawn-in-compute-dtype",
        exercise="3.20",
        mistake="values are drawn in the dtype of the full vector, and rounded to it",
        text="vectors = [torch.empty(f.numel, dtype=f.shard.dtype, device=device)",
        becomes="vectors = [torch.empty(f.numel, dtype=f.full.dtype, device=device)",
        caught_by="test_deferred_draws_are_the_same_everywhere",
        told_as="wrong",
    ),
    Mutant(
        id="checkpoint-empty-with-elements",
        exercise="3.20",
        mistake="the slice of a parameter without elements ends before the shard: it has some",
        text="max(low, high) - flat.start",
        becomes="high - flat.start",
        caught_by="test_parts_are_overlaps",
        told_as="parts",
    ),
    Mutant(
        id="checkpoint-tied-is-none",
        exercise="3.20",
        mistake="initialise finds a tied parameter under its first name only",
        text="        flat.put([v.view(shape) for v, shape in zip(views, flat.shapes, strict=True)])\n",
        becomes="""        for v, shape, attributes in zip(views, flat.shapes, flat.places, strict=True):
            setattr(attributes[0][0], attributes[0][1], v.view(shape))
""",
        caught_by="test_deferred_initialisation",
        told_as="missing",
    ),
    Mutant(
        id="checkpoint-buffers-before-refusal",
        exercise="3.28",
        mistake="buffers are taken over state by state, also where the states are refused then",
        text="""        buffers = saved_state["buffers"]
        pieces""",
        becomes="""        buffers = saved_state["buffers"]
        if buffers.keys() == model.module.state_dict().keys():
            set_buffers(model, buffers)
        pieces""",
        caught_by="test_what_lacks_elements_is_refused",
        told_as="half-loaded",
    ),
    Mutant(
        id="checkpoint-piece-of-a-copied-shard",
        exercise="3.28",
        mistake="each piece is a view of a copy of the whole shard: files are several times as large",
        text="            values = flat.shard.detach()[where].clone()\n",
        becomes="            values = flat.shard.detach().clone()[where]\n",
        caught_by="test_odd_parameters_and_state",
        told_as="too-large",
    ),
    Mutant(
        id="checkpoint-all-optimizer-state-dropped",
        exercise="3.28",
        mistake="loading empties the optimizer's state, that of other parameters too",
        text="    for flat, found in zip(flats, fresh, strict=True):\n        flat.shard.detach()",
        becomes="""    if optimizer is not None:
        optimizer.state.clear()
    for flat, found in zip(flats, fresh, strict=True):
        flat.shard.detach()""",
        caught_by="test_odd_parameters_and_state",
        told_as="other-state",
    ),
]
