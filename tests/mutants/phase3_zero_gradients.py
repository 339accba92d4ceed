"""Wrong implementations of exercise 3.14."""

from distlab.grading.wrong import mutants_of

TRAIN, PART = "test_training_equals_one_process", "test_gradients_are_one_part_of_w"
BYTES, OVERLAP = "test_bytes_of_a_step", "test_gradients_leave_during_backward"
GROUP, CLIP = "test_works_in_a_group", "test_clipping"
TWICE = "test_a_gradient_that_is_complete_twice_is_an_error"

SCATTER = """        chunk = torch.empty_like(vector.own)
        work = dist.reduce_scatter_tensor(chunk, joined, group=self.group, async_op=True)
"""
REDUCED = """        chunk = joined[dist.get_rank(self.group) * len(vector.own) :][: len(vector.own)]
        work = dist.all_reduce(joined, group=self.group, async_op=True)
"""
SQUARES = "        dist.all_reduce(squares, group=self.group)\n"

mutant = mutants_of("3.14", "zero2")

MUTANTS = [
    mutant(
        "all-reduced",
        "BUGS 72: gradients are all-reduced and cut afterwards: twice the bytes",
        SCATTER,
        REDUCED,
        BYTES,
        "too-many-bytes",
    ),
    mutant(
        "chunk-is-a-view",
        "BUGS 69: all-reduced, and the part is a view: the whole gradient stays alive",
        SCATTER,
        REDUCED,
        PART,
        "too-much-memory",
    ),
    mutant(
        "at-the-end",
        "BUGS 27: nothing leaves before backward is done: all gradients are there at once",
        "        while len(self.left) < len(self.vectors):\n",
        "        while False:\n",
        OVERLAP,
        "no-overlap",
    ),
    mutant(
        "local-norm",
        "BUGS 39: every rank clips by the norm of its own part",
        SQUARES,
        "",
        TRAIN,
        "norm",
    ),
    mutant(
        "norm-of-norms",
        "BUGS 39: norms are summed over the ranks, not their squares",
        "        norm = squares.sqrt()\n",
        "        norm = squares\n",
        TRAIN,
        "norm",
        (SQUARES, "        squares = squares.sqrt()\n" + SQUARES),
    ),
    mutant(
        "summed",
        "BUGS 20: the sum over the ranks, not the mean",
        "        chunk.div_(dist.get_world_size(self.group))\n",
        "",
        TRAIN,
        "norm",
    ),
    mutant(
        "accumulation-lost",
        "BUGS 57: a second backward replaces what the first has left",
        "            vector.gradient += chunk\n",
        "            vector.gradient = chunk\n",
        TRAIN,
        "norm",
    ),
    mutant(
        "never-cleared",
        "zero_grad leaves the vector's gradient: every step adds to the last one's",
        "            vector.gradient = None\n",
        "            vector.own.grad = None\n",
        PART,
        "not-cleared",
    ),
    mutant(
        "unused-stepped",
        "a parameter that no rank has used gets zeros: weight decay moves it",
        "                if piece.whole in anyone:\n",
        "                if anyone:\n",
        TRAIN,
        "moved",
    ),
    mutant(
        "last-never-leaves",
        "BUGS 28: a vector with an unused parameter is never sent",
        "            self._leave(vector)\n        parameters",
        "            pass\n        parameters",
        TRAIN,
        "exception",
    ),
    mutant(
        "all-on-their-way",
        "nobody waits before the end of backward: all joined gradients are alive",
        "        if len(self.reducing) > 1:\n",
        "        if False:\n",
        PART,
        "high-peak",
    ),
    mutant(
        "second-gradient-lost",
        "a gradient that is complete twice is taken once, or too late",
        "        if p in self.arrived:\n",
        "        if False:\n",
        TWICE,
        "twice-accepted",
    ),
    mutant(
        "default-group",
        "the reduce-scatter ignores the group",
        "joined, group=self.group, async_op=True",
        "joined, async_op=True",
        GROUP,
        "hang",
    ),
    mutant(
        "norm-in-half",
        "BUGS 76: squares are summed in the gradients' dtype: in float16 they overflow",
        "dtypes, torch.float32)",
        "dtypes)",
        CLIP,
        "norm-dtype",
    ),
    mutant(
        "enlarged",
        "BUGS 39: gradients are scaled to the limit also where their norm is below it",
        ".clamp(max=1.0)",
        "",
        CLIP,
        "enlarged",
    ),
]
