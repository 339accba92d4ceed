"""Wrong implementations of exercise 4.6."""

from distlab.grading.wrong import mutants_of

LARGEST, MOMENTUM = (
    "test_sends_the_largest_and_owes_the_rest",
    "test_momentum_comes_before_the_choice",
)
ANEW, BYTES = (
    "test_nothing_is_lost_when_buckets_are_made_anew",
    "test_bytes_are_those_of_k_values_and_indices",
)
STATE, EDGES = "test_state_goes_on_to_the_bit", "test_empty_and_tiny_buckets"
GROUP, BEGINS, BAD = (
    "test_works_in_a_group",
    "test_hook_begins_and_does_not_wait",
    "test_bad_input_is_refused",
)
HALF = "test_a_refused_state_changes_nothing"

WITH_MOMENTUM = "            v.add_(u.mul_(self.momentum).add_(bucket.buffer))\n"
PLAIN = "            v.add_(bucket.buffer)\n"
CHOOSE = "        chosen = v.abs().topk(count_for(self.ratio, v.numel()), sorted=False).indices\n"
VALUES = "        values, indices = v[chosen], chosen.int()\n        v[chosen] = 0\n"
MASK = "        if self.momentum:\n            u[chosen] = 0\n"
GATHER_VALUES = (
    "            dist.all_gather_into_tensor(all_values, values, self.group, async_op=True),\n"
)
GATHER_PLACES = (
    "            dist.all_gather_into_tensor(all_indices, indices, self.group, async_op=True),\n"
)
ADD = """            for places, part in parts:  # no place twice in one part, so that no order is left open
                bucket.buffer.index_add_(0, places, part)
"""
JOINED = "        flat = torch.cat([self.parts[p] for p in bucket.parameters])\n"
COPIES = "        return [part.clone() for part in self.parts.values()]\n"
SAVED = '        return {"residual": self.residual.state_dict(), "velocity": self.velocity.state_dict()}\n'
LOADED = (
    '        self.velocity.load_state_dict(state["velocity"])\n'
    '        self.residual.load_state_dict(state["residual"])\n'
)
EMPTY = """        if not bucket.buffer.numel():
            return None
        v = self.residual.beside(bucket)
        if self.momentum:
"""
LOAD_VELOCITY, LOAD_RESIDUAL = LOADED.splitlines(keepends=True)

mutant = mutants_of("4.6", "topk")

