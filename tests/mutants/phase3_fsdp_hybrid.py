"""Wrong implementations of exercise 3.19."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="hybrid-not-across",
        exercise="3.19",
        mistake="the replicas never hear of each other and drift apart",
        text="""        across = dist.all_reduce(chunk, group=self.replicas, async_op=True)
        self.reducing = across, chunk, chunk
""",
        becomes="",
        caught_by="test_gradient_is_the_mean_over_all_ranks",
        told_as="missing-rank",
    ),
    Mutant(
        id="hybrid-inside-twice",
        exercise="3.19",
        mistake="the second reduction goes over the node again",
        text="        across = dist.all_reduce(chunk, group=self.replicas, async_op=True)\n",
        becomes="        across = dist.all_reduce(chunk, group=self.group, async_op=True)\n",
        caught_by="test_gradient_is_the_mean_over_all_ranks",
        told_as="wrong",
    ),
    Mutant(
        id="hybrid-summed-over-nodes",
        exercise="3.19",
        mistake="divided by the ranks of the node only",
        text="        return super().mean(chunk).div_(dist.get_world_size(self.replicas))\n",
        becomes="        return super().mean(chunk)\n",
        caught_by="test_gradient_is_the_mean_over_all_ranks",
        told_as="scaled",
    ),
    Mutant(
        id="hybrid-divided-by-the-world",
        exercise="3.19",
        mistake="divided by the node and by the world",
        text="        return super().mean(chunk).div_(dist.get_world_size(self.replicas))\n",
        becomes="        return super().mean(chunk).div_(dist.get_world_size())\n",
        caught_by="test_gradient_is_the_mean_over_all_ranks",
        told_as="scaled",
    ),
    Mutant(
        id="hybrid-reduced-across-first",
        exercise="3.19",
        mistake="whole vectors cross the network before they are cut",
        text="""        super().start_reduce()
        if self.reducing is None:
            return
""",
        becomes="""        joined = None
        if any(leaf.grad is not None for leaf in self.leaves):
            joined = self.reduce_input()
            dist.all_reduce(joined, group=self.replicas)
        super().start_reduce()
        if self.reducing is None:
            return
""",
        caught_by="test_bytes_inside_and_across",
        told_as="too-many-bytes-across",
    ),
    Mutant(
        id="hybrid-chunk-too-early",
        exercise="3.19",
        mistake="the chunk is all-reduced before the reduce-scatter has filled it",
        text="        work.wait()\n",
        becomes="        self.other = work\n",
        caught_by="test_training_equals_one_process",
        told_as="never-waited",
    ),
    Mutant(
        id="hybrid-own-groups-only",
        exercise="3.19",
        mistake="each rank makes only the groups that it is in",
        text="    inside = [dist.new_group(list(node)) for node in nodes]\n",
        becomes=(
            "    inside = [dist.new_group(list(node)) if rank in node else None for node in "
            "nodes]\n"
        ),
        caught_by="test_groups_are_nodes_and_peers",
        told_as="mismatch",
    ),
    Mutant(
        id="hybrid-swapped",
        exercise="3.19",
        mistake="sharded across the nodes, replicated inside",
        text="    return inside[rank // node_size], across[rank % node_size]\n",
        becomes="    return across[rank % node_size], inside[rank // node_size]\n",
        caught_by="test_groups_are_nodes_and_peers",
        told_as="groups",
    ),
    Mutant(
        id="hybrid-strided-nodes",
        exercise="3.19",
        mistake="a node's ranks are taken to be W/L apart",
        text="    return inside[rank // node_size], across[rank % node_size]\n",
        becomes="    return inside[rank % len(inside)], across[rank % node_size]\n",
        caught_by="test_groups_are_nodes_and_peers",
        told_as="groups",
    ),
    Mutant(
        id="hybrid-same-group",
        exercise="3.19",
        mistake=(
            "a node that is given as its own replicas is accepted: every gradient counts L times"
        ),
        text="        if len(both) != 1:\n",
        becomes="        if not both:\n",
        caught_by="test_wrong_groups_are_refused",
        told_as="accepted",
    ),
    Mutant(
        id="hybrid-sizes-not-checked",
        exercise="3.19",
        mistake="a node size that does not divide the world is noticed by whoever trips over it",
        text="    if node_size < 1 or world_size % node_size:\n",
        becomes="    if False:\n",
        caught_by="test_wrong_groups_are_refused",
        told_as="accepted",
    ),
    Mutant(
        id="hybrid-waits-at-once",
        exercise="3.19",
        mistake="the all-reduce across nodes is waited for where it is issued",
        text="        self.reducing = across, chunk, chunk\n",
        becomes="""        across.wait()
        done = type("Done", (), {"wait": lambda self: True})()
        self.reducing = done, chunk, chunk
""",
        caught_by="test_vectors_on_nodes_of_some_ranks",
        told_as="waited-at-once",
    ),
    Mutant(
        id="hybrid-mean-over-the-world",
        exercise="3.19",
        mistake="the sum is divided by all ranks of the world, also those of neither group",
        text="        return super().mean(chunk).div_(dist.get_world_size(self.replicas))\n",
        becomes="        return chunk.div_(dist.get_world_size())\n",
        caught_by="test_vectors_on_nodes_of_some_ranks",
        told_as=("scaled", "divided-by-all", "wrong"),
    ),
    Mutant(
        id="hybrid-zeros-stay",
        exercise="3.19",
        mistake="a chunk of zeros does not cross: its peers on other nodes wait for it",
        text="        across = dist.all_reduce(chunk, group=self.replicas, async_op=True)\n",
        becomes="""        if not chunk.any():
            return
        across = dist.all_reduce(chunk, group=self.replicas, async_op=True)
""",
        caught_by="test_vectors_on_nodes_of_some_ranks",
        told_as=("hang", "mismatch", "missing-rank"),
    ),
    Mutant(
        id="hybrid-groups-before-the-refusal",
        exercise="3.19",
        mistake="groups are made until the last node, which is not complete",
        text="    if node_size < 1 or world_size % node_size:\n",
        becomes="    if not 1 <= node_size <= world_size:\n",
        caught_by="test_wrong_groups_are_refused",
        told_as="accepted",
    ),
]
