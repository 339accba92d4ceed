"""Wrong implementations of exercise 3.19."""

from distlab.grading.wrong import mutants_of

GROUPS, MEAN_OF_ALL = (
    "test_groups_are_nodes_and_places",
    "test_gradient_is_the_mean_over_all_ranks",
)
TRAIN, BYTES = "test_training_equals_one_process", "test_bytes_inside_and_across"
WRONG = "test_wrong_groups_are_refused"

ACROSS = "        across = dist.all_reduce(chunk, group=self.replicas, async_op=True)\n"
WAIT = "        work.wait()\n"
MEAN = "        return super().mean(chunk).div_(dist.get_world_size(self.replicas))\n"
NODES = "    inside = [dist.new_group(list(node)) for node in nodes]\n"
RETURN = "    return inside[rank // node_size], across[rank % node_size]\n"
SUPER = "        super().start_reduce()\n        if self.reducing is None:\n            return\n"

mutant = mutants_of("3.19", "hybrid")

MUTANTS = [
    mutant(
        "not-across",
        "the replicas never hear of each other and drift apart",
        ACROSS + "        self.reducing = across, chunk, chunk\n",
        "",
        MEAN_OF_ALL,
        "missing-rank",
    ),
    mutant(
        "inside-twice",
        "the second reduction goes over the node again",
        ACROSS,
        ACROSS.replace("self.replicas", "self.group"),
        MEAN_OF_ALL,
        "wrong",
    ),
    mutant(
        "summed-over-nodes",
        "BUGS 20: divided by the ranks of the node only",
        MEAN,
        "        return super().mean(chunk)\n",
        MEAN_OF_ALL,
        "scaled",
    ),
    mutant(
        "divided-by-the-world",
        "BUGS 21: divided by the node and by the world",
        MEAN,
        "        return super().mean(chunk).div_(dist.get_world_size())\n",
        MEAN_OF_ALL,
        "scaled",
    ),
    mutant(
        "reduced-across-first",
        "whole vectors cross the network before they are cut",
        SUPER,
        "        joined = None\n"
        "        if any(leaf.grad is not None for leaf in self.leaves):\n"
        "            joined = self.reduce_input()\n"
        "            dist.all_reduce(joined, group=self.replicas)\n" + SUPER,
        BYTES,
        "too-many-bytes-across",
    ),
    mutant(
        "chunk-too-early",
        "BUGS 22: the chunk is all-reduced before the reduce-scatter has filled it",
        WAIT,
        "        self.other = work\n",
        TRAIN,
        "never-waited",
    ),
    mutant(
        "own-groups-only",
        "each rank makes only the groups that it is in",
        NODES,
        "    inside = [dist.new_group(list(node)) if rank in node else None for node in nodes]\n",
        GROUPS,
        "mismatch",
    ),
    mutant(
        "swapped",
        "sharded across the nodes, replicated inside",
        RETURN,
        "    return across[rank % node_size], inside[rank // node_size]\n",
        GROUPS,
        "groups",
    ),
    mutant(
        "strided-nodes",
        "a node's ranks are taken to be W/L apart",
        RETURN,
        "    return inside[rank % len(inside)], across[rank % node_size]\n",
        GROUPS,
        "groups",
    ),
    mutant(
        "same-group",
        "a node that is given as its own replicas is accepted: every gradient counts L times",
        "        if len(both) != 1:\n",
        "        if not both:\n",
        WRONG,
        "accepted",
    ),
    mutant(
        "sizes-not-checked",
        "a node size that does not divide the world is noticed by whoever trips over it",
        "    if node_size < 1 or world_size % node_size:\n",
        "    if False:\n",
        WRONG,
        "unclear-message",
    ),
]