MUTANTS = [
    mutant(
        "no-error-feedback",
        "what is not sent is forgotten",
        PLAIN,
        "            v.copy_(bucket.buffer)\n",
        LARGEST,
        "no-error-feedback",
    ),
    mutant(
        "residual-not-cleared",
        "what was sent stays in the residual",
        VALUES,
        "        values, indices = v[chosen], chosen.int()\n",
        LARGEST,
        "residual-not-cleared",
    ),
    mutant(
        "largest-not-absolute",
        "the largest values are chosen, not the largest absolute values",
        CHOOSE,
        CHOOSE.replace("v.abs()", "v"),
        LARGEST,
        "wrong",
    ),
    mutant(
        "chosen-by-gradient",
        "the choice looks at this step's gradient: what waits in the residual waits for ever",
        CHOOSE,
        CHOOSE.replace("v.abs()", "bucket.buffer.abs()"),
        LARGEST,
        "wrong",
    ),
    mutant(
        "values-reduced",
        "values are all-reduced, and each rank puts the sums at its own places",
        GATHER_VALUES + GATHER_PLACES,
        "            dist.all_reduce(values, group=self.group, async_op=True),\n"
        "            dist.all_reduce(all_indices, group=self.group, async_op=True),\n",
        LARGEST,
        "ranks-differ",
        (ADD, "            bucket.buffer[chosen] = values\n"),
    ),
    mutant(
        "indices-reduced",
        "BUGS 50: the all-reduce of indices gives sums of places, which are no places",
        GATHER_PLACES,
        "            dist.all_reduce(indices, group=self.group, async_op=True),\n",
        LARGEST,
        "exception",
        (ADD, ADD.replace("index_add_(0, places, part)", "index_add_(0, indices, part)")),
    ),
    mutant(
        "places-overwrite",
        "where two ranks send the same place, the later one overwrites the earlier one",
        ADD,
        ADD.replace("bucket.buffer.index_add_(0, places, part)", "bucket.buffer[places] = part"),
        LARGEST,
        "wrong",
    ),
    mutant(
        "own-first",
        "BUGS 30: each rank adds its own part first: sums of three have other bits on each rank",
        "            bucket.buffer.zero_()\n            parts = zip(",
        "            bucket.buffer.zero_()\n"
        "            bucket.buffer.index_add_(0, indices, values)\n            parts = zip(",
        LARGEST,
        "ranks-differ",
        (
            "            for places, part in parts:",
            "            mine = dist.get_rank(self.group)\n"
            "            parts = [x for r, x in enumerate(parts) if r != mine]\n"
            "            for places, part in parts:",
        ),
    ),
    mutant(
        "dense-all-reduce",
        "zeros travel too: what was chosen is all-reduced as a full buffer",
        "        world_size = dist.get_world_size(self.group)\n        all_values",
        "        bucket.buffer.zero_()[chosen] = values\n"
        "        return dist.all_reduce(bucket.buffer, group=self.group, async_op=True)\n"
        "        world_size = dist.get_world_size(self.group)\n        all_values",
        BYTES,
        "too-many-bytes",
    ),
    mutant(
        "int64-indices",
        "indices travel in 64 bits, as topk gives them",
        VALUES,
        VALUES.replace("chosen.int()", "chosen"),
        BYTES,
        "too-many-bytes",
    ),
    mutant(
        "everything-sent",
        "k is not a share of the entries: everything travels, and the result is even better",
        CHOOSE,
        "        chosen = v.abs().topk(v.numel()).indices\n",
        BYTES,
        "too-many-entries",
    ),
    mutant(
        "velocity-kept",
        "the velocity is not cleared where something was sent",
        MASK,
        "",
        MOMENTUM,
        "velocity-not-cleared",
    ),
    mutant(
        "momentum-forgotten",
        "there is no momentum",
        WITH_MOMENTUM,
        "            v.add_(bucket.buffer)\n",
        MOMENTUM,
        "no-momentum",
    ),
    mutant(
        "momentum-after",
        "momentum is taken of what has arrived",
        WITH_MOMENTUM,
        "            v.add_(bucket.buffer)\n",
        MOMENTUM,
        "momentum-after-the-choice",
        (MASK, ""),
        (
            ADD,
            ADD + "            if self.momentum:\n"
            "                bucket.buffer.copy_(u.mul_(self.momentum).add_(bucket.buffer))\n",
        ),
    ),
    mutant(
        "momentum-twice",
        "momentum is taken before the choice, and once more of what has arrived",
        ADD,
        ADD + "            if self.momentum:\n"
        "                last = getattr(self, 'last', 0) * self.momentum + bucket.buffer\n"
        "                self.last = last.clone()\n"
        "                bucket.buffer.copy_(last)\n",
        MOMENTUM,
        "momentum-twice",
    ),
    mutant(
        "residual-by-bucket",
        "the residual belongs to the bucket: it is lost when buckets are made anew",
        JOINED,
        "        flat = torch.zeros_like(bucket.buffer)\n",
        ANEW,
        "wrong",
    ),
    mutant(
        "state-without-residual",
        "the residual is not saved",
        SAVED,
        '        return {"velocity": self.velocity.state_dict()}\n',
        STATE,
        "resume-differs",
        (LOADED, LOAD_VELOCITY),
    ),
    mutant(
        "state-without-velocity",
        "the velocity is not saved",
        SAVED,
        '        return {"residual": self.residual.state_dict()}\n',
        STATE,
        "resume-differs",
        (LOADED, LOAD_RESIDUAL),
    ),
    mutant(
        "state-not-loaded",
        "the state is saved and never used",
        LOADED,
        "        pass\n",
        STATE,
        "resume-differs",
    ),
    mutant(
        "state-is-no-copy",
        "BUGS 94: the state holds the tensors themselves, which training goes on to change",
        COPIES,
        "        return [*self.parts.values()]\n",
        STATE,
        "resume-differs",
    ),
    mutant(
        "state-by-parameter",
        "the state's keys are the parameters themselves: no file without pickle can hold it",
        SAVED,
        '        return {"residual": dict(self.residual.parts), "velocity": {}}\n',
        STATE,
        "not-a-tree",
    ),
    mutant(
        "numbered-as-they-come",
        "the state is in the order of the buckets, which is another one after a resume",
        JOINED,
        "        flat = torch.cat([self.parts.pop(p) for p in bucket.parameters])\n",
        STATE,
        "resume-differs",
    ),
    mutant(
        "empty-bucket",
        "an empty bucket asks for its largest entry",
        EMPTY,
        EMPTY.partition("None\n")[2],
        EDGES,
        "exception",
        (
            "    return min(numel, max(1, round(ratio * numel)))\n",
            "    return max(1, round(ratio * numel))\n",
        ),
    ),
    mutant(
        "group-ignored",
        "the default group is used",
        GATHER_VALUES,
        GATHER_VALUES.replace("self.group, ", ""),
        GROUP,
        "hang",
    ),
    mutant(
        "waits-in-hook",
        "BUGS 27: the hook waits, and backward stands still meanwhile",
        "        def add_up() -> None:\n            sent[1].wait()\n",
        "        sent[1].wait()\n\n        def add_up() -> None:\n",
        BEGINS,
        "hook-waits",
    ),
    mutant(
        "values-not-waited",
        "BUGS 22: only the places are waited for",
        "        return Then(sent[0], add_up)\n",
        "        return Then(sent[1], add_up)\n",
        BYTES,
        "never-waited",
    ),
    mutant(
        "sizes-not-compared",
        "a state of other parameters is loaded as far as it goes",
        "    if sizes != wanted:\n",
        "    if False:\n",
        BAD,
        "accepted",
    ),
    mutant(
        "half-loaded",
        "sizes are compared while the state is being written",
        "        check_sizes(state, [*self.parts.values()])\n"
        "        for part, saved in zip(self.parts.values(), state, strict=True):\n",
        "        for part, saved in zip(self.parts.values(), state, strict=True):\n"
        "            check_sizes([saved], [part])\n",
        HALF,
        "half-loaded",
    ),
    mutant(
        "ratio-not-checked",
        "any ratio is taken",
        "    if not 0 < ratio <= 1:\n",
        "    if ratio < 0:\n",
        BAD,
        "accepted",
    ),
]
